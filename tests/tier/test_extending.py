"""What docs/extending.md shows works as it is shown: the examples are taken from the page, installed, and used."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from runpy import run_path

import pytest
from node_kit import Peer, running, wait_until

from kvtier.tier.pages.page import TierName
from kvtier.tier.policy import registry
from kvtier.tier.policy.base import PolicySettings

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "extending.md").read_text()


def block(kind: str, number: int = 0) -> str:
    """A block of code of the page."""
    return re.findall(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL)[number]


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The folder of a package as pip would leave it: the example's module and its entry points."""
    folder = tmp_path / "site"
    about = folder / "forgetful-1.0.dist-info"
    about.mkdir(parents=True)
    (folder / "forgetful.py").write_text(block("python"))
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: forgetful\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[kvtier.policies]\nmru = forgetful\n")
    assert "kvtier.policies" in block("toml") and 'mru = "forgetful"' in block("toml")
    return folder


def kvtier(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(folder), *filter(None, sys.path)])
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
    )


def test_a_policy_of_another_package_is_found_and_named_with_the_others(installed: Path) -> None:
    script = "from kvtier.tier.policy.plugins import load_policies; print(load_policies())"

    assert kvtier(installed, "-c", script).stdout.strip() == "('rvi', 'score', 'lru', 'mru')"


def test_a_configuration_takes_it_and_names_it_where_another_is_unknown(installed: Path) -> None:
    script = "import sys; from kvtier.cluster.config.deployment import CacheConfig; CacheConfig(policy=sys.argv[1])"

    assert kvtier(installed, "-c", script, "mru").returncode == 0
    refused = kvtier(installed, "-c", script, "lifo").stderr
    assert "must be one of rvi, score, lru, mru, got 'lifo'" in refused


def test_a_package_whose_policy_cannot_be_imported_is_named(installed: Path) -> None:
    (installed / "forgetful.py").write_text("import nowhere_to_be_found")
    script = "from kvtier.tier.policy.plugins import load_policies; load_policies()"

    refused = kvtier(installed, "-c", script).stderr

    assert "the policy mru of forgetful can't be loaded: ModuleNotFoundError" in refused


def test_a_node_evicts_by_it(installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_POLICIES", dict(registry._POLICIES))
    run_path(str(installed / "forgetful.py"))
    with running(tmp_path, l3_pages=8, l4_bytes=0, policy=PolicySettings(name="mru")) as service:
        peer = Peer(tmp_path)
        chains = [peer.store(1000 * number, 1)[0] for number in range(12)]
        wait_until(service.idle)

        here = {bytes.fromhex(page.key) for page in service.pages(tier=TierName.HOST)}

        assert service.stats().tiers[TierName.HOST].policy == "mru"
        assert chains[0] in here and chains[-2] not in here
        peer.close()


def test_two_policies_of_one_name_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_POLICIES", dict(registry._POLICIES))

    with pytest.raises(ValueError, match="'lru' is registered already"):
        registry.register_policy("lru")(registry._lru)
