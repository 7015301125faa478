"""What a node's state machine heard can be heard again, with the same answers; a file that was changed is found out."""

from __future__ import annotations

import importlib
import os
import pickle
import zlib
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from cache_world import (
    BF16,
    LRU,
    ONE_SIZE,
    PAGE_TOKENS,
    PAYLOAD_BYTES,
    ROOT,
    SLOT_BYTES,
    World,
    chain_keys,
    chain_of,
    checksum_of,
    hello_of,
    spec_of,
    tenant_of,
)
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from recording_kit import SALT, SECRETS, a_life, run_again

from kvtier.tier.node.coordinator import Coordinator
from kvtier.tier.node.recording import MODULES, NODE
from kvtier.tier.node.service import CacheService
from kvtier.tier.node.state.records import Job, Limits, Request, Worker
from kvtier.tier.pages.identity import root_key
from kvtier.tier.pages.page import Envelope, PageKey, RootKey, TierName
from kvtier.tier.policy.base import Victim
from kvtier.tier.protocol.events import (
    Command,
    Event,
    FromWorker,
    Note,
    ReadDone,
    WorkerRef,
)
from kvtier.tier.protocol.messages import Locate
from kvtier.tier.record import checkpoint
from kvtier.tier.record.checkpoint import CheckpointError
from kvtier.tier.record.format import (
    MAGIC,
    SUM_EVERY,
    VERSION,
    Alias,
    RecordingError,
    RecordingReader,
)
from kvtier.tier.record.rerun import rerun
from kvtier.tier.stores.base import CatalogueEntry, Place


@given(seed=st.integers(0, 2**32), before=st.sampled_from([0, 1, 80]))
@settings(max_examples=100, deadline=None, phases=[Phase.generate])
def test_a_life_recorded_from_any_moment_on_runs_again_command_by_command(seed: int, before: int) -> None:
    node = a_life(seed, before)
    alias = Alias(SALT)
    again: list[list[Command]] = []

    verdict = run_again(node.ended(), lambda event, now, commands: again.append(commands))

    assert verdict.difference is None and not verdict.is_torn and verdict.is_same_code
    assert again == [NODE.hide_commands(commands, alias) for commands in node.answers]
    assert verdict.events == len(node.answers) and verdict.commands == sum(map(len, node.answers))


def test_a_long_life_is_summed_up_every_so_often_and_the_sums_hold() -> None:
    node = a_life(7, before=10, steps=3 * SUM_EVERY)

    verdict = run_again(node.ended())

    assert verdict.events > 2 * SUM_EVERY and verdict.difference is None and verdict.seconds > 0


@given(seed=st.integers(0, 2**32))
@settings(max_examples=20, deadline=None, phases=[Phase.generate])
def test_nothing_that_a_client_says_is_in_the_file(seed: int) -> None:
    """Request ids are chosen by clients: they are in the state at the start, in events, and in commands."""
    data = a_life(seed).ended()

    for secret in SECRETS:
        assert secret.encode() not in data and secret.encode()[:8] not in data


# ---- what differs is named ---------------------------------------------------------------------------------------


def test_the_first_event_with_other_commands_is_named() -> None:
    """A state machine that has been changed meanwhile: from its 20th event on it lets a note fall."""
    node = a_life(3)
    count = 0

    def apply(state: Coordinator, event: Event, now: float) -> list[Command]:
        nonlocal count
        count += 1
        return state.handle(event, now) + ([Note("by the way")] if count >= 20 else [])

    verdict = rerun(RecordingReader([node.ended()]), replace(NODE, apply=apply))

    assert verdict.difference is not None and verdict.difference.startswith("the commands of event 20 (")
    assert verdict.events == 20


def test_other_counters_are_found_at_the_next_sum() -> None:
    node = a_life(3, steps=2 * SUM_EVERY)
    machine = replace(NODE, counters=lambda state: [state.snapshot(), "and one more"])

    verdict = rerun(RecordingReader([node.ended()]), machine)

    assert verdict.difference == f"the counters after event {SUM_EVERY} differ"


