"""The Cache verbs over all workers (L1) and nodes (L3, L4): asks every owner and adds the answers up."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TypeVar

import grpc
import numpy as np

from kvtier.cluster.gateway.admission import THREADED_PROMPT, GatewayCore
from kvtier.cluster.gateway.cache_api import find as gateway_find
from kvtier.cluster.gateway.cache_api import record as gateway_record
from kvtier.cluster.gateway.cache_api import results as gateway_outcomes
from kvtier.cluster.gateway.cache_api.clears import Asked, Clearer, ClearRecord
from kvtier.cluster.gateway.cache_api.find import KEY_DIGITS, TIER_ORDER
from kvtier.cluster.gateway.owners.ask import Call, Shared, Silence, answers_of, together, within
from kvtier.cluster.gateway.owners.status import Condition
from kvtier.cluster.gateway.owners.workers import Worker
from kvtier.cluster.gateway.ports import (
    DEAD,
    HEALTH_S,
    HEALTHY,
    UNHEALTHY,
    NodePort,
    Outcomes,
    OwnerDown,
    OwnerPort,
    Tenant,
    Told,
    asked_health,
)
from kvtier.cluster.gateway.requests.reading import Refusal, invalid, quoted
from kvtier.cluster.gateway.streams.streams import Attempt, usage_message
from kvtier.proto import cache_pb2, inference_pb2
from kvtier.tier.pages.identity import page_keys, root_key, tenant_digest, tenant_salt
from kvtier.tier.pages.page import PageKey, TierName
from kvtier.tier.protocol.key_query import HeldKeys
from kvtier.tier.protocol.results import ManyOutcomes
from kvtier.tier.record.format import RecordingError
from kvtier.tier.record.writer import RecordingStatus
from kvtier.tier.stats import Ledger, to_json
from kvtier.tier.stores.base import Outcome, PageInfo
from kvtier.workers.requests.api import Explanation

DEFAULT_LIST = 100
MAX_LIST = 10_000  # copies in one reply: more would hold up the loop for a tenth of a second
RECORDED_AT_ONCE = 32  # owners' counters in a turn of the loop: about 0.1 ms each
ASK_S = 10.0  # an owner that doesn't answer in this time is not waited for
WORK_S = 600.0  # the same where it may have to read or wipe all that it holds
_DIGEST = re.compile("[0-9a-f]{32}")  # of a tenant, as pages are listed with it

log = logging.getLogger(__name__)
T = TypeVar("T")


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


class CacheApi:
    """Owned by the gateway's event loop. `salts` are the tenants' secrets from the configuration."""

    def __init__(
        self,
        core: GatewayCore,
        nodes: Iterable[Node],
        salts: Mapping[str, str],
        clearer: Clearer | None = None,
        expected: Iterable[str] = (),
    ) -> None:
        """`expected` are the ids of all nodes that there are, attached or not."""
        self._core = core
        self._clearer = clearer or Clearer(ClearRecord(None))
        self._expected = set(expected)
        self.nodes = list(nodes)
        self._salts = dict(salts)
        self._names = {tenant_digest(name).hex(): name for name in salts}
        self._ledger = Ledger()
        self._counted: dict[str, Worker] = {}  # the life of each worker that the ledger has a snapshot of
        self._stats = Shared(self._count)  # so snapshots are recorded in the order in which they are made

    async def stats(self) -> cache_pb2.StatsReply:
        """All counters, added up over the owners there are and were.

        Of an owner that died or restarted it knows what the last call of this method saw. Raises Refusal unless
        every living owner answers: without one of them the sum would be too small.
        """
        return await self._stats.answer()

    async def _count(self) -> cache_pb2.StatsReply:
        self._lose_replaced()
        there = dict(self._core.workers)
        answers = await self._ask(lambda port: port.stats())
        for number, (owner_id, snapshot) in enumerate(answers, 1):
            self._ledger.record(owner_id, snapshot)
            if owner_id in there:
                self._counted[owner_id] = there[owner_id]
            if number % RECORDED_AT_ONCE == 0:
                await asyncio.sleep(0)
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
        step = self._core.info.page_tokens
        reply = cache_pb2.LookupReply(prompt_tokens=len(ids))
        for keys in gateway_find.parts(await self._prompt_keys(tenant, ids)):
            found = await self._held_first(keys)
            for key, (tiers, variants) in zip(keys, found, strict=False):
                start = step * len(reply.pages)
                reply.pages.add(key=key.hex(), start=start, end=start + step, tiers=tiers, variants=variants)
            if len(found) < len(keys):
                break
        return reply

    async def _prompt_keys(self, tenant: str, ids: Sequence[int]) -> list[PageKey]:
        """Keys of a prompt's pages; a long one's are made off the loop."""
        info, tokens = self._core.info, np.asarray(ids, dtype=np.int32)
        salt = tenant_salt(tenant, self._salts[tenant])
        make = partial(page_keys, root_key(info.root_fields), salt, tokens, info.page_tokens)
        return make() if len(ids) < THREADED_PROMPT else await asyncio.to_thread(make)

    async def _held_first(self, keys: Sequence[bytes]) -> list[tuple[list[str], list[str]]]:
        """See gateway_find.held_first: what all owners say of these keys."""
        answers = await self._ask(partial(_held, joined=b"".join(keys)))
        return gateway_find.held_first((held for _, held in answers), len(keys))

    async def explain(self, message: cache_pb2.ExplainRequest) -> cache_pb2.ExplainReply:
        """What a worker that ran a request remembers of it, the first one if it can, and how it went on elsewhere."""
        attempts, living = self._core.attempts(message.request_id), self._living_workers()
        silent: list[str] = []
        places: list[tuple[str, list[Worker]]] = [
            (attempt.request_id, [one for one in living if one.info.worker_id == attempt.worker_id])
            for attempt in attempts
        ]
        # Where it isn't known, a gateway before this one may have had it: workers find it by the client's id.
        for name, workers in places or [(message.request_id, living)]:
            explanation = await self._explained(name, workers, silent)
            if explanation is not None:
                return _explain_reply(message.request_id, explanation, attempts)
        if silent:
            raise Refusal(grpc.StatusCode.UNAVAILABLE, "; ".join(dict.fromkeys(silent)))
        raise Refusal(
            grpc.StatusCode.NOT_FOUND,
            f"no worker remembers request {quoted(message.request_id)}: only the latest ones are kept",
        )

    async def _explained(self, name: str, workers: Iterable[Worker], silent: list[str]) -> Explanation | None:
        """What the first of these workers remembers of a request that had this name there; who doesn't answer goes into
        `silent`.
        """

        async def ask(worker: Worker) -> Explanation | None:
            try:
                return await within(ASK_S, worker.port.explain(name))
            except OwnerDown as error:
                self._core.lose(worker, str(error))
            except Silence as silence:
                silent.append(f"{worker.info.worker_id} {silence}")
            except Refusal as refusal:
                silent.append(refusal.message)
            return None

        return next(filter(None, await together(map(ask, workers))), None)

    def _lose_replaced(self) -> None:
        """Of a worker that was taken out or restarted, what it counted before stays in the sum."""
        for worker_id, worker in list(self._counted.items()):
            if self._core.workers.get(worker_id) is not worker:
                self._ledger.lose(worker_id)
                del self._counted[worker_id]

    async def list_pages(self, message: cache_pb2.ListPagesRequest) -> cache_pb2.ListPagesReply:
        """Copies of pages, those of the highest tier first. Owners are asked until there are enough."""
        limit = message.limit or DEFAULT_LIST
        if limit > MAX_LIST:
            raise invalid(f"limit must be at most {MAX_LIST}, got {limit}")
        tenant = self._tenant(message.tenant)
        wanted = gateway_find.checked_tier(message.tier)
        found: list[PageInfo] = []
        for tier in TierName if wanted is None else (wanted,):
            owners = self._owners(tenant, tier)
            while owners and len(found) <= limit:
                missing = limit + 1 - len(found)
                at_once = max(1, gateway_find.MAX_ROWS // missing)
                found += await self._pages_in(tier, tenant, missing, owners[:at_once])
                owners = owners[at_once:]
        return self._listed(found, limit)

    async def _pages_in(
        self, tier: TierName, tenant: Tenant, limit: int, owners: Sequence[_Owner]
    ) -> list[PageInfo]:
        answers = await self._ask(lambda port: port.pages(tenant, tier, limit), owners)
        return [page for _, pages in answers for page in pages]

    async def show_page(self, message: cache_pb2.ShowPageRequest) -> cache_pb2.ListPagesReply:
        """All copies of one page."""
        [digits] = await self._whole_keys([message.key])
        pages: list[PageInfo] = []
        if len(digits) == KEY_DIGITS:
            key = bytes.fromhex(digits)
            answers = await self._ask(lambda port: port.pages_of([key]))
            pages = [page for _, copies in answers for page in copies]
        if not pages:
            raise Refusal(grpc.StatusCode.NOT_FOUND, f"no tier holds a page with key {digits}")
        return self._listed(pages, MAX_LIST)

    async def pin(self, message: cache_pb2.KeysRequest) -> cache_pb2.OutcomesReply:
        """Keep pages where they are until unpinned."""
        return await self._each_key(message.keys, lambda port, keys: port.pin(keys))

    async def unpin(self, message: cache_pb2.KeysRequest) -> cache_pb2.OutcomesReply:
        """Take pins back."""
        return await self._each_key(message.keys, lambda port, keys: port.unpin(keys))

    async def evict(self, message: cache_pb2.EvictRequest) -> cache_pb2.OutcomesReply:
        """Drop pages from one tier or from all; without keys, all pages of a tier."""
        tier = gateway_find.checked_tier(message.tier)
        if message.keys or tier is None:
            return await self._each_key(message.keys, lambda port, keys: port.evict(keys, tier), WORK_S)
        owners = self._owners(tier=tier)
        return await _of_all(await self._ask(lambda port: port.evict_all(tier), owners, WORK_S))

    async def clear(self, message: cache_pb2.ClearRequest) -> cache_pb2.OutcomesReply:
        """Drop and wipe all pages of a tenant, or of all. The reply names each part, and what is left to be done there."""
        tenant = self._tenant(message.tenant)
        digest = tenant_digest(tenant) if isinstance(tenant, str) else tenant
        number = await self._clearer.record.begin(digest)
        workers = [] if isinstance(tenant, bytes) else self._living_workers()
        asked = [_asked_worker(worker, self._core.lose) for worker in workers] + list(
            map(_asked_node, self.nodes)
        )
        answers, parts = await self._clearer.clear(asked, tenant, number, WORK_S)
        reply = await _of_all([(owner, answer.pages) for owner, answer in answers])
        reply.parts.extend([*self._unattached(), *parts])
        if any(part.outcome != cache_pb2.OUTCOME_ACCEPTED and not part.pages for part in reply.parts):
            # It may have any of these pages too, and doesn't say: none of them is known to be gone.
            done = reply.counts.pop(Outcome.ACCEPTED.value, 0)
            if done:
                reply.counts[Outcome.DEFERRED.value] += done
        return reply

    def _unattached(self) -> list[cache_pb2.PartOutcome]:
        """Nodes that there are, and that no process of has been heard of yet."""
        detail = "it has not been attached yet: its pages are cleared before it serves"
        return [
            cache_pb2.PartOutcome(part=node_id, outcome=cache_pb2.OUTCOME_DEFERRED, tier="L4", detail=detail)
            for node_id in sorted(self._expected - {node.node_id for node in self.nodes})
        ]

    async def verify(self, message: cache_pb2.KeysRequest) -> cache_pb2.OutcomesReply:
        """Compare checksums of these pages, or of all."""
        if message.keys:
            return await self._each_key(message.keys, lambda port, keys: port.verify(keys), WORK_S)
        return await _of_all(await self._ask(lambda port: port.verify_all(), limit_s=WORK_S))

    async def record(self, message: cache_pb2.RecordRequest) -> cache_pb2.RecordReply:
        """Have nodes record what they hear. Where one can't, those that began end again."""
        path, max_bytes = gateway_record.checked(message)
        nodes = self._recording_nodes(message)

        async def begin(node: Node) -> RecordingStatus | str:
            try:
                return await node.port.record(path, max_bytes, len(nodes) == 1)
            except RecordingError as error:
                return str(error)

        answers = await self._ask_nodes(begin, nodes)
        begun = {node_id: answer for node_id, answer in answers if not isinstance(answer, str)}
        if refusals := [f"{node_id}: {answer}" for node_id, answer in answers if isinstance(answer, str)]:
            began = [node for node in nodes if node.node_id in begun]
            await self._ask_nodes(lambda node: node.port.stop_recording(), began)
            raise gateway_record.cannot(refusals)
        return gateway_record.replied(begun.values())

    async def stop_record(self, message: cache_pb2.StopRecordRequest) -> cache_pb2.RecordReply:
        """End all recordings; how the latest ones went."""
        answers = await self._ask_nodes(lambda node: node.port.stop_recording(), self._living_nodes())
        statuses = [status for _, status in answers if status is not None]
        if not statuses:
            raise gateway_record.nothing()
        return gateway_record.replied(statuses)

    def _living_nodes(self) -> list[Node]:
        return [node for node in self.nodes if node.down is None]

    def _recording_nodes(self, message: cache_pb2.RecordRequest) -> list[Node]:
        """Those that are named, or all. Raises Refusal."""
        nodes = self._living_nodes()
        gateway_record.check_known(message.nodes, {node.node_id for node in nodes})
        return [node for node in nodes if not message.nodes or node.node_id in message.nodes]

    async def _ask_nodes(
        self, call: Callable[[Node], Awaitable[T]], nodes: Sequence[Node]
    ) -> list[tuple[str, T]]:
        """The answer of each of these nodes, which may work for WORK_S."""
        return await answers_of(
            [Call(node.node_id, node.lose, partial(call, node)) for node in nodes], WORK_S
        )

    async def attach_node(self, node: Node, limit_s: float = WORK_S) -> None:
        """It is there, new or restarted, and has applied the clears that it missed when this returns.

        Raises Silence, OwnerDown and Refusal; it answers no lookup then.
        """
        self._add_node(node)
        if await self._clearer.record.hear(await within(limit_s, node.port.clears())):
            for other in self.nodes:  # it knows of one that this gateway's record has lost
                if other is not node and other.down is None:
                    self._clearer.tell_later(_asked_node(other))
        await self._clearer.know(node.port, limit_s)

    async def attach_nodes(self) -> None:
        """At the start: all nodes apply what they missed. One that can't now answers no lookup, and is told again."""
        nodes = [node for node in self.nodes if node.down is None]
        for told in await asyncio.gather(*map(_clears_of, nodes)):
            await self._clearer.record.hear(told)

        async def tell(node: Node) -> None:
            try:
                await self._clearer.know(node.port, ASK_S)
            except (OwnerDown, Refusal, Silence, RuntimeError, TimeoutError) as error:
                log.error(
                    "node %s has not heard what was cleared, and is told again: %s", node.node_id, error
                )
                self._clearer.tell_later(_asked_node(node))

        await together(map(tell, nodes))

    def _add_node(self, node: Node) -> None:
        self.nodes = sorted(
            [node, *(other for other in self.nodes if other.node_id != node.node_id)],
            key=lambda one: (len(one.node_id), one.node_id),  # node-9 before node-10
        )

    async def node_statuses(self) -> list[inference_pb2.NodeStatus]:
        """Nodes as `kvtier status` shows them; asks each whether it lives."""
        return await together(map(self._node_status, self.nodes))

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
            exchange=self._core.addresses.of(node.node_id),
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

    def _owners(self, tenant: Tenant = None, tier: TierName | None = None) -> list[_Owner]:
        """The living ones that can hold a tenant's pages in a tier (None: in any).

        What runs now gave workers none of a tenant that isn't configured.
        """
        owners = []
        if tier in (None, TierName.HBM) and not isinstance(tenant, bytes):
            owners += [
                _Owner(worker.info.worker_id, worker.port, partial(self._core.lose, worker))
                for worker in self._living_workers()
            ]
        if tier not in (TierName.HBM, TierName.REMOTE):
            owners += [_Owner(node.node_id, node.port, node.lose) for node in self.nodes if node.down is None]
        return owners

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

    def _listed(self, pages: list[PageInfo], limit: int) -> cache_pb2.ListPagesReply:
        pages.sort(
            key=lambda page: (TIER_ORDER[page.tier.value], page.tenant, page.root, page.depth, page.key)
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
        wanted = [bytes.fromhex(key) for key in dict.fromkeys(keys) if len(key) == KEY_DIGITS]
        held = await self._held_by_owner(wanted)
        calls = [
            Call(owner.owner_id, owner.lose, partial(call, owner.port, held[owner.owner_id]))
            for owner in self._owners()
            if owner.owner_id in held
        ]
        answers = await answers_of(calls, ASK_S if limit_s is None else limit_s)
        return gateway_outcomes.of_each(keys, answers)

    async def _held_by_owner(self, keys: Sequence[bytes]) -> dict[str, list[bytes]]:
        """Which of these keys each owner has, by its id: those that have none aren't asked about them any more."""
        held: dict[str, list[bytes]] = {}
        for some in gateway_find.parts(keys):
            for owner_id, answer in await self._ask(partial(_held, joined=b"".join(some))):
                if found := gateway_find.held_of(answer, some):
                    held.setdefault(owner_id, []).extend(found)
        return held

    async def _whole_keys(self, given: Sequence[str]) -> list[str]:
        """The keys asked for, heads made whole; a head that no page has stays as it is."""
        keys = gateway_find.checked_keys(given)
        heads = gateway_find.heads_of(keys)
        if not heads:
            return keys
        limit = gateway_find.alike_limit(len(heads))
        answers = await self._ask(lambda port: port.keys_with(heads, limit))
        alike = gateway_find.alike(heads, (found for _, found in answers), limit)
        return [(alike[key].whole() or key) if key in alike else key for key in keys]


def _asked_worker(worker: Worker, lose: Callable[[Worker, str], object]) -> Asked:
    info = worker.info
    return Asked(info.worker_id, worker.port, partial(_lose, lose, worker), False, lambda: worker.down)


def _lose(lose: Callable[[Worker, str], object], worker: Worker, reason: str) -> None:
    lose(worker, reason)


def _asked_node(node: Node) -> Asked:
    return Asked(node.node_id, node.port, node.lose, True, lambda: node.down)


async def _clears_of(node: Node) -> Told:
    try:
        return await within(ASK_S, node.port.clears())
    except (OwnerDown, Refusal, Silence, RuntimeError, TimeoutError) as error:
        log.error("node %s does not say what it has been cleared by: %s", node.node_id, error)
        return []


async def _held(port: OwnerPort, joined: bytes) -> list[HeldKeys]:
    return await port.held(joined)


async def _of_all(answers: list[tuple[str, ManyOutcomes]]) -> cache_pb2.OutcomesReply:
    return await asyncio.to_thread(gateway_outcomes.of_all, answers)


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
