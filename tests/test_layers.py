"""The folders import one way, and each third-party package only where the design lets it in."""

from __future__ import annotations

import ast
import fnmatch
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

from kvtier.tier.node import recording as recorded_node

ROOT = Path(__file__).resolve().parents[1]

# folder -> which of our folders it may import, itself aside
MAY_IMPORT = {
    "proto": set(),
    "kernels": set(),
    "tier": set(),
    "workers": {"tier", "kernels", "proto"},
    "cluster": {"tier", "workers", "proto"},
    "lab": {"tier", "workers", "cluster"},
    "cli": {"tier", "workers", "proto", "cluster", "kernels", "lab"},
}
# package -> the only files that may import it; what is not named here is free
ONLY_IN = {
    "triton": ["kernels/*"],
    "lmdb": ["tier/stores/ssd/catalogue.py"],
    "ray": ["cluster/*", "workers/actor.py"],
    "grpc": ["proto/*", "cluster/gateway/*", "cluster/transfer/*", "src/kvtier/cli/client.py"],
    "grpc_health": ["cluster/gateway/*", "src/kvtier/cli/client.py"],
    "grpc_reflection": ["cluster/gateway/*"],
    "google": ["proto/*", "cluster/gateway/*", "cluster/transfer/*"],
    "transformers": ["workers/models/*"],
    "tokenizers": ["workers/models/*"],
    "huggingface_hub": ["workers/models/*"],
    "gguf": ["workers/models/*"],
    "matplotlib": ["src/kvtier/lab/quality.py", "src/kvtier/lab/plots.py"],
    "typer": ["src/kvtier/*"],
    "rich": ["src/kvtier/*"],
}
# folder -> packages that it never imports, whatever ONLY_IN says
NEVER = {
    "proto": {"torch"},
    "kernels": {"ray", "grpc", "lmdb"},
    "tier": {"ray", "grpc", "triton"},
    "cluster": {"triton", "lmdb"},
}
IMPURE_MODULES = {
    "time",
    "threading",
    "random",
    "os",
    "socket",
    "subprocess",
    "mmap",
    "asyncio",
    "multiprocessing",
}


_SAYS_PURE = re.compile(r"\bPure\b")


def is_pure(source: str) -> bool:
    """A module says so in the first paragraph of its docstring: "Pure", and then it has no clock, thread or I/O."""
    said = ast.get_docstring(ast.parse(source)) or ""
    return bool(_SAYS_PURE.search(said.split("\n\n")[0]))


def sources() -> list[Path]:
    """All Python files of the package by their places in the repository, generated ones aside."""
    folders = ["proto", "kernels", "tier", "workers", "cluster", "src/kvtier"]
    files = [file for folder in folders for file in sorted((ROOT / folder).rglob("*.py"))]
    real = {file.resolve() for file in files}
    return sorted(file for file in real if "_pb2" not in file.name)


def imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and full dotted name of each import, those inside functions and under TYPE_CHECKING too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def _folder_of(path: str) -> str:
    if path.startswith("src/kvtier/lab/"):
        return "lab"
    return "cli" if path.startswith("src/") else path.split("/")[0]


def violations(path: str, source: str) -> list[str]:
    """What a file at `path`, relative to the repository, imports against the rules."""
    folder = _folder_of(path)
    found = []
    for line, name in imported(ast.parse(source)):
        package, _, rest = name.partition(".")
        ours = rest.split(".")[0] if package == "kvtier" else ""
        if package in MAY_IMPORT or (
            ours in MAY_IMPORT and ours != folder and ours not in MAY_IMPORT[folder]
        ):
            found.append(f"{path}:{line} imports {name}: {folder} may import {sorted(MAY_IMPORT[folder])}")
        if package in NEVER.get(folder, ()):
            found.append(f"{path}:{line} imports {name}, which {folder} never does")
        if package in ONLY_IN and not any(fnmatch.fnmatch(path, pattern) for pattern in ONLY_IN[package]):
            found.append(f"{path}:{line} imports {name}, which only {ONLY_IN[package]} may")
        if package in IMPURE_MODULES and is_pure(source):
            found.append(f"{path}:{line} imports {name}, but the file says that it is pure")
    return found


DECIDES = '"""Decides something. Pure."""\n'