def test_a_failure_that_was_recorded_must_come_again() -> None:
    """The event that broke the state machine is the last one recorded, so that it can be looked into."""
    node = a_life(3)
    envelope = Envelope(
        PageKey(b"k" * 32), "bf16", b"s" * 16, 4096, b"c" * 16, RootKey(ROOT), ROOT, b"t" * 16, 0, 16
    )
    bad = ReadDone(10**6, envelope)  # of no transfer there is
    with pytest.raises(KeyError) as failure:
        node.node.handle(bad, node.last_s)
    node.writer.broke(bad, node.last_s, type(failure.value).__name__)
    node.writer.end("the node failed")

    verdict = run_again(node.out.getvalue())
    healed = rerun(RecordingReader([node.out.getvalue()]), replace(NODE, apply=lambda *_: []))

    assert verdict.difference is None and verdict.end == "the node failed"
    assert healed.difference is not None


def test_other_code_is_told_from_the_recorders() -> None:
    node = a_life(3, 0, 3)

    verdict = rerun(
        RecordingReader([node.ended()]), replace(NODE, modules={*MODULES, "kvtier.tier.stores.host"})
    )

    assert not verdict.is_same_code and verdict.difference is None


# ---- files that aren't whole ------------------------------------------------------------------------------------


@given(at=st.floats(0, 1, exclude_max=True))
@settings(max_examples=100, deadline=None, phases=[Phase.generate])
def test_a_file_that_was_cut_off_anywhere_gives_what_it_has_and_says_so(at: float) -> None:
    data = LIFE[: int(at * len(LIFE))]

    try:
        verdict = run_again(data)
    except RecordingError as error:
        assert len(data) < FIRST_EVENT and ("cut off" in str(error) or "no recording" in str(error))
    else:
        assert verdict.is_torn and verdict.difference is None and verdict.events <= ALL_EVENTS


@given(at=st.integers(0, 2**32), bit=st.integers(0, 7))
@settings(max_examples=80, deadline=None, phases=[Phase.generate])
def test_a_flipped_bit_is_found(at: int, bit: int) -> None:
    data = bytearray(LIFE)
    data[at % len(data)] ^= 1 << bit

    with pytest.raises(RecordingError):
        if run_again(bytes(data)).is_torn:  # a length that grew swallows all that follows
            raise RecordingError


def frames(data: bytes) -> list[bytes]:
    """The bodies of a recording's frames."""
    found, at = [], len(MAGIC)
    while at < len(data):
        length = int.from_bytes(data[at : at + 4], "little")
        found.append(data[at + 8 : at + 8 + length])
        at += 8 + length
    return found


def framed(bodies: list[bytes]) -> bytes:
    return MAGIC + b"".join(
        len(body).to_bytes(4, "little") + zlib.crc32(body).to_bytes(4, "little") + body for body in bodies
    )


