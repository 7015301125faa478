"""What transformers computes for the probe's text: in a process of its own, and kept for the next start.

transformers' modules of a model take as much memory as the model and some hundred MB of code, none of which a worker
with a forward of our own needs once it has been compared with them. So that memory is another process's, which ends.
Its result is kept under a digest of all that it depends on, so a worker that starts again compares its forward with it
and loads nothing of transformers' modules. A kept result that is damaged, or that the forward differs from, is computed
again before it counts.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from kvtier.workers.models.base import ModelShape
from kvtier.workers.models.files.files import weights_fingerprint
from kvtier.workers.models.files.versions import versions
from kvtier.workers.models.files.weights import Checkpoint
from kvtier.workers.models.forwards.probe import PROBE_TOKENS, check_probe, own_logits
from kvtier.workers.models.forwards.rope import Rope
from kvtier.workers.models.forwards.transformers import ATTENTION_NAME, load_modules

log = logging.getLogger(__name__)

KEPT = 8  # results in a cache folder, each 88 bytes for each word of the vocabulary
_FOLDER = "expected"
_REFUSED = 3  # exit status of the other process where its last line says why the model is refused


@dataclass(frozen=True, slots=True)
class Expected:
    """Logits of the probe's text, float32 [tokens, vocab] on the CPU, and the rope of transformers' modules."""

    logits: torch.Tensor
    inv_freq: torch.Tensor
    scaling: float


class Reference:
    """What transformers computes of a model's weights, for its forward to be compared with."""

    def __init__(
        self, files: Checkpoint, shape: ModelShape, dtype: torch.dtype, device: torch.device, cache_dir: Path
    ) -> None:
        self._files, self._shape, self._dtype, self._device = files, shape, dtype, device
        self._cache = cache_dir
        self._key = _key(files.folder, shape, dtype, device, cache_dir)
        self._result: Expected | None = None
        self._is_kept = False

    def prepare(self) -> None:
        """Take the result of an earlier start, or compute it. Raises ValueError when the weights don't fit the config."""
        kept = _kept(self._key, self._cache)
        self._result = kept if kept is not None and _is_sound(kept, self._shape.vocab_size) else None
        self._is_kept = self._result is not None
        if self._result is None:
            self._result = expected(self._files, self._dtype, self._device)

    def compare(self, ours: torch.Tensor, rope: Rope) -> None:
        """Raise ValueError unless the logits `ours` are the same. A kept result is never why a model is refused."""
        assert self._result is not None
        try:
            _compare(ours, self._result, rope, self._shape, self._dtype)
        except ValueError as error:
            if not self._is_kept:
                raise
            log.warning("computed again by transformers, since what was kept of it differs: %s", error)
            self._is_kept = False
            self._result = expected(self._files, self._dtype, self._device)
            _compare(ours, self._result, rope, self._shape, self._dtype)
        if not self._is_kept:
            _keep(self._key, self._result, self._cache)


def _compare(ours: torch.Tensor, theirs: Expected, rope: Rope, shape: ModelShape, dtype: torch.dtype) -> None:
    """Raise ValueError unless a model's logits of the probe's text, and its rope, are those of transformers."""
    if not rope.is_of(theirs.inv_freq, theirs.scaling):
        raise ValueError(
            f"{shape.architecture} isn't supported: its rope isn't the one that was computed for it"
        )
    check_probe(shape.architecture, theirs.logits, ours, dtype, routed=False)


def compute_expected(files: Checkpoint, dtype: torch.dtype, device: torch.device) -> Expected:
    """Load transformers' modules of a checkpoint, compute, and let them go.

    Raises ValueError unless the files hold each of the model's tensors in its shape.
    """
    modules = load_modules(files, dtype)
    rope = modules.base_model.rotary_emb
    inv_freq, scaling = rope.inv_freq.detach().cpu(), float(rope.attention_scaling)
    logits = own_logits(modules.eval().to(device), device, ATTENTION_NAME).cpu()
    return Expected(logits, inv_freq, scaling)


def expected(files: Checkpoint, dtype: torch.dtype, device: torch.device) -> Expected:
    """As compute_expected, in another process; in this one where transformers' modules are loaded already."""
    if "transformers.modeling_utils" in sys.modules:
        return compute_expected(files, dtype, device)
    return _expected_elsewhere(files.folder, dtype, device)


