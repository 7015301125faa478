"""The Cache verbs over all workers (L1) and nodes (L3, L4): asks every owner and adds the answers up."""

from __future__ import annotations

import asyncio
import bisect
import logging
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TypeVar

import grpc
import numpy as np

from kvtier.cluster import gateway_record
from kvtier.cluster.gateway_ask import Call, Silence, answers_of, within
from kvtier.cluster.gateway_core import GatewayCore
from kvtier.cluster.gateway_ports import (
    DEAD,
    HEALTH_S,
    HEALTHY,
    UNHEALTHY,
    NodePort,
    Outcomes,
    OwnerDown,
    OwnerPort,
    Tenant,
    asked_health,
)
from kvtier.cluster.gateway_requests import Refusal, invalid
from kvtier.cluster.gateway_status import Condition
from kvtier.cluster.gateway_streams import Attempt, usage_message
from kvtier.cluster.gateway_workers import Worker
from kvtier.proto import cache_pb2, inference_pb2
from kvtier.tier.base import Outcome, PageInfo
from kvtier.tier.identity import page_keys, root_key, tenant_digest, tenant_salt
from kvtier.tier.page import TierName
from kvtier.tier.recorder import RecordingStatus
from kvtier.tier.recording import RecordingError
from kvtier.tier.stats import Ledger, to_json
from kvtier.workers.api import Explanation

MIN_KEY_DIGITS = 4
KEY_DIGITS = 64
DEFAULT_LIST = 100
MAX_LIST = 100_000  # copies in one reply
MAX_KEYS = 100_000  # in one request
MAX_EXCEPTIONS = 10_000  # keys listed by verbs that name none
ALL_PAGES = 2**31 - 1  # for looking through what an owner holds
ASK_S = 10.0  # an owner that doesn't answer in this time is not waited for
WORK_S = 600.0  # the same where it may have to read or wipe all that it holds
_DIGEST = re.compile("[0-9a-f]{32}")  # of a tenant, as pages are listed with it

log = logging.getLogger(__name__)
T = TypeVar("T")

_NUMBERS = {
    Outcome.ACCEPTED: cache_pb2.OUTCOME_ACCEPTED,
    Outcome.CLIPPED: cache_pb2.OUTCOME_CLIPPED,
    Outcome.DEFERRED: cache_pb2.OUTCOME_DEFERRED,
    Outcome.REJECTED: cache_pb2.OUTCOME_REJECTED,
    Outcome.MISSING: cache_pb2.OUTCOME_MISSING,
}
_TIER_ORDER = {tier.value: position for position, tier in enumerate(TierName)}


class Node:
    """A CacheNode as the gateway sees it."""

    def __init__(self, node_id: str, pid: int, port: NodePort, host: str = "") -> None:
        self.node_id = node_id
        self.pid = pid
        self.port = port
        self.host = host
        self.condition = Condition(time.time())
        self.down: str | None = None  # why it is gone

    def lose(self, reason: str) -> None:
        """It is gone."""
        if self.down is None:
            log.error("node %s is down: %s", self.node_id, reason)
            self.down = reason
            self.condition.is_now(DEAD, time.time())


@dataclass(frozen=True, slots=True)
class _Owner:
    owner_id: str
    port: OwnerPort
    lose: Callable[[str], None]  # with the reason


