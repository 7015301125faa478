"""Says what one compiled form of a Triton kernel is: the ahead-of-time gate compiles a list of these."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Target = Literal["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942"]

DIVISIBLE_BY_16 = [
    ["tt.divisibility", 16]
]  # what the launcher finds of aligned pointers and strides by itself


MAX_STACK_BYTES = 128  # of a kernel in the gate, where a variant doesn't say otherwise


@dataclass(frozen=True, slots=True)
class AotVariant:
    """A kernel with types and constants for one target; the fields are those of triton's ASTSource and compile().

    `tile_tokens` above 0: the kernel's hot loop works through tiles of so many tokens, and its issue cycles per
    64 tokens belong in the gate's table. Products of wide float32 rows need a larger stack than others: without matrix
    instructions a thread holds a whole row.
    """

    name: str  # unique within a target
    kernel: Any  # triton JITFunction
    signature: dict[str, str]  # every argument in order; "constexpr" for those in `constexprs`
    constexprs: dict[str, Any]
    attrs: dict[tuple[int, ...], Any] = field(default_factory=dict)  # by position of the argument
    options: dict[str, Any] = field(default_factory=dict)  # num_warps, num_stages
    tile_tokens: int = 0
    max_stack_bytes: int = MAX_STACK_BYTES


def make_variant(
    name: str,
    kernel: Any,
    types: dict[str, str],
    constexprs: dict[str, Any],
    options: dict[str, Any],
    tile_tokens: int = 0,
    max_stack_bytes: int = MAX_STACK_BYTES,
) -> AotVariant:
    """A variant from the types of the arguments that are no constants.

    A type ending in ":16" is divisible by 16, as pointers of fresh tensors and most strides are.
    """
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    missing = [name for name, type in signature.items() if type == "constexpr" and name not in constexprs]
    if missing or set(types) - set(signature):
        raise ValueError(
            f"{name}: no type or constant for {missing}, no argument {sorted(set(types) - set(signature))}"
        )
    attrs: dict[tuple[int, ...], Any] = {
        (i,): DIVISIBLE_BY_16 for i, type in enumerate(signature.values()) if type.endswith(":16")
    }
    signature = {name: type.removesuffix(":16") for name, type in signature.items()}
    return AotVariant(name, kernel, signature, constexprs, attrs, options, tile_tokens, max_stack_bytes)
