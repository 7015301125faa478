"""The lies of the chaos run: each is told, in frames as an exchange makes them, and the exchange that gets them sees it."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from dataclasses import fields
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from random import Random
from typing import Any

import pytest
from chaos_faults import LIES as ROWS
from hypothesis import given
from hypothesis import strategies as st
from peer_stub import envelope_of, exchange, key_of, payload_of, stub

from kvtier.cluster.transfer import sender as exchange_sender
from kvtier.tier.pages.page import Envelope, PageCorrupt
from kvtier.tier.transport.frames import page_head

HOOKS = Path(__file__).parent / "hooks"
sys.path.insert(0, str(HOOKS))

from chaos_lies import DAMAGE, LIES, OTHERS, lied, pages_of

# Under another name: a Python process has one sitecustomize, which is not this one here.
spec = spec_from_file_location("chaos_hooks", HOOKS / "sitecustomize.py")
assert spec is not None and spec.loader is not None
hooks: Any = module_from_spec(spec)
spec.loader.exec_module(hooks)

NBYTES = 4096
SEEDS = range(4)


def page(number: int, nbytes: int) -> bytes:
    return page_head(envelope_of(number, nbytes).pack(), nbytes) + payload_of(number, nbytes)


def test_every_lie_has_a_row() -> None:
    assert set(ROWS) == set(LIES) == {*DAMAGE, *OTHERS}


@given(st.sampled_from(DAMAGE), st.integers(1, 8), st.integers(1, 5000), st.randoms(use_true_random=False))
def test_damage_keeps_the_envelopes_and_one_payload_is_no_longer_what_its_envelope_says(
    lie: str, count: int, nbytes: int, rng: Random
) -> None:
    whole = b"".join(page(number, nbytes) for number in range(count))

    frame = lied(whole, lie, rng)

    assert frame != whole and len(frame) == len(whole) if lie == "bit" else len(frame) < len(whole)
    if lie == "bit":
        pages = [(Envelope.unpack(head), payload) for head, payload in pages_of(frame)]
        assert [envelope for envelope, _ in pages] == [envelope_of(number, nbytes) for number in range(count)]
        assert sum(not fits(*each) for each in pages) == 1


@given(st.sampled_from(OTHERS), st.integers(1, 8), st.integers(1, 5000), st.randoms(use_true_random=False))
def test_a_page_of_another_kind_has_checksums_that_fit_and_differs_in_one_field(
    lie: str, count: int, nbytes: int, rng: Random
) -> None:
    whole = b"".join(page(number, nbytes) for number in range(count))

    pages = [(Envelope.unpack(head), payload) for head, payload in pages_of(lied(whole, lie, rng))]

    assert all(fits(*each) for each in pages)
    truths = [envelope_of(number, nbytes) for number in range(count)]
    [(found, truth)] = [
        (found, truth) for (found, _), truth in zip(pages, truths, strict=True) if found != truth
    ]
    differs = {each.name for each in fields(truth) if getattr(found, each.name) != getattr(truth, each.name)}
    assert differs - {"checksum"} == {lie}


def fits(envelope: Envelope, payload: bytes) -> bool:
    try:
        envelope.verify(payload)
    except PageCorrupt:
        return False
    return True


def test_a_frame_that_is_not_made_of_whole_pages_is_an_error_and_no_lie_that_hits_nothing() -> None:
    for cut in (page(0, 500)[:-1], page(0, 500)[:50], page(0, 500) + bytes(10)):
        with pytest.raises((ValueError, PageCorrupt)):
            lied(cut, "bit", Random(1))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("lie", LIES)
def test_a_lie_that_an_exchange_sends_is_counted_and_the_one_that_gets_it_stores_no_page_of_it(
    lie: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVTIER_CHAOS", str(tmp_path))
    monkeypatch.setattr(exchange_sender, "wire", exchange_sender.wire)  # put back at the end
    hooks.lying_pages(exchange_sender, {"lie": lie}.get, Random(seed))
    with ExitStack() as stack:
        home = stack.enter_context(stub(tmp_path, "home", nbytes=NBYTES))
        away = stack.enter_context(stub(tmp_path, "away", nbytes=NBYTES))
        here = stack.enter_context(exchange("home", home.path, same_host="off"))
        there = stack.enter_context(exchange("away", away.path, same_host="off"))
        away.put(*range(6))

        fetch = home.order("away", there.info()["address"], range(6))

        ended = home.ended(fetch)
        assert ended.reason == "corrupt", ended
        stored = home.stored(fetch)  # each of them checked
        assert [key for key, _ in ended.failed] == [key_of(n) for n in range(6) if n not in stored]
        assert here.stats()["fetched"]["away"]["failures"] == {"corrupt": 1}
    assert (tmp_path / f"hits-{os.getpid()}").read_text() == "lie\n"