def test_every_file_keeps_to_its_layer() -> None:
    files = sources()

    found = [v for file in files for v in violations(str(file.relative_to(ROOT)), file.read_text())]

    assert len(files) > 30
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("tier/l1/prefix.py", "from kvtier.workers.requests.api import Usage"),
        ("kernels/ops.py", "import kvtier.tier.pages.page"),
        ("workers/engine/worker.py", "def late():\n    from kvtier.cluster import launch"),
        ("cluster/supervisor/launch.py", "from kvtier.cli import common"),
        ("cluster/node.py", "from kvtier import kernels"),
        ("cluster/node.py", "import tier.page"),
        ("proto/x.py", "import torch"),
        ("tier/node/service.py", "import ray"),
        ("tier/stores/host.py", "import lmdb"),
        ("tier/stores/ssd/store.py", "import lmdb"),
        ("workers/engine/worker.py", "import ray"),
        ("workers/runner/runner.py", "from transformers import AutoConfig"),
        ("workers/models/base.py", "import triton.language as tl"),
        ("cluster/supervisor/launch.py", "from rich.console import Console"),
        ("src/kvtier/cli/up.py", "import ray"),
        ("tier/node/coordinator.py", DECIDES + "from time import monotonic"),
        ("src/kvtier/lab/replay/baselines/arc.py", DECIDES + "import random"),
        ("src/kvtier/lab/replay/baselines/arc.py", "from kvtier.cli import common"),
        ("tier/node/service.py", "from kvtier.lab.replay.replay import replay"),
        ("cluster/gateway/actor.py", "def late():\n    from kvtier.lab import quality"),
        ("src/kvtier/lab/replay/jobs.py", "import kvtier.cli.replay"),
        ("workers/scheduling/scheduler.py", DECIDES + "import threading"),
        ("cluster/config/deployment.py", DECIDES + "import os"),
    ],
)
def test_a_planted_violation_is_seen(path: str, source: str) -> None:
    assert violations(path, source)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        (
            "workers/engine/worker.py",
            "from kvtier.tier.pages.page import PageSpec\nfrom kvtier.workers.requests.api import Usage",
        ),
        ("tier/stores/ssd/catalogue.py", "import lmdb\nimport os"),
        ("cluster/node.py", "import ray\nfrom kvtier.tier.node.service import CacheService"),
        ("src/kvtier/cli/up.py", "import typer\nfrom kvtier.cluster.config.deployment import load_config"),
        ("workers/models/files/files.py", "import transformers"),
    ],
)
def test_what_the_design_allows_passes(path: str, source: str) -> None:
    assert violations(path, source) == []


def imports_by_sibling(folder: Path, files: Iterable[Path]) -> dict[str, set[str]]:
    """Of the modules and packages in a folder: which of the others each imports, at any depth; not those for types alone."""
    package = ["kvtier", *folder.relative_to(ROOT).parts]
    found: dict[str, set[str]] = {}
    for file in files:
        if not file.is_relative_to(folder):
            continue
        name = file.relative_to(folder).with_suffix("").parts[0]
        tree = ast.parse(file.read_text())
        typed = {id(node) for at in ast.walk(tree) if is_for_types(at) for node in ast.walk(at)}
        nodes = ast.Module([node for node in ast.walk(tree) if id(node) not in typed and is_import(node)], [])
        for _, imports in imported(nodes):
            parts = imports.split(".")
            if parts[: len(package)] == package and len(parts) > len(package):
                found.setdefault(name, set()).add(parts[len(package)])
    return {name: others - {name} for name, others in found.items()}


def is_import(node: ast.AST) -> bool:
    return isinstance(node, ast.Import | ast.ImportFrom)


def is_for_types(node: ast.AST) -> bool:
    """`if TYPE_CHECKING:`"""
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def circle_in(imports: Mapping[str, set[str]]) -> list[str]:
    """Names that import each other in a circle; [] when there is none."""
    left = {name: set(others) for name, others in imports.items()}
    while leaves := [name for name, others in left.items() if not others & left.keys()]:
        for name in leaves:
            del left[name]
    return sorted(left)


FOLDERS = sorted(
    {
        parent
        for file in sources()
        for parent in file.relative_to(ROOT).parents
        if parent.parts[:1] in (("tier",), ("workers",), ("cluster",))
    }
)


@pytest.mark.parametrize("folder", FOLDERS, ids=str)
def test_what_lies_side_by_side_in_a_folder_imports_one_way(folder: Path) -> None:
    imports = imports_by_sibling(ROOT / folder, sources())
    if folder == Path("workers/runner"):
        imports["warm_up"].discard("runner")  # which imports it only once it is called

    assert circle_in(imports) == []


def test_a_circle_is_seen() -> None:
    assert circle_in({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == ["a", "b", "c", "d"]
    assert circle_in({"a": {"b"}, "b": {"c"}, "d": {"a"}}) == []


@pytest.mark.parametrize("folder", FOLDERS, ids=str)
def test_a_folder_has_few_names_and_says_what_it_holds(folder: Path) -> None:
    names = {part.name for part in (ROOT / folder).iterdir() if part.suffix == ".py" or part.is_dir()}
    names -= {"__init__.py", "__pycache__"}

    assert len(names) <= 12, sorted(names)
    if len(folder.parts) > 1:
        assert ast.get_docstring(ast.parse((ROOT / folder / "__init__.py").read_text()))


def test_what_a_recording_runs_again_says_that_it_is_pure() -> None:
    """Run again it must give the same answers. tier/l1/arena.py is there for its allocator."""
    modules = set(recorded_node.MODULES) - {
        "kvtier.tier.l1.arena",
        "kvtier.tier.l1.frame_fences",
    }
    files = {ROOT.joinpath(*name.split(".")[1:]).with_suffix(".py") for name in modules}

    assert [str(file) for file in sorted(files) if not is_pure(file.read_text())] == []


def test_no_folder_that_ray_puts_on_the_path_is_a_regular_package() -> None:
    """Ray puts the working directory first on every worker's path; an __init__.py here would shadow others' packages."""
    assert not [folder for folder in MAY_IMPORT if (ROOT / folder / "__init__.py").exists()]
