"""A worker's L1 as something to record: what of it may be in a file. Pure.

No token may. What stands for one is a digest of it and all tokens before it in its sequence, under a salt that is kept
nowhere: two sequences have equal ones as far as they begin with the same tokens, and more than that L1 never asks. The
keys of pages are in the file as they are, made from the tokens under the tenant's salt, which isn't.
"""

from __future__ import annotations

from collections import OrderedDict
from copy import copy
from dataclasses import replace
from hashlib import blake2b
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvtier.tier.l1.prefix import PrefixIndex
from kvtier.tier.l1.prefix_node import TOKEN_BYTES, Node
from kvtier.tier.pages.identity import tenant_digest
from kvtier.tier.policy.guard import Guarded
from kvtier.tier.policy.rvi.policy import Rvi
from kvtier.tier.policy.weighted import ThreeTerms
from kvtier.tier.protocol.messages import Missing
from kvtier.tier.record.checkpoint import State
from kvtier.tier.record.format import Alias, Machine, modules_of
from kvtier.workers.paging.frames import PageRecord
from kvtier.workers.paging.page_table import PageTable
from kvtier.workers.requests.api import EngineRequest, SamplingParams
from kvtier.workers.requests.key_maker import KeyMaker
from kvtier.workers.requests.output_length import Expected
from kvtier.workers.requests.sequence import Load, Request, Sequence, SequenceState, Tenancy
from kvtier.workers.scheduling import l1_events
from kvtier.workers.scheduling.l1 import L1
from kvtier.workers.scheduling.l1_answers import Answer, lease_number
from kvtier.workers.scheduling.l1_events import (
    Add,
    Cut,
    Event,
    Finish,
    Found,
    GiveUp,
    Retenant,
    Sampled,
    Siblings,
)

NAME = "worker"
MODULES = modules_of(L1) | modules_of(Guarded) | modules_of(Rvi) | modules_of(ThreeTerms) | modules_of(Event)


class Digests:
    """What stands for the tokens of sequences, other than for the same of other tenants. `salt` is 1 to 64 random bytes.

    Of each sequence that goes on it keeps the hash of its tokens so far.
    """

    def __init__(self, salt: bytes) -> None:
        self._start = blake2b(digest_size=TOKEN_BYTES, key=salt)
        self._ends: dict[int, blake2b] = {}

    def begin(self, number: int, tenant: bytes, tokens: npt.NDArray[np.int32]) -> bytes:
        """A sequence with these tokens; what stands for them, int32 each."""
        end = self._ends[number] = self._started(tenant)
        return digested(end, tokens.tobytes())

    def of(self, tenant: bytes, tokens: npt.NDArray[np.int32]) -> bytes:
        """What stands for the tokens of a sequence, int32 each."""
        return digested(self._started(tenant), tokens.tobytes())

    def branch(self, number: int, others: range) -> None:
        """Other sequences begin with the same tokens."""
        for other in others:
            self._ends[other] = self._ends[number].copy()

    def append(self, number: int, token: int) -> int:
        """What stands for a sequence's next token."""
        made = digested(self._ends[number], token.to_bytes(TOKEN_BYTES, "little", signed=True))
        return int.from_bytes(made, "little", signed=True)

    def end(self, number: int) -> None:
        """The sequence is over."""
        self._ends.pop(number, None)

    def of_runs(self, table: PageTable) -> dict[Node, bytes]:
        """What stands for the tokens of each run of the radix trees."""
        ends: dict[Node, blake2b] = {}
        made: dict[Node, bytes] = {}
        for node in table.index.nodes():  # parents before children
            if node.parent is None:
                continue  # the top of a tree, without tokens
            first = table.record(node.frames[0])
            assert first is not None, "a page of a radix tree without a record"
            end = ends[node.parent].copy() if node.parent in ends else self._started(first.tenant)
            made[node], ends[node] = digested(end, bytes(node.tokens)), end
        return made

    def _started(self, tenant: bytes) -> blake2b:
        start = self._start.copy()
        start.update(tenant)
        return start


def digested(end: blake2b, tokens: bytes) -> bytes:
    """What stands for tokens (int32 each) behind those that `end` has hashed; it goes on behind them."""
    made = bytearray()
    for at in range(0, len(tokens), TOKEN_BYTES):
        end.update(tokens[at : at + TOKEN_BYTES])
        made += end.digest()
    return bytes(made)


