"""Two machines run the same code only when no line of it differs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import kvtier
from kvtier.cluster.machines.code_digest import sources_digest, sources_here, sources_refusal

PACKAGE = Path(kvtier.__file__).parent


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package with a folder that is a link, as in a checkout, and a file that is no code."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "page.py").write_text("PAGE = 1\n")
    made = tmp_path / "package"
    made.mkdir()
    (made / "__init__.py").write_text("")
    (made / "attention.cpp").write_text("// none\n")
    (made / "tier").symlink_to(tmp_path / "elsewhere")
    (made / "README.md").write_text("what it is\n")
    return made


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tier/page.py", "PAGE = 2\n"),
        ("attention.cpp", "// one\n"),
        ("tier/more.py", ""),
        ("__init__.py", "PAGE = 1\n"),
    ],
)
def test_another_line_anywhere_is_other_code(package: Path, file: str, content: str) -> None:
    before = sources_digest(package)
    (package / file).write_text(content)

    assert sources_digest(package) != before


def test_a_file_under_another_name_is_other_code(package: Path) -> None:
    before = sources_digest(package)
    (package / "tier" / "page.py").rename(package / "tier" / "pages.py")

    assert sources_digest(package) != before


def test_an_installed_copy_is_the_same_code_as_its_checkout(package: Path, tmp_path: Path) -> None:
    """Without links, and with what Python leaves beside its files."""
    copy = tmp_path / "copy"
    shutil.copytree(package, copy)
    (copy / "tier" / "__pycache__").mkdir()
    (copy / "tier" / "__pycache__" / "page.cpython-311.pyc").write_bytes(b"compiled")
    (copy / "README.md").unlink()

    assert sources_digest(copy) == sources_digest(package)


def test_all_folders_of_kvtier_are_looked_into(tmp_path: Path) -> None:
    copy = tmp_path / "kvtier"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    whole = sources_digest(copy)
    (copy / "tier" / "page.py").write_text("")

    assert sources_digest(copy) != whole


def test_what_differs_is_told() -> None:
    version, digest = sources_here()

    assert sources_refusal((version, digest), (version, digest)) == ""
    assert f"other sources of kvtier {version}" in sources_refusal((version, "0"), (version, digest))
    assert "it has kvtier 0.0.1," in sources_refusal(("0.0.1", "0"), (version, digest))
