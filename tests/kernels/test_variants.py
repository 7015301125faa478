"""The forms that the ahead-of-time gate compiles are those that launches get, whatever their numbers."""

from __future__ import annotations

import inspect

import pytest

from kvtier.kernels import aot
from kvtier.kernels.variants import AotVariant

VARIANTS = aot.variants("sm_90")


def any_number(variant: AotVariant) -> set[str]:
    """Integers and pointers of which the compiled form assumes nothing."""
    return {
        name
        for i, (name, type) in enumerate(variant.signature.items())
        if type.startswith(("i", "u", "*")) and (i,) not in variant.attrs
    }


@pytest.mark.parametrize("name", VARIANTS)
def test_a_kernel_is_not_compiled_again_while_it_serves(name: str) -> None:
    """Triton makes a form of its own for an integer that is 1 or divisible by 16, and for an aligned pointer."""
    variant = VARIANTS[name]

    unspecialized = variant.kernel.kwargs["do_not_specialize"] or []

    assert any_number(variant) == set(unspecialized)


@pytest.mark.parametrize("name", VARIANTS)
def test_offsets_that_outgrow_32_bits_are_always_64_bits(name: str) -> None:
    """An integer without a declared type becomes 64 bits wide, and the kernel another one, where its number needs it."""
    variant = VARIANTS[name]
    parameters = inspect.signature(variant.kernel.fn).parameters

    wide = {argument for argument, type in variant.signature.items() if type == "i64"}

    assert wide == {name for name, p in parameters.items() if "int64" in str(p.annotation)}
