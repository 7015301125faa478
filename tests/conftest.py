"""Fixtures that several folders of tests share: small models made on the spot, and the real demo model."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import hypothesis
import pytest

# How long an example takes says how busy the machine is, and nothing else.
hypothesis.settings.register_profile(
    "kvtier", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("kvtier")

# Two cores: the tests' own torch must not spin threads against the services they start.
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # nodes that record in this process fork it
os.environ.setdefault("HF_HUB_OFFLINE", "1")
for name in ("COLUMNS", "LINES"):  # of the terminal that pytest-xdist was started in
    os.environ.pop(name, None)

HERE = Path(__file__).parent
for folder in (HERE / "kits", HERE / "kernels"):
    sys.path.insert(0, str(folder))
    pytest.register_assert_rewrite(*(file.stem for file in folder.glob("*.py")))  # they say both sides too

import triton_kit  # noqa: F401  # before a test imports what imports triton


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder of this test's own whose name leaves room for sockets in it: their paths have 107 bytes at most."""
    with TemporaryDirectory(prefix="kv") as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny random Llama (float32, no tokenizer)."""
    from tiny_models import make_tiny_llama

    folder = tmp_path_factory.mktemp("tiny-llama")
    make_tiny_llama(folder)
    return folder


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """Folder of SmolLM2-135M-Instruct, pulled once into the user's cache as `kvtier model pull` does."""
    from kvtier.workers.models.files.store import default_cache, pull

    return pull("smollm2-135m-instruct", cache=default_cache())
