"""The folders import one way, and each third-party package only where the design lets it in."""

from __future__ import annotations

import ast
import fnmatch
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# folder -> which of our folders it may import, itself aside
MAY_IMPORT = {
    "proto": set(),
    "kernels": set(),
    "tier": set(),
    "workers": {"tier", "kernels", "proto"},
    "cluster": {"tier", "workers", "proto"},
    "cli": {"tier", "workers", "proto", "cluster", "kernels"},
}
# package -> the only files that may import it; what is not named here is free
ONLY_IN = {
    "triton": ["kernels/*"],
    "lmdb": ["tier/ssd_lmdb.py"],
    "ray": ["cluster/*", "workers/actor.py"],
    "grpc": [
        "proto/*",
        "workers/transfer.py",
        "cluster/gateway*.py",
        "cluster/exchange*.py",
        "src/kvtier/cli/client.py",
    ],
    "grpc_health": ["cluster/gateway*.py", "src/kvtier/cli/client.py"],
    "grpc_reflection": ["cluster/gateway*.py"],
    "google": ["proto/*", "cluster/gateway*.py", "cluster/exchange*.py"],
    "transformers": ["workers/model*.py"],
    "tokenizers": ["workers/model*.py"],
    "huggingface_hub": ["workers/model*.py"],
    "gguf": ["workers/model*.py"],
    "matplotlib": ["src/kvtier/quality.py", "src/kvtier/plots.py"],
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
PURE_WORKERS = (
    *("sequence", "page_table", "scheduler"),
    *("frames", "page_cache", "page_pool", "pooled_pages"),
    *("ghosts", "ranks", "turns", "costs", "expected", "endpoints", "cgroups"),
    *("key_maker", "l1", "l1_events", "l1_answers", "recorded_l1", "handover"),
    *("group_plan", "group_share"),
    *("sampler", "seen_tokens"),
)
PURE = (
    [
        f"tier/{name}.py"
        for name in (
            *(
                "page",
                "identity",
                "prefix",
                "prefix_node",
                "score",
                "coordinator",
                "stats",
                "messages",
                "message_parts",
                "message_rules",
                "base",
            ),
            *("ghost_cache", "guard", "hazard", "oldest", "policies", "releases", "run_table", "rvi"),
            *("sampled", "three_terms"),
            *("peer", "peer_record", "peer_runs"),
            *("plan", "plan_notes", "plan_tiers", "model_numbers", "model_presets"),
            *("checkpoint", "recording", "recorded_node", "recorded_trace", "rerun"),
            *("trace", "trace_formats", "trace_pages", "replay", "replay_chain", "replay_models"),
            *(
                "cache_state",
                "records",
                "events",
                "misses",
                "recipe",
                "lending",
                "lent_check",
                "lent_frames",
                "lookup",
                "slots",
                "room",
                "cache_check",
                "outbox",
                "sinking",
                "uses",
                "verbs",
                "by_key",
                "outcomes",
                "worth",
                "ranking",
                "shares",
                "chain_replay",
                "chain_upper",
                "chain_node",
                "feed",
                "fetches",
                "remote",
                "clears",
                "ssd_open",
                "ssd_records",
            ),
        )
    ]
    + [f"tier/baselines/{file.name}" for file in sorted((ROOT / "tier/baselines").glob("*.py"))]
    + [f"workers/{name}.py" for name in PURE_WORKERS]
    + [
        f"cluster/{name}.py"
        for name in ("config", "config_nodes", "config_values", "policies", "routing", "fleet", "text")
    ]
    + [
        f"cluster/{name}.py"
        for name in (
            "gateway_status",
            "gateway_find",
            "gateway_outcomes",
            "gateway_suspects",
            "gateway_unread",
            "gateway_wire",
            "life",
        )
    ]
    + [f"cluster/{name}.py" for name in ("held", "memory_kills", "part_states", "pulses")]
    + [f"cluster/directory_{name}.py" for name in ("core", "slots", "table")]
    + [f"cluster/{name}.py" for name in ("simulation", "simulation_node", "simulation_parts")]
)
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


def violations(path: str, source: str) -> list[str]:
    """What a file at `path`, relative to the repository, imports against the rules."""
    folder = "cli" if path.startswith("src/") else path.split("/")[0]
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
        if path in PURE and package in IMPURE_MODULES:
            found.append(f"{path}:{line} imports {name}, but the file is pure")
    return found


def test_every_file_keeps_to_its_layer() -> None:
    files = sources()

    found = [v for file in files for v in violations(str(file.relative_to(ROOT)), file.read_text())]

    assert len(files) > 30
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("tier/prefix.py", "from kvtier.workers.api import Usage"),
        ("kernels/ops.py", "import kvtier.tier.page"),
        ("workers/worker.py", "def late():\n    from kvtier.cluster import launch"),
        ("cluster/launch.py", "from kvtier.cli import common"),
        ("cluster/node.py", "from kvtier import kernels"),
        ("cluster/node.py", "import tier.page"),
        ("proto/x.py", "import torch"),
        ("tier/service.py", "import ray"),
        ("tier/host.py", "import lmdb"),
        ("tier/ssd.py", "import lmdb"),
        ("workers/worker.py", "import ray"),
        ("workers/runner.py", "from transformers import AutoConfig"),
        ("workers/model.py", "import triton.language as tl"),
        ("cluster/launch.py", "from rich.console import Console"),
        ("src/kvtier/cli/up.py", "import ray"),
        ("tier/coordinator.py", "from time import monotonic"),
        ("tier/baselines/arc.py", "import random"),
        ("tier/baselines/arc.py", "from kvtier.workers.api import Usage"),
        ("workers/scheduler.py", "import threading"),
        ("cluster/config.py", "import os"),
    ],
)
def test_a_planted_violation_is_seen(path: str, source: str) -> None:
    assert violations(path, source)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("workers/worker.py", "from kvtier.tier.page import PageSpec\nfrom kvtier.workers.api import Usage"),
        ("tier/ssd_lmdb.py", "import lmdb\nimport os"),
        ("cluster/node.py", "import ray\nfrom kvtier.tier.service import CacheService"),
        ("src/kvtier/cli/up.py", "import typer\nfrom kvtier.cluster.config import load_config"),
        ("workers/model_files.py", "import transformers"),
    ],
)
def test_what_the_design_allows_passes(path: str, source: str) -> None:
    assert violations(path, source) == []


def test_no_folder_that_ray_puts_on_the_path_is_a_regular_package() -> None:
    """Ray puts the working directory first on every worker's path; an __init__.py here would shadow others' packages."""
    assert not [folder for folder in MAY_IMPORT if (ROOT / folder / "__init__.py").exists()]