@pytest.mark.parametrize("change", ["drop", "repeat", "swap", "later"])
def test_an_event_that_was_dropped_repeated_or_changed_is_found_though_all_checksums_fit(change: str) -> None:
    bodies = frames(LIFE)
    events = [i for i, body in enumerate(bodies) if msgspec.msgpack.decode(body)[0] == "Input"]
    at = events[len(events) // 2]
    if change == "drop":
        del bodies[at]
    elif change == "repeat":
        bodies.insert(at, bodies[at])
    elif change == "swap":
        bodies[at], bodies[at + 1] = bodies[at + 1], bodies[at]
    else:
        tag, now, *rest = msgspec.msgpack.decode(bodies[at])
        bodies[at] = msgspec.msgpack.encode([tag, now + 1e-6, *rest])

    assert framed(frames(LIFE)) == LIFE
    try:
        verdict = run_again(framed(bodies))
    except RecordingError as error:
        assert "changed" in str(error)
    else:
        assert verdict.difference is not None


def test_a_recording_of_another_version_or_machine_is_refused() -> None:
    header = msgspec.msgpack.decode(frames(LIFE)[0])
    later, other = [*header], [*header]
    later[1] = VERSION + 1
    other[2] = "toaster"

    with pytest.raises(RecordingError, match=f"version {VERSION + 1}"):
        run_again(framed([msgspec.msgpack.encode(later), *frames(LIFE)[1:]]))
    with pytest.raises(RecordingError, match="toaster"):
        run_again(framed([msgspec.msgpack.encode(other), *frames(LIFE)[1:]]))
    with pytest.raises(RecordingError, match="no recording"):
        run_again(b"PK\x03\x04" + bytes(1000))


# ---- the state ---------------------------------------------------------------------------------------------------


class Runs:
    """What a pickle may carry: instructions to call anything at all."""

    def __init__(self, what: Callable[..., object], *arguments: object) -> None:
        self._reduced = what, arguments

    def __reduce__(self) -> Any:
        return self._reduced


@pytest.mark.parametrize(
    "hostile",
    [
        Runs(os.system, "touch ran"),
        Runs(eval, "open('ran', 'w')"),
        Runs(getattr, "kvtier", "upper"),
        Runs(importlib.import_module, "this"),
        Runs(Path, "ran"),
        Runs(CacheService, "n0", "sock", 4096, 0, "l4", 0),
        Runs(checkpoint.load, b"", MODULES),
        Runs(Coordinator),
        Runs(Counter, {}),
        Runs(root_key, {}),
    ],
    ids=lambda hostile: hostile._reduced[0].__name__,
)
def test_a_state_that_names_anything_but_data_is_refused(
    hostile: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    state = msgspec.msgpack.encode(
        (
            [("kvtier.tier.node.coordinator:Coordinator", ["limits"])],
            [0],
            pickle.dumps((hostile,), protocol=5),
        )
    )
    bodies = frames(LIFE)
    part = msgspec.msgpack.encode(["StatePart", zlib.compress(state), True])

    with pytest.raises(CheckpointError, match="can't be part of"):
        checkpoint.load(state, MODULES)
    with pytest.raises(RecordingError, match="can't be part of"):
        run_again(framed([bodies[0], part, *bodies[2:]]))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "kind",
    [
        "builtins:dict",
        "subprocess:Popen",
        "kvtier.tier.node.service:CacheService",
        "kvtier.tier.stores.base:Place",
        "x",
    ],
)
def test_a_state_of_objects_that_are_none_of_the_machines_is_refused(kind: str) -> None:
    with pytest.raises(CheckpointError):
        checkpoint.load(msgspec.msgpack.encode(([(kind, [])], [0], pickle.dumps(()))), MODULES)


def test_names_inside_of_names_are_refused() -> None:
    """Protocol 4 lets a pickle ask for an attribute of an attribute: `Coordinator.handle.__globals__`."""
    dotted = b"\x80\x04\x8c\x17kvtier.tier.coordinator\x8c\x1eCoordinator.handle.__globals__\x93."
    with pytest.raises(CheckpointError, match="__globals__"):
        checkpoint.load(
            msgspec.msgpack.encode(([("kvtier.tier.node.coordinator:Coordinator", ["x"])], [0], dotted)),
            MODULES,
        )


def test_a_state_comes_back_as_it_was_with_all_that_refers_to_one_object_referring_to_one() -> None:
    stock = Counter({4096: 2})
    request = Request(Worker(WorkerRef("w", "1"), hello_of("w", "1", ONE_SIZE)), "r")
    request.worker.requests["r"] = request
    request.worker.stock = stock
    root = Job(1, (b"k",), deque([((b"k", "bf16"), TierName.SSD)]))
    root.seen = {  # type: ignore[assignment]  # any place will do
        "request": request,
        "again": request.worker,
        "array": np.arange(6, dtype=np.int64).reshape(2, 3),
        "records": np.array([(1, 2.5)], dtype=[("a", "<i4"), ("b", "<f8")]),
        "kind": np.dtype([("a", "<i4"), ("b", "<f8", (2,))]),
        "tier": TierName.SSD,
        "message": Locate("r", ROOT, b"t" * 16, 16, 0, 16, [], 0.0),
        "victim": Victim(3, 4),
        "number": np.float32(1.5),
        "rng": np.random.default_rng(7),
        "text": defaultdict(list, a=[1]),
    }

    back: Any = checkpoint.load(checkpoint.dump(root, MODULES), MODULES)

    seen = back.seen
    assert back.keys == (b"k",) and back.todo == root.todo
    assert seen["request"].worker is seen["again"] and seen["again"].requests["r"] is seen["request"]
    assert seen["again"].ref == request.worker.ref and seen["again"].stock == stock
    assert seen["records"].dtype == root.seen["records"].dtype and seen["records"][0]["b"] == 2.5  # type: ignore[call-overload]
    assert seen["kind"]["b"].shape == (2,) and seen["tier"] is TierName.SSD
    assert seen["message"].request_id == "r" and seen["victim"] == Victim(3, 4)
    assert type(seen["victim"]) is Victim and type(seen["again"].stock) is Counter
    assert (seen["array"] == np.arange(6).reshape(2, 3)).all() and seen["number"] == np.float32(1.5)
    assert seen["rng"].random() == np.random.default_rng(7).random() and seen["text"]["b"] == []


def test_arrays_that_share_memory_share_it_afterwards() -> None:
    table = np.zeros((4, 16), np.uint8)
    records = table.reshape(-1).view(np.dtype([("a", "<i4"), ("b", "<i8")], align=True))
    parts = [table, records["b"], table[1:3], np.asfortranarray(np.arange(6).reshape(2, 3))]
    root = Job(1, (), deque())
    root.seen = parts  # type: ignore[assignment]

    back, column, rows, other = checkpoint.load(checkpoint.dump(root, MODULES), MODULES).seen
    column[2] = 7
    rows[1, 0] = 9

    assert column.shape == (4,) and back[2].view(np.int64)[1] == 7 and back[2, 0] == 9
    assert (other == np.arange(6).reshape(2, 3)).all()


@pytest.mark.parametrize("at", [(-8, (8,)), (40, (8,)), (0, (100,)), (0, (-8,))])
def test_no_array_looks_beyond_the_memory_it_was_given(at: tuple[int, tuple[int, ...]]) -> None:
    offset, strides = at
    owner = Runs(checkpoint._array, "<f8", (4,), bytes(32))
    hostile = Runs(checkpoint._view, owner, "<f8", (3,), offset, strides)
    state = ([("kvtier.tier.node.state.records:Job", ["seen"])], [0], pickle.dumps((hostile,), protocol=5))

    with pytest.raises(CheckpointError, match="buffer|strides|offset"):
        checkpoint.load(msgspec.msgpack.encode(state), MODULES)


def test_requests_that_share_pages_in_a_row_are_no_deep_state() -> None:
    """Request, load, request, load, ...: followed by recursion this is deeper than the stack."""
    path = "a" * 600
    entries = [in_l4(path[: end + 1], Place(end // 2, end % 2)) for end in range(len(path))]
    world = World(2, 600, limits=Limits(reads=1), recovered=entries)
    worker = world.connect()
    for page in range(len(path) - 1):  # each waits for two pages, of which it shares one with the next
        chains = [chain_of(chain_keys("ada", path)[page : page + 2])]
        lookup = Locate(f"r{page}", ROOT, tenant_of("ada"), PAGE_TOKENS, page, 16 * len(path), chains, 0.0)
        world.node.handle(FromWorker(worker.ref, lookup), world.now)

    back = checkpoint.load(checkpoint.dump(world.node, MODULES), MODULES)

    with pytest.raises(RecursionError):
        pickle.dumps(world.node)
    back.check()
    assert back.snapshot() == world.node.snapshot() and not back.is_idle


def in_l4(path: str, place: Place) -> CatalogueEntry:
    """What the catalogue has of a page of ada's."""
    keys = [ROOT, *chain_keys("ada", path)]
    envelope = Envelope(
        PageKey(keys[-1]),
        BF16,
        spec_of((0, BF16)),
        PAYLOAD_BYTES,
        checksum_of(keys[-1]),
        RootKey(ROOT),
        keys[-2],
        tenant_of("ada"),
        len(path) - 1,
        PAGE_TOKENS,
    )
    return CatalogueEntry(envelope, place, SLOT_BYTES, 1)


def test_what_is_no_data_is_not_written() -> None:
    root = Job(1, (), deque())

    for what, why in (
        (lambda: 1, "function"),
        (Path("x"), "Path"),
        (np.array([None]), "object"),
        (Job, "Job"),
    ):
        root.seen = [what]  # type: ignore[assignment]
        with pytest.raises(CheckpointError, match=why):
            checkpoint.dump(root, MODULES)


# A life of one recording that many tests spoil in their ways.
_life = a_life(11, before=5, steps=300, policy=LRU)
LIFE, ALL_EVENTS = _life.ended(), _life.writer.events
FIRST_EVENT = LIFE.index(b"\xa5Input")