class CacheVerbs:
    """Owned by the gateway's event loop. `salts` are the tenants' secrets from the configuration."""

    def __init__(self, core: GatewayCore, nodes: Iterable[Node], salts: Mapping[str, str]) -> None:
        self._core = core
        self.nodes = list(nodes)
        self._salts = dict(salts)
        self._names = {tenant_digest(name).hex(): name for name in salts}
        self._ledger = Ledger()
        self._counted: dict[str, Worker] = {}  # the life of each worker that the ledger has a snapshot of
        self._counting = asyncio.Lock()  # snapshots are recorded in the order in which they are made

    async def stats(self) -> cache_pb2.StatsReply:
        """All counters, added up over the owners there are and were.

        Of an owner that died or started anew it knows what the last call of this method saw. Raises Refusal unless
        every living owner answers: without one of them the sum would be too small.
        """
        async with self._counting:
            self._lose_replaced()
            there = dict(self._core.workers)
            for owner_id, snapshot in await self._ask(lambda port: port.stats()):
                self._ledger.record(owner_id, snapshot)
                if owner_id in there:
                    self._counted[owner_id] = there[owner_id]
            for owner_id in self._lost():
                self._ledger.lose(owner_id)
            totals = to_json(self._ledger.total())
        tiers = totals.pop("tiers")
        return cache_pb2.StatsReply(
            tiers={name: cache_pb2.TierStats(**numbers) for name, numbers in tiers.items()}, **totals
        )

    async def lookup(self, message: cache_pb2.LookupRequest) -> cache_pb2.LookupReply:
        """The head of a prompt that is held somewhere, page by page."""
        tenant = self._core.tenant(message.tenant)
        ids = await self._core.prompt_ids(message, self._core.limit())
        info = self._core.info
        step = info.page_tokens
        keys = page_keys(
            root_key(info.root_fields),
            tenant_salt(tenant, self._salts[tenant]),
            np.asarray(ids, dtype=np.int32),
            step,
        )
        tiers: dict[str, set[str]] = {}
        variants: dict[str, set[str]] = {}
        for page in await self._all_pages(tenant):
            if page.state == "sealed":
                tiers.setdefault(page.key, set()).add(page.tier.value)
                variants.setdefault(page.key, set()).add(page.variant)
        reply = cache_pb2.LookupReply(prompt_tokens=len(ids))
        for position, key in enumerate(keys):
            found = tiers.get(key.hex())
            if not found:
                break
            reply.pages.add(
                key=key.hex(),
                start=position * step,
                end=(position + 1) * step,
                tiers=sorted(found, key=_TIER_ORDER.__getitem__),
                variants=sorted(variants[key.hex()]),
            )
        return reply

    async def explain(self, message: cache_pb2.ExplainRequest) -> cache_pb2.ExplainReply:
        """What a worker that ran a request remembers of it, the first one if it can, and how it went on elsewhere."""
        attempts = self._core.attempts(message.request_id)
        # Else a gateway before this one may have had it: workers find it by the client's id.
        names = [attempt.request_id for attempt in attempts] or [message.request_id]
        silent: list[str] = []
        for name in names:
            explanation = await self._explained(name, silent)
            if explanation is not None:
                return _explain_reply(message.request_id, explanation, attempts)
        if silent:
            raise Refusal(grpc.StatusCode.UNAVAILABLE, "; ".join(dict.fromkeys(silent)))
        raise Refusal(
            grpc.StatusCode.NOT_FOUND,
            f"no worker remembers request {message.request_id!r}: only the latest ones are kept",
        )

    async def _explained(self, name: str, silent: list[str]) -> Explanation | None:
        """What any worker remembers of a request that had this name there; who doesn't answer goes into `silent`."""
        for worker in self._living_workers():
            try:
                explanation = await within(ASK_S, worker.port.explain(name))
            except OwnerDown as error:
                self._core.lose(worker, str(error))
            except Silence as silence:
                silent.append(f"{worker.info.worker_id} {silence}")
            except Refusal as refusal:
                silent.append(refusal.message)
            else:
                if explanation is not None:
                    return explanation
        return None

    def _lose_replaced(self) -> None:
        """Of a worker that was taken out or started anew, what it counted before stays in the sum."""
        for worker_id, worker in list(self._counted.items()):
            if self._core.workers.get(worker_id) is not worker:
                self._ledger.lose(worker_id)
                del self._counted[worker_id]

    async def list_pages(self, message: cache_pb2.ListPagesRequest) -> cache_pb2.ListPagesReply:
        """Copies of pages, those of the highest tier first."""
        limit = message.limit or DEFAULT_LIST
        if limit > MAX_LIST:
            raise invalid(f"limit must be at most {MAX_LIST}, got {limit}")
        tenant = self._tenant(message.tenant)
        tier = _checked_tier(message.tier)
        answers = await self._ask(lambda port: port.pages(tenant, tier, limit + 1), self._owners(tenant))
        return self._listed([page for _, pages in answers for page in pages], limit)

    async def show_page(self, message: cache_pb2.ShowPageRequest) -> cache_pb2.ListPagesReply:
        """All copies of one page."""
        digits = _checked_key(message.key)
        pages = [page for page in await self._all_pages(None) if page.key.startswith(digits)]
        if not pages:
            raise Refusal(grpc.StatusCode.NOT_FOUND, f"no tier holds a page with key {digits}")
        _only_one(digits, {page.key for page in pages})
        return self._listed(pages, MAX_LIST)

    async def pin(self, message: cache_pb2.KeysRequest) -> cache_pb2.OutcomesReply:
        """Keep pages where they are until unpinned."""
        return await self._each_key(message.keys, lambda port, keys: port.pin(keys))

    async def unpin(self, message: cache_pb2.KeysRequest) -> cache_pb2.OutcomesReply:
        """Take pins back."""
        return await self._each_key(message.keys, lambda port, keys: port.unpin(keys))

    async def evict(self, message: cache_pb2.EvictRequest) -> cache_pb2.OutcomesReply:
        """Drop pages from one tier or from all; without keys, all pages of a tier."""
        tier = _checked_tier(message.tier)
        if message.keys or tier is None:
            return await self._each_key(message.keys, lambda port, keys: port.evict(keys, tier), WORK_S)

        async def evict_all(port: OwnerPort) -> Outcomes:
            pages = await port.pages(None, tier, ALL_PAGES)
            pages.sort(key=lambda page: -page.depth)  # a page takes those behind it along
            keys = dict.fromkeys(page.key for page in pages)  # once, whatever variants of it there are
            return await port.evict([bytes.fromhex(key) for key in keys], tier) if keys else []

        return _exceptions(await self._ask(evict_all, limit_s=WORK_S))

    async def clear(self, message: cache_pb2.ClearRequest) -> cache_pb2.OutcomesReply:
        """Drop and wipe all pages of a tenant, or of all."""
        tenant = self._tenant(message.tenant)
        answers = await self._ask(lambda port: port.clear(tenant), self._owners(tenant), WORK_S)
        # Once more: a node may have fetched pages from one that was not yet cleared.
        await self._ask(lambda port: port.clear(tenant), self._owners(tenant), WORK_S)
        return _exceptions(answers)

    async def verify(self, message: cache_pb2.KeysRequest) -> cache_pb2.OutcomesReply:
        """Compare checksums of these pages, or of all."""
        if message.keys:
            return await self._each_key(message.keys, lambda port, keys: port.verify(keys), WORK_S)
        return _exceptions(await self._ask(lambda port: port.verify(None), limit_s=WORK_S))

    async def record(self, message: cache_pb2.RecordRequest) -> cache_pb2.RecordReply:
        """Have nodes and workers record what they hear. Where one can't, those that began end again."""
        path, max_bytes = gateway_record.checked(message)
        owners = self._recording_owners(message)

        async def begin(port: OwnerPort) -> RecordingStatus | str:
            try:
                return await port.record(path, max_bytes, len(owners) == 1)
            except RecordingError as error:
                return str(error)

        answers = await self._ask(begin, owners, WORK_S)
        begun = {owner: answer for owner, answer in answers if not isinstance(answer, str)}
        if refusals := [f"{owner}: {answer}" for owner, answer in answers if isinstance(answer, str)]:
            began = [owner for owner in owners if owner.owner_id in begun]
            await self._ask(lambda port: port.stop_recording(), began, WORK_S)
            raise gateway_record.cannot(refusals)
        return gateway_record.replied(begun.values())

    async def stop_record(self, message: cache_pb2.StopRecordRequest) -> cache_pb2.RecordReply:
        """End all recordings; how the latest ones went."""
        answers = await self._ask(lambda port: port.stop_recording(), limit_s=WORK_S)
        statuses = [status for _, status in answers if status is not None]
        if not statuses:
            raise gateway_record.nothing()
        return gateway_record.replied(statuses)

    def _recording_owners(self, message: cache_pb2.RecordRequest) -> list[_Owner]:
        """Those that are named, or all. Raises Refusal."""
        owners = self._owners()
        if not (message.nodes or message.workers):
            return owners
        nodes = {node.node_id for node in self.nodes}
        workers = {owner.owner_id for owner in owners} - nodes
        for what, named, there in (("node", message.nodes, nodes), ("worker", message.workers, workers)):
            gateway_record.check_known(what, named, there)
        wanted = {*message.nodes, *message.workers}
        return [owner for owner in owners if owner.owner_id in wanted]

    def attach_node(self, node: Node) -> None:
        """It is there, new or started anew."""
        self.nodes = sorted(
            [node, *(other for other in self.nodes if other.node_id != node.node_id)],
            key=lambda one: (len(one.node_id), one.node_id),  # node-9 before node-10
        )

    async def node_statuses(self) -> list[inference_pb2.NodeStatus]:
        """Nodes as `kvtier status` shows them; asks each whether it lives."""
        return list(await asyncio.gather(*(self._node_status(node) for node in self.nodes)))

    async def _node_status(self, node: Node) -> inference_pb2.NodeStatus:
        health, detail = (DEAD, node.down) if node.down is not None else await asked_health(node.port)
        if health == DEAD:
            node.lose(detail)
        notes: list[str] = []
        if health == HEALTHY:
            try:
                notes = await within(HEALTH_S, node.port.notes())
                node.pid = await within(HEALTH_S, node.port.pid())  # another one after a restart
            except (OwnerDown, Refusal, Silence) as error:  # since it said that it is well
                health, detail = UNHEALTHY, str(error)
        return inference_pb2.NodeStatus(
            id=node.node_id,
            pid=node.pid,
            health=health,
            detail=detail,
            notes=notes,
            host=node.host,
            since=node.condition.is_now(health, time.time()),
            exchange=self._core.addresses.get(node.node_id, ""),
        )

    # ---- helpers -------------------------------------------------------------------------------------------------

    def _living_workers(self) -> list[Worker]:
        return [worker for worker in self._core.workers.values() if worker.down is None]

    def _lost(self) -> list[str]:
        workers = [worker.info.worker_id for worker in self._core.workers.values() if worker.down is not None]
        return workers + [node.node_id for node in self.nodes if node.down is not None]

    def _tenant(self, name: str) -> Tenant:
        """Whose pages a message means: a tenant's by its name, or by the digest that its pages are listed with."""
        if not name:
            return None
        digits = name.lower()
        if name not in self._salts and _DIGEST.fullmatch(digits):
            return self._names.get(digits) or bytes.fromhex(digits)
        return self._core.tenant(name)

    def _owners(self, tenant: Tenant = None) -> list[_Owner]:
        """The living ones that can hold a tenant's pages: what runs now gave workers none of a tenant not configured."""
        nodes = [_Owner(node.node_id, node.port, node.lose) for node in self.nodes if node.down is None]
        if isinstance(tenant, bytes):
            return nodes
        workers = [
            _Owner(worker.info.worker_id, worker.port, partial(self._core.lose, worker))
            for worker in self._living_workers()
        ]
        return workers + nodes

    async def _ask(
        self,
        call: Callable[[OwnerPort], Awaitable[T]],
        owners: Sequence[_Owner] | None = None,
        limit_s: float | None = None,
    ) -> list[tuple[str, T]]:
        """Every owner's answer, as in answers_of; None: of all living ones, within ASK_S."""
        asked = self._owners() if owners is None else owners
        calls = [Call(owner.owner_id, owner.lose, partial(call, owner.port)) for owner in asked]
        return await answers_of(calls, ASK_S if limit_s is None else limit_s)

    async def _all_pages(self, tenant: str | None) -> list[PageInfo]:
        answers = await self._ask(lambda port: port.pages(tenant, None, ALL_PAGES))
        return [page for _, pages in answers for page in pages]

    def _listed(self, pages: list[PageInfo], limit: int) -> cache_pb2.ListPagesReply:
        pages.sort(
            key=lambda page: (_TIER_ORDER[page.tier.value], page.tenant, page.root, page.depth, page.key)
        )
        reply = cache_pb2.ListPagesReply(more=len(pages) > limit)
        for page in pages[:limit]:
            reply.pages.add(
                key=page.key,
                tier=page.tier.value,
                owner=page.owner,
                tenant=self._names.get(page.tenant, page.tenant),
                root=page.root,
                parent=page.parent,
                variant=page.variant,
                depth=page.depth,
                tokens=page.tokens,
                nbytes=page.nbytes,
                uses=page.uses,
                idle_s=page.idle_s,
                pinned=page.pinned,
                readers=page.readers,
                state=page.state,
                made_from=page.made_from,
            )
        return reply

    async def _each_key(
        self,
        given: Sequence[str],
        call: Callable[[OwnerPort, list[bytes]], Awaitable[Outcomes]],
        limit_s: float | None = None,
    ) -> cache_pb2.OutcomesReply:
        keys = await self._whole_keys(given)
        wanted = [bytes.fromhex(key) for key in dict.fromkeys(key for key in keys if len(key) == KEY_DIGITS)]
        answers = await self._ask(lambda port: call(port, wanted), limit_s=limit_s) if wanted else []
        # Owners are asked for keys that they may never have had: MISSING says nothing beside another's answer.
        owners = _by_key(
            (owner_id, [(key, outcome) for key, outcome in outcomes if outcome is not Outcome.MISSING])
            for owner_id, outcomes in answers
        )
        reply = cache_pb2.OutcomesReply()
        for key in keys:
            _add_result(reply, key, owners.get(key, {}))
        reply.counts.update(Counter(merged_outcome(owners.get(key, {}).values()).value for key in keys))
        return reply

    async def _whole_keys(self, given: Sequence[str]) -> list[str]:
        """The keys asked for, heads made whole; a head that no page has stays as it is."""
        if not given:
            raise invalid("keys must name at least one page")
        if len(given) > MAX_KEYS:
            raise invalid(f"keys must be at most {MAX_KEYS}, got {len(given)}")
        keys = [_checked_key(key) for key in given]
        if all(len(key) == KEY_DIGITS for key in keys):
            return keys
        held = sorted({page.key for page in await self._all_pages(None)})
        return [key if len(key) == KEY_DIGITS else _completed(key, held) for key in keys]


