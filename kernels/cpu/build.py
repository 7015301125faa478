"""Compiles our CPU kernels for this machine: once, into a cache folder, by one call of a C++ compiler."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from hashlib import blake2b
from pathlib import Path

log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent
MAIN_SOURCE = "engine.cpp"
COMPILERS = ("g++", "c++", "clang++")
# No -ffast-math: it flushes subnormals in the whole process and lets sums be reordered.
FLAGS = (
    "-std=c++20",
    "-O3",
    "-ffp-contract=fast",
    "-fvisibility=hidden",
    "-fPIC",
    "-shared",
    "-pthread",
    "-Wno-psabi",
)
TIMEOUT_S = 300


class BuildError(Exception):
    """The kernels can't be compiled here; plain torch serves instead."""


def load_library(cache_dir: Path, march: str = "native") -> ctypes.CDLL:
    """Our kernels as a shared library, compiled on first use. Raises BuildError naming what is missing."""
    compiler, version = find_compiler()
    target = cache_dir / "kernels" / f"{build_digest(version, march)}.so"
    if not target.is_file():
        _compile(compiler, march, target)
    try:
        return ctypes.CDLL(str(target))
    except OSError as error:
        raise BuildError(f"can't load {target}: {error}") from error


def find_compiler() -> tuple[str, str]:
    """The first C++ compiler on the path and its version line. Raises BuildError when there is none."""
    for name in COMPILERS:
        path = shutil.which(name)
        if path is None:
            continue
        try:
            done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30, check=True)
        except (OSError, subprocess.SubprocessError):
            continue
        return path, done.stdout.splitlines()[0] if done.stdout else name
    raise BuildError(f"no C++ compiler on the path ({', '.join(COMPILERS)})")


def build_digest(compiler_version: str, march: str) -> str:
    """Names a build: sources, compiler, flags, and the CPU whose instructions it may use."""
    h = blake2b(digest_size=16)
    for part in (compiler_version, march, *FLAGS, platform.machine(), _cpu_flags()):
        h.update(part.encode() + b"\0")
    for source in sorted(SOURCES.glob("*.[ch]pp")):
        h.update(source.name.encode() + b"\0" + source.read_bytes())
    return h.hexdigest()


def _cpu_flags() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.lower().startswith(("flags", "features"))), "")


def _compile(compiler: str, march: str, target: Path) -> None:
    log.info("compiling the CPU kernels with %s, once, into %s", Path(compiler).name, target)
    flag = f"-march={march}" if platform.machine() in ("x86_64", "AMD64") else f"-mcpu={march}"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".build-") as scratch:
            built = Path(scratch) / target.name
            command = [compiler, *FLAGS, flag, str(SOURCES / MAIN_SOURCE), "-o", str(built)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
            if done.returncode:
                first = next(
                    (line for line in done.stderr.splitlines() if "error" in line), done.stderr[:200]
                )
                raise BuildError(f"{Path(compiler).name} failed: {first}")
            os.replace(built, target)
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"can't compile the CPU kernels: {error}") from error
