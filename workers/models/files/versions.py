"""Which code computes pages: the versions of the libraries it stands on, and a digest of our own."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path

from kvtier.kernels import ops

_FORWARDS = (
    "base",
    "formats",
    "files/quantized",
    "files/weights",
    "forwards/latent",
    "forwards/lean",
    "forwards/rope",
    "forwards/transformers",
)


def versions() -> dict[str, str]:
    """Fields of a root: pages that other code computed may differ in their bits, so they are never found."""
    return {
        "torch": version("torch"),
        "transformers": version("transformers"),
        "forward_code": code_digest(tuple(forward_sources())),
    }


def forward_sources() -> list[Path]:
    """The files of our own that a page's bytes come out of, by their names in the package."""
    models, kernels = Path(__file__).parents[1], Path(ops.__file__).parent
    compiled = [file for file in kernels.rglob("*") if file.suffix in (".py", ".cpp", ".hpp")]
    return sorted([*(models / f"{name}.py" for name in _FORWARDS), *compiled])


@cache
def code_digest(files: Iterable[Path]) -> str:
    """blake2b in hex over files, each with its folder's and its own name."""
    h = blake2b(digest_size=16, person=b"kvtier.code")
    for file in files:
        h.update(f"{file.parent.name}/{file.name}\0".encode() + blake2b(file.read_bytes()).digest())
    return h.hexdigest()