class Hiding:
    """Takes out of one recording's state and events what must not be in its file."""

    def __init__(self, salt: bytes) -> None:
        """`salt` is 1 to 64 random bytes that are kept nowhere."""
        self._digests = Digests(salt)
        self._runs: dict[Node, bytes] = {}
        self._pages: dict[int, bytes] = {}  # by frame, what stands for the tokens of pages in radix trees

    # Events

    def event(self, event: Event[Any], alias: Alias) -> Event[Any]:
        """The event as it is written down. To be called once for each, in order."""
        self._runs.clear()  # they were the state's
        self._pages.clear()
        match event:
            case Add():
                return self._add(event)
            case Sampled():
                tokens = [
                    self._digests.append(*pair) for pair in zip(event.numbers, event.tokens, strict=True)
                ]
                return msgspec.structs.replace(event, tokens=tokens)
            case Siblings():
                self._digests.branch(event.number, range(event.number + 1, event.last + 1))
            case Finish():
                self._digests.end(event.number)
            case Retenant():
                return msgspec.structs.replace(event, tenancy=_unsalted(event.tenancy))
            case Found() | Cut():
                return msgspec.structs.replace(event, missing=_undetailed(event.missing))
            case GiveUp():
                return msgspec.structs.replace(event, detail="")
        return event

    def _add(self, event: Add) -> Add:
        spec, tenant = event.spec, event.tenancy.digest
        begun = range(spec.sampling.n) if spec.is_resumed else range(1)
        made = [self._begin(event.number + index, tenant, spec, index) for index in begun]
        prompt = len(spec.token_ids)
        resumed = tuple(tokens[prompt:] for tokens in made) if spec.is_resumed else ()
        spec = _nameless(spec, event.number, made[0][:prompt], resumed)
        return msgspec.structs.replace(event, spec=spec, tenancy=_unsalted(event.tenancy), wall_s=0.0)

    def _begin(self, number: int, tenant: bytes, spec: EngineRequest, index: int) -> tuple[int, ...]:
        made = self._digests.begin(number, tenant, np.array(spec.token_ids + spec.given(index), np.int32))
        if index in spec.ended:
            self._digests.end(number)
        return tuple(np.frombuffer(made, np.int32).tolist())

    # State

    def state(self, one: object, state: State, alias: Alias) -> State:
        """An object's attributes as they are written down; the L1 itself comes first."""
        match one:
            case L1():
                self._learn(one)
                return {**state, "eos_ids": (), "_tap": None}
            case KeyMaker():
                return {**state, "noted": None, "told": []}
            case Request():
                return {**state, **self._request(one)}
            case Sequence():
                return {**state, **self._sequence(one)}
            case Node():
                return {**state, **self._node(one)}
            case PageRecord():
                tokens = b"" if one.is_pooled else self._pages[one.frame]
                return {**state, "tokens": tokens, "content": b"", "checksum": b""}
            case PrefixIndex():
                return {**state, "_leaves_of": None, "_on_leave": None}
            case PageTable():
                return {**state, "left": [], "touched": None}
            case Expected():
                lengths = one._lengths.items()
                hidden = OrderedDict(((_alike(name), *rest), counts) for (name, *rest), counts in lengths)
                return {**state, "_lengths": hidden}
        return state

    def _learn(self, l1: L1) -> None:
        """What stands for all tokens that are known."""
        page_bytes = TOKEN_BYTES * l1.table.page_tokens
        self._runs = self._digests.of_runs(l1.table)
        for node, made in self._runs.items():
            for i, frame in enumerate(node.frames):
                self._pages[frame] = made[i * page_bytes : (i + 1) * page_bytes]

    def _request(self, request: Request) -> State:
        spec, tenant = request.spec, request.tenancy.digest
        given = spec.resumed or ((),)
        made = [self._digests.of(tenant, np.array(spec.token_ids + tokens, np.int32)) for tokens in given]
        hidden = [tuple(np.frombuffer(each, np.int32).tolist()) for each in made]
        prompt = len(spec.token_ids)
        resumed = tuple(tokens[prompt:] for tokens in hidden) if spec.resumed else ()
        return {
            "spec": _nameless(spec, request.number, hidden[0][:prompt], resumed),
            "tenancy": _unsalted(request.tenancy),
            "lookups": {},
            "misses": [],
            "submitted_wall_s": 0.0,
        }

    def _sequence(self, seq: Sequence) -> State:
        tokens = np.zeros_like(seq.tokens)
        if seq.state is not SequenceState.FINISHED:
            tenant = seq.request.tenancy.digest
            made = self._digests.begin(seq.number, tenant, seq.tokens[: seq.length])
            tokens[: seq.length] = np.frombuffer(made, np.int32)
        return {
            "tokens": tokens,
            "stop_ids": frozenset(),
            "lease": None if seq.lease is None else _lease(seq, seq.lease),
            "load": None if seq.load is None else _load(seq, seq.load),
        }

    def _node(self, node: Node) -> State:
        children: dict[bytes, Node | OrderedDict[bytes, Node]] | None = None
        if node.children is not None:
            children = {}
            for entry in node.children.values():
                group = [entry] if isinstance(entry, Node) else list(entry.values())
                pages = [self._runs[child][: len(child.tokens) // len(child.frames)] for child in group]
                head = pages[0][:TOKEN_BYTES]
                children[head] = (
                    entry if isinstance(entry, Node) else OrderedDict(zip(pages, group, strict=True))
                )
        return {"tokens": bytearray(self._runs.get(node, b"")), "children": children}


def hiding_machine(salt: bytes) -> Machine:
    """L1 as what one recording records. `salt` is 1 to 64 random bytes that are kept nowhere."""
    hiding = Hiding(salt)
    return replace(WORKER, hide=hiding.event, hide_state=hiding.state)


def _nameless(
    spec: EngineRequest, number: int, tokens: tuple[int, ...], resumed: tuple[tuple[int, ...], ...]
) -> EngineRequest:
    """What L1 reads of a request; a number for its name."""
    asked = spec.sampling
    sampling = SamplingParams(max_tokens=asked.max_tokens, n=asked.n, prompt_logprobs=asked.prompt_logprobs)
    return EngineRequest(
        request_id=str(number),
        tenant=_alike(spec.tenant),
        token_ids=tokens,
        sampling=sampling,
        use_cache=spec.use_cache,
        session=spec.session,
        session_closed=spec.session_closed,
        session_open=spec.session_open,
        expected_output_tokens=spec.expected_output_tokens,
        tool_stop_ids=(0,) if spec.tool_stop_ids else (),
        resumed=resumed,
        ended=spec.ended,
    )


def _alike(tenant: str) -> str:
    return tenant_digest(tenant).hex()


def _unsalted(tenancy: Tenancy) -> Tenancy:
    return replace(tenancy, salt=b"")


def _undetailed(missing: Missing | None) -> Missing | None:
    return None if missing is None else msgspec.structs.replace(missing, detail="")


def _lease(seq: Sequence, lease: str) -> str:
    return f"{seq.request.number}:{seq.index}:{lease_number(lease)}"


def _load(seq: Sequence, load: Load) -> Load:
    hidden = copy(load)
    hidden.lease, hidden.missing = _lease(seq, load.lease), _undetailed(load.missing)
    return hidden


def _as_it_is(one: Any, *_: object) -> Any:
    return one


def _state_as_it_is(one: object, state: State, alias: Alias) -> State:
    return state


def _apply(l1: L1, event: Event[Any], now: float) -> list[Answer]:
    l1.key_maker.told = [*reversed(event.keys)]
    result = event.apply(l1, now)
    assert not l1.key_maker.told, "keys of pages that nobody asks for any more"
    return l1.answers(event, result)


def _counters(l1: L1) -> object:
    return l1.counters()


def _revive(l1: L1) -> None:
    l1.table.wire()


WORKER = Machine(
    name=NAME,
    events={kind.__name__: kind for kind in l1_events.EVENTS},
    modules=MODULES,
    apply=_apply,
    counters=_counters,
    hide=_as_it_is,
    hide_commands=_as_it_is,
    hide_state=_state_as_it_is,
    revive=_revive,
)


def about(l1: L1) -> dict[str, Any]:
    """What a recording's header says of its worker: the sizes of its L1 and of its steps, and what is there."""
    table, scheduler = l1.table, l1.scheduler
    return {
        "capacity_bytes": table.capacity_bytes,
        "used_bytes": table.used_bytes,
        "page_tokens": table.page_tokens,
        "policy": table.policy.state,
        "margin_bytes": table.margin_bytes,
        "max_batch_tokens": scheduler.max_batch_tokens,
        "max_sequences": scheduler.max_sequences,
        "waiting": len(scheduler.waiting),
        "active": len(scheduler.active),
    }