def merged_outcome(outcomes: Iterable[Outcome]) -> Outcome:
    """One outcome over those of all owners of a key: later where one will follow, in part where they differ."""
    seen = set(outcomes)
    if not seen:
        return Outcome.MISSING
    if len(seen) == 1:
        return seen.pop()
    if seen == {Outcome.ACCEPTED, Outcome.DEFERRED}:
        return Outcome.DEFERRED
    return Outcome.CLIPPED


def _explain_reply(
    request_id: str, explanation: Explanation, attempts: Sequence[Attempt]
) -> cache_pb2.ExplainReply:
    reply = cache_pb2.ExplainReply(
        request_id=request_id,
        tenant=explanation.tenant,
        worker=explanation.worker_id,
        prompt_tokens=explanation.prompt_tokens,
        preemptions=explanation.preemptions,
    )
    if explanation.usage is not None:
        reply.usage.CopyFrom(usage_message(explanation.usage, explanation.usage.completion_tokens))
    for note in explanation.notes:
        reply.notes.add(
            start=note.start, end=note.end, tier=note.tier, reason=note.reason, detail=note.detail
        )
    for before, after in pairwise(attempts):
        reply.moves.add(
            worker=after.worker_id, tokens=after.given, reason=f"{before.worker_id} {before.left}"
        )
    return reply


