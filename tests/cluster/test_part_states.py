"""What `kvtier status` says of parts that the gateway doesn't watch itself."""

from __future__ import annotations

from kvtier.cluster.gateway.owners.part_states import PartState, PartStates, show
from kvtier.cluster.gateway.ports import DEAD, HEALTHY, STALLED, UNHEALTHY
from kvtier.cluster.health.supervision import Kind, Member
from kvtier.proto import inference_pb2

EXCHANGE = "exchange of node-0"
MEMBERS = [
    Member("cache node node-0", Kind.NODE, "node-0"),
    Member(EXCHANGE, Kind.EXCHANGE, "node-0"),
    Member("directory", Kind.DIRECTORY),
    Member("worker-0", Kind.WORKER, "node-0"),
]
ALL = {member.name: "1" for member in MEMBERS}


def exchange(health: str, detail: str, since_s: float) -> PartState:
    return PartState(Kind.EXCHANGE, "node-0", health, detail, since_s)


def test_an_exchange_is_as_it_says_since_it_was_seen_so() -> None:
    states = PartStates(MEMBERS)

    assert states.seen(ALL, {}, {}, 5.0) == [exchange(HEALTHY, "", 5.0)]
    assert states.seen(ALL, {}, {EXCHANGE: None}, 6.0) == [exchange(HEALTHY, "", 5.0)]
    assert states.seen(ALL, {}, {EXCHANGE: "no node"}, 7.0) == [exchange(UNHEALTHY, "no node", 7.0)]
    assert states.seen(ALL, {}, {EXCHANGE: "no node"}, 8.0) == [exchange(UNHEALTHY, "no node", 7.0)]
    assert states.seen(ALL | {EXCHANGE: "2"}, {}, {EXCHANGE: None}, 9.0) == [exchange(HEALTHY, "", 9.0)]


def test_one_that_died_is_dead_and_its_next_life_begins_again() -> None:
    states = PartStates(MEMBERS)
    states.seen(ALL, {}, {EXCHANGE: None}, 5.0)

    [dead] = states.seen({"directory": "1"}, {}, {EXCHANGE: None}, 6.0)
    assert (dead.health, dead.since_s) == (DEAD, 6.0)
    assert states.seen(ALL | {EXCHANGE: "2"}, {}, {EXCHANGE: None}, 7.0) == [exchange(HEALTHY, "", 7.0)]


def test_parts_that_stall_are_stalled_while_they_do() -> None:
    states = PartStates(MEMBERS)
    still = {"directory": 15.0, EXCHANGE: 20.0}

    found = states.seen(ALL, still, {EXCHANGE: None}, 50.0)
    assert {(one.kind, one.health, one.since_s) for one in found} == {
        (Kind.EXCHANGE, STALLED, 30.0),
        (Kind.DIRECTORY, STALLED, 35.0),
    }
    later = states.seen(ALL, {name: for_s + 1 for name, for_s in still.items()}, {}, 51.0)
    assert [one.since_s for one in later] == [one.since_s for one in found]
    assert states.seen(ALL, {}, {EXCHANGE: None}, 60.0) == [exchange(HEALTHY, "", 60.0)]


def test_they_are_shown_where_they_belong() -> None:
    reply = inference_pb2.StatusReply(
        nodes=[inference_pb2.NodeStatus(id=f"node-{n}", health=HEALTHY, since=1.0) for n in range(2)],
        directory=inference_pb2.DirectoryStatus(health=UNHEALTHY, entries=7),
    )

    show(
        [
            PartState(Kind.EXCHANGE, "node-0", UNHEALTHY, "no node", 7.0),
            PartState(Kind.NODE, "node-1", STALLED, "it is stalled", 8.0),
            PartState(Kind.DIRECTORY, "", STALLED, "it is stalled", 9.0),
            PartState(Kind.EXCHANGE, "node-9", HEALTHY, "", 9.0),
        ],
        reply,
    )

    first, second = reply.nodes
    assert (first.exchange_health, first.exchange_detail, first.exchange_since) == (UNHEALTHY, "no node", 7.0)
    assert (first.health, second.exchange_health) == (HEALTHY, "")
    assert (second.health, second.detail, second.since) == (STALLED, "it is stalled", 8.0)
    assert (reply.directory.health, reply.directory.since, reply.directory.entries) == (STALLED, 9.0, 7)
