"""How parts are that the gateway doesn't watch itself: what it is told of them, and how `kvtier status` shows it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvtier.cluster.gateway.owners.status import Condition
from kvtier.cluster.gateway.ports import DEAD, HEALTHY, STALLED, UNHEALTHY
from kvtier.cluster.health.supervision import Incarnation, Kind, Member
from kvtier.proto import inference_pb2


@dataclass(frozen=True, slots=True)
class PartState:
    """Of one part. `since_s` is Unix time; `detail` says why it isn't healthy."""

    kind: Kind
    node: str
    health: str
    detail: str
    since_s: float


class PartStates:
    """What the gateway is to be told: of exchanges how they are, of the others only that they stall."""

    def __init__(self, members: Iterable[Member]) -> None:
        self._members = list(members)
        self._conditions: dict[str, tuple[Incarnation | None, Condition]] = {}  # by part, of one process

    def seen(
        self,
        living: Mapping[str, Incarnation],
        stalled: Mapping[str, float],
        wrong: Mapping[str, str | None],
        now_s: float,
    ) -> list[PartState]:
        """`living` are the processes of the parts that live, `stalled` for how long parts stall, and `wrong` what
        exchanges say that is wrong with them, None for nothing. `now_s` is Unix time."""
        found = []
        for member in self._members:
            name = member.name
            if member.kind is not Kind.EXCHANGE and name not in stalled:
                self._conditions.pop(name, None)
                continue
            health, detail = _health(name, living, stalled, wrong)
            condition = self._condition(name, living.get(name), now_s)
            since_s = condition.is_now(health, now_s - (stalled.get(name, 0.0) if health == STALLED else 0.0))
            found.append(PartState(member.kind, member.node, health, detail, since_s))
        return found

    def _condition(self, name: str, process: Incarnation | None, now_s: float) -> Condition:
        """Of the process that lives, or else of the latest that did."""
        known = self._conditions.get(name)
        if known is None or process not in (None, known[0]):
            known = self._conditions[name] = process, Condition(now_s)
        return known[1]


def _health(
    name: str,
    living: Mapping[str, Incarnation],
    stalled: Mapping[str, float],
    wrong: Mapping[str, str | None],
) -> tuple[str, str]:
    if name not in living:
        return DEAD, "its process ended, and it is restarted"
    if name in stalled:
        return STALLED, "its process lives, and its loop doesn't turn"
    said = wrong.get(name)
    return (HEALTHY, "") if said is None else (UNHEALTHY, said)


def show(states: Iterable[PartState], reply: inference_pb2.StatusReply) -> inference_pb2.StatusReply:
    """The same reply, with what is known of these parts."""
    nodes = {node.id: node for node in reply.nodes}
    for state in states:
        node = nodes.get(state.node)
        match state.kind:
            case Kind.EXCHANGE if node is not None:
                node.exchange_health, node.exchange_detail = state.health, state.detail
                node.exchange_since = state.since_s
            case Kind.NODE if node is not None:
                node.health, node.detail, node.since = state.health, state.detail, state.since_s
            case Kind.DIRECTORY:
                told = reply.directory
                told.health, told.detail, told.since = state.health, state.detail, state.since_s
            case _:
                pass  # a worker's state is the gateway's own to tell
    return reply