def _key(folder: Path, shape: ModelShape, dtype: torch.dtype, device: torch.device, cache_dir: Path) -> str:
    """Digest, in hex, of what a result depends on: weights, settings, code, dtype and device."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    weights = weights_fingerprint(folder, cache_dir)
    fields = json.dumps([weights, shape.config_digest, sorted(versions().items()), str(dtype), name])
    return blake2b(fields.encode(), digest_size=16, person=b"kvtier.expected").hexdigest()


def _is_sound(kept: Expected, vocab: int) -> bool:
    """Whether a kept result has the form of one: it may be whole and come from elsewhere."""
    logits, inv_freq = kept.logits, kept.inv_freq
    return (
        logits.shape == (PROBE_TOKENS, vocab)
        and logits.dtype == torch.float32
        and inv_freq.dim() == 1
        and inv_freq.is_floating_point()
        and bool(logits.isfinite().all())
    )


def _kept(key: str, cache_dir: Path) -> Expected | None:
    """The result that was kept under a key; None where there is none, or none that is whole."""
    file = cache_dir / _FOLDER / f"{key}.safetensors"
    try:
        found = _read(file.read_bytes(), key)
        os.utime(file)  # those used longest ago are removed first
    except OSError:
        return None
    if found is None:
        log.info("%s is damaged and isn't used", file)
    return found


def _keep(key: str, result: Expected, cache_dir: Path) -> None:
    """Keep a result, and KEPT of all at most. A folder that can't be written only costs time at the next start."""
    folder = cache_dir / _FOLDER
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=folder, prefix=".expected-")
        with os.fdopen(handle, "wb") as stream:
            stream.write(_written(result, key))
        os.replace(name, folder / f"{key}.safetensors")
        kept = sorted(folder.glob("*.safetensors"), key=lambda file: file.stat().st_mtime_ns)
        for file in kept[:-KEPT]:
            file.unlink(missing_ok=True)
    except OSError as error:
        log.info("the logits that a model is compared with aren't kept: %s", error)


def _written(result: Expected, key: str) -> bytes:
    from safetensors.torch import save

    body = save(
        {"logits": result.logits.contiguous(), "inv_freq": result.inv_freq.contiguous()},
        {"scaling": repr(result.scaling), "key": key},
    )
    return _digest(body) + body


def _read(data: bytes, key: str) -> Expected | None:
    from safetensors import SafetensorError
    from safetensors.torch import load

    digest, body = data[:32], data[32:]
    if _digest(body) != digest:
        return None
    try:
        tensors = load(body)
        header = json.loads(body[8 : 8 + int.from_bytes(body[:8], "little")])["__metadata__"]
        if header["key"] != key:
            return None
        return Expected(tensors["logits"], tensors["inv_freq"], float(header["scaling"]))
    except (SafetensorError, KeyError, ValueError, TypeError):
        return None


def _digest(body: bytes) -> bytes:
    return blake2b(body, digest_size=32).digest()


# ---- the other process -----------------------------------------------------------------------------------------


def _expected_elsewhere(folder: Path, dtype: torch.dtype, device: torch.device) -> Expected:
    # It finds modules where this process does, which may have been told so after its own start.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    names = [str(folder), str(dtype).removeprefix("torch."), str(device), str(torch.get_num_threads())]
    command = [sys.executable, "-m", "kvtier.workers.models.forwards.reference", *names]
    # Its standard input stays open for as long as this process lives, and it ends when that is closed.
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    ) as child:
        try:
            out, said = _outputs(child)
        except BaseException:
            child.kill()
            raise
    if child.returncode == _REFUSED:
        raise ValueError(said.decode(errors="replace").rstrip("\n").rpartition("\n")[2])
    result = _read(out, "") if child.returncode == 0 else None
    if result is None:
        tail = said.decode(errors="replace").strip()[-2000:]
        how = f"signal {-child.returncode}" if child.returncode < 0 else f"status {child.returncode}"
        hint = (
            "; the kernel ends processes so that need more memory than there is"
            if child.returncode == -9
            else ""
        )
        raise RuntimeError(
            f"the process that loads {folder} by transformers, to compare its logits with, ended with {how}{hint}: {tail}"
        )
    return result


def _outputs(child: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
    """All that it writes, its standard input being left open meanwhile."""
    assert child.stdout is not None and child.stderr is not None
    said: list[bytes] = []
    reader = threading.Thread(target=lambda stream: said.append(stream.read()), args=(child.stderr,))
    reader.start()
    out = child.stdout.read()
    reader.join()
    return out, b"".join(said)


def _main(folder: str, dtype: str, device: str, threads: str) -> int:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(int(threads))
    compute: Any = getattr(torch, dtype)
    try:
        result = compute_expected(Checkpoint(Path(folder)), compute, torch.device(device))
    except ValueError as error:
        print(" ".join(str(error).split("\n")), file=sys.stderr)
        return _REFUSED
    sys.stdout.buffer.write(_written(result, ""))
    sys.stdout.buffer.flush()
    return 0


def _end_with_parent() -> None:
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