def _by_key(answers: Iterable[tuple[str, Outcomes]]) -> dict[str, dict[str, Outcome]]:
    owners: dict[str, dict[str, Outcome]] = {}
    for owner_id, outcomes in answers:
        for key, outcome in outcomes:
            owners.setdefault(key.hex(), {})[owner_id] = outcome
    return owners


def _exceptions(answers: Iterable[tuple[str, Outcomes]]) -> cache_pb2.OutcomesReply:
    """The reply of a verb that names no keys: all counted, those not ACCEPTED listed."""
    reply = cache_pb2.OutcomesReply()
    counts: Counter[str] = Counter()
    for key, by_owner in _by_key(answers).items():
        outcome = merged_outcome(by_owner.values())
        counts[outcome.value] += 1
        if outcome is not Outcome.ACCEPTED and len(reply.results) < MAX_EXCEPTIONS:
            _add_result(reply, key, by_owner)
    reply.counts.update(counts)
    return reply


def _add_result(reply: cache_pb2.OutcomesReply, key: str, by_owner: Mapping[str, Outcome]) -> None:
    reply.results.add(
        key=key,
        outcome=_NUMBERS[merged_outcome(by_owner.values())],
        owners={owner: _NUMBERS[outcome] for owner, outcome in by_owner.items()},
    )


def _checked_tier(name: str) -> TierName | None:
    if name and name not in _TIER_ORDER:
        raise invalid(f"tier must be one of {', '.join(_TIER_ORDER)}, got {name!r}")
    return TierName(name) if name else None


def _checked_key(key: str) -> str:
    digits = key.strip().lower()
    if not MIN_KEY_DIGITS <= len(digits) <= KEY_DIGITS or set(digits) - set("0123456789abcdef"):
        raise invalid(f"a key is {MIN_KEY_DIGITS} to {KEY_DIGITS} hex digits, got {key[:80]!r}")
    return digits


def _completed(digits: str, held: Sequence[str]) -> str:
    start = bisect.bisect_left(held, digits)
    end = bisect.bisect_left(held, digits + "g")
    _only_one(digits, held[start:end])
    return held[start] if end > start else digits


def _only_one(digits: str, keys: Iterable[str]) -> None:
    count = len(set(keys))
    if count > 1:
        raise invalid(f"{count} pages have keys that begin with {digits}: give more digits")
