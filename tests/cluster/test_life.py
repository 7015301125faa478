"""What is done when parts of a deployment die and come back, whatever the order: stories, and random ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.cluster.health.supervision import (
    ABSENT_S,
    GIVE_UP,
    LONGEST_WAIT_S,
    Answered,
    Command,
    Event,
    Kind,
    Life,
    Lost,
    Make,
    Member,
    Postponed,
    Say,
    Tell,
    Told,
    Wire,
)

WORKERS = ["worker-0", "worker-1"]
NODES = ["cache node node-0", "cache node node-1"]
ATTACHED = [*WORKERS, *NODES, "exchange of node-0", "exchange of node-1"]  # to the gateway
MEMBERS = [
    *(Member(name, Kind.WORKER, f"node-{number}") for number, name in enumerate(WORKERS)),
    *(Member(f"cache node node-{number}", Kind.NODE, f"node-{number}") for number in range(2)),
    *(Member(f"exchange of node-{number}", Kind.EXCHANGE, f"node-{number}") for number in range(2)),
    Member("directory", Kind.DIRECTORY),
    Member("gateway", Kind.GATEWAY),
]


def begun() -> Life:
    """All live, in their first process, and all has been told."""
    life = Life(MEMBERS)
    life.began({member.name: "1" for member in MEMBERS})
    for command in life.due(0.0):
        assert isinstance(command, Tell)
        life.handle(Told(command), 0.0)
    assert life.due(0.0) == []
    return life


def told(life: Life, now: float) -> list[tuple[Wire, str]]:
    """What is to be told now, and all of it is told well."""
    tells = [command for command in life.due(now) if isinstance(command, Tell)]
    for tell in tells:
        assert not life.handle(Told(tell), now)
    return [(tell.wire, tell.part) for tell in tells]


def test_at_first_workers_and_nodes_hear_of_the_directory_and_nothing_else() -> None:
    life = Life(MEMBERS)
    life.began({member.name: "1" for member in MEMBERS})

    names = [*WORKERS, "cache node node-0", "cache node node-1"]
    assert told(life, 0.0) == [(Wire.ANNOUNCE, name) for name in names]


def test_a_worker_that_comes_back_is_attached_and_hears_of_the_directory() -> None:
    life = begun()

    assert life.handle(Lost("worker-1", ""), 1.0) == [Say("worker-1 died")]
    assert life.due(1.0) == []
    assert life.handle(Answered("worker-1", "2"), 2.0) == [Say("worker-1 runs again")]
    assert told(life, 2.0) == [(Wire.ATTACH, "worker-1"), (Wire.ANNOUNCE, "worker-1")]
    assert told(life, 3.0) == []


def test_a_death_between_two_looks_is_told_too() -> None:
    life = begun()

    assert life.handle(Answered("worker-1", "2"), 2.0) == [Say("worker-1 died"), Say("worker-1 runs again")]
    assert (Wire.ATTACH, "worker-1") in told(life, 2.0)


def test_what_could_not_be_reached_is_attached_to_nothing_again() -> None:
    life = begun()

    assert life.handle(Lost("worker-1", "", is_dead=False), 1.0) == [Say("worker-1 can't be reached")]
    assert life.handle(Answered("worker-1", "1"), 2.0) == [Say("worker-1 answers again")]
    assert told(life, 2.0) == []


def test_an_exchange_that_comes_back_is_attached_and_announced_by_all_of_its_node() -> None:
    """It may be at another address."""
    life = begun()

    life.handle(Lost("exchange of node-1", ""), 1.0)
    assert life.due(1.0) == []
    life.handle(Answered("exchange of node-1", "2"), 2.0)

    assert told(life, 2.0) == [
        (Wire.ATTACH, "exchange of node-1"),
        (Wire.ANNOUNCE, "worker-1"),
        (Wire.ANNOUNCE, "cache node node-1"),
    ]


def test_a_gateway_is_made_again_and_started_with_the_workers_that_live() -> None:
    life = begun()
    life.handle(Lost("worker-0", ""), 1.0)

    life.handle(Lost("gateway", "", is_over=True), 1.0)
    assert life.due(1.0) == [Make("gateway")]
    assert life.due(1.1) == []
    life.handle(Answered("gateway", "2"), 2.0)
    [start] = life.due(2.0)
    others = [f"{what} node-{number}" for what in ("cache node", "exchange of") for number in range(2)]
    living = (*((name, "1") for name in ["worker-1", *others]), ("directory", "handle 0"))
    assert start == Tell(Wire.START, "gateway", ("2",), living)
    assert life.handle(Told(start), 2.0) == []

    assert told(life, 2.0) == []  # worker-1 came with the start
    life.handle(Answered("worker-0", "2"), 3.0)
    assert told(life, 3.0) == [(Wire.ATTACH, "worker-0"), (Wire.ANNOUNCE, "worker-0")]


def test_a_worker_that_comes_while_the_gateway_starts_is_attached_after_it() -> None:
    life = begun()
    life.handle(Lost("worker-0", ""), 1.0)
    life.handle(Lost("gateway", "", is_over=True), 1.0)
    life.due(1.0)
    life.handle(Answered("gateway", "2"), 2.0)
    [start] = life.due(2.0)

    life.handle(Answered("worker-0", "2"), 2.5)
    assert told(life, 2.5) == [(Wire.ANNOUNCE, "worker-0")]
    assert isinstance(start, Tell)
    life.handle(Told(start), 3.0)

    assert told(life, 3.0) == [(Wire.ATTACH, "worker-0")]


def test_a_gateway_that_cannot_start_is_made_again_ever_more_slowly_until_that_is_hopeless() -> None:
    life = begun()
    life.handle(Lost("gateway", "", is_over=True), 0.0)
    made: list[float] = []
    said: list[Command] = []
    now = 0.0
    while not life.hopeless():
        now += 0.5
        assert now < 1000
        for command in life.due(now):
            if isinstance(command, Make):
                made.append(now)
                life.handle(Answered("gateway", f"{now}"), now)
            elif isinstance(command, Tell) and command.wire is Wire.START:
                said += life.handle(Told(command, "the port is taken"), now)

    assert said == [Say("gateway can't start: the port is taken")]
    assert "the port is taken" in life.hopeless()
    assert len(made) == GIVE_UP
    waits = [later - earlier for earlier, later in pairwise(made)]
    assert waits == sorted(waits) and waits[-1] <= LONGEST_WAIT_S + 1


def test_a_process_that_answers_after_it_could_not_start_is_not_started_again() -> None:
    life = begun()
    life.handle(Lost("gateway", "", is_over=True), 0.0)
    life.due(0.0)
    life.handle(Answered("gateway", "2"), 1.0)
    [start] = life.due(1.0)
    assert isinstance(start, Tell)
    life.handle(Told(start, "no port"), 1.0)

    assert life.handle(Answered("gateway", "2"), 1.1) == []
    assert life.due(1.1) == []
    assert life.due(2.0) == [Make("gateway")]


def test_one_worker_that_cannot_be_made_leaves_hope_and_two_do_not() -> None:
    life = begun()

    def spoil(worker: str) -> None:
        now = 0.0
        for _ in range(GIVE_UP + 1):
            life.handle(Lost(worker, "no memory", is_over=True), now)
            now += LONGEST_WAIT_S
            life.due(now)

    spoil("worker-0")
    assert life.hopeless() == ""
    spoil("worker-1")
    assert "no memory" in life.hopeless()


def test_why_a_part_cannot_be_made_is_said_at_first_and_when_it_is_hopeless() -> None:
    life, now = begun(), 0.0
    assert life.handle(Lost("worker-1", "", is_over=True), now) == [Say("worker-1 died")]
    said: list[list[Command]] = []
    for _ in range(GIVE_UP + 2):
        now += LONGEST_WAIT_S
        assert life.due(now) == [Make("worker-1")]
        said.append(life.handle(Lost("worker-1", "CUDA out of memory", is_over=True), now))
        assert (
            life.handle(Lost("worker-1", "CUDA out of memory", is_over=True), now) == []
        )  # the same attempt

    spoken = {number: lines for number, lines in enumerate(said, 1) if lines}
    assert list(spoken) == [1, GIVE_UP]
    for [line] in spoken.values():
        assert isinstance(line, Say) and "worker-1" in line.text and "CUDA out of memory" in line.text
    assert life.hopeless() == ""


def test_a_failure_is_said_once_and_tried_until_it_goes_well() -> None:
    life = begun()
    life.handle(Answered("worker-0", "2"), 0.0)
    attach, announce = life.due(0.0)
    assert isinstance(attach, Tell) and isinstance(announce, Tell)
    life.handle(Told(announce), 0.0)

    [line] = life.handle(Told(attach, "timed out"), 0.0)
    assert isinstance(line, Say) and "worker-0" in line.text and "timed out" in line.text
    assert life.due(0.5) == []
    assert life.due(1.0) == [attach]
    assert life.handle(Told(attach, "timed out"), 1.0) == []
    assert life.due(2.9) == []
    assert life.due(3.0) == [attach]
    assert life.handle(Told(attach), 3.0) == []
    assert life.due(100.0) == []


def test_the_answer_of_a_process_that_is_gone_changes_nothing() -> None:
    life = begun()
    life.handle(Answered("worker-0", "2"), 0.0)
    old = life.due(0.0)
    life.handle(Answered("worker-0", "3"), 1.0)
    new = life.due(1.0)
    assert len(new) == len(old) == 2

    for tell, failure in zip(old, ("", "its process ended"), strict=True):
        assert isinstance(tell, Tell)
        assert life.handle(Told(tell, failure), 2.0) == []
    assert life.due(10.0) == []  # the new ones are under way
    for tell in new:
        assert isinstance(tell, Tell)
        life.handle(Told(tell, "a failure"), 11.0)
    assert life.due(100.0) == new


def test_what_came_back_well_is_made_at_once_when_it_dies_again() -> None:
    life, now = begun(), 0.0
    for _ in range(3):
        life.handle(Lost("worker-0", "no memory", is_over=True), now)
        now += LONGEST_WAIT_S
        assert Make("worker-0") in life.due(now)
    life.handle(Answered("worker-0", "2"), now)
    told(life, now)

    life.handle(Lost("worker-0", "", is_over=True), now)

    assert life.due(now) == [Make("worker-0")]


def test_a_directory_that_ray_starts_again_is_told_to_nothing() -> None:
    """It has the same handle, and asks for all that it must know."""
    life = begun()

    assert life.handle(Lost("directory", ""), 1.0) == [Say("directory died")]
    assert life.due(1.0) == []
    assert life.handle(Answered("directory", "2"), 2.0) == [Say("directory runs again")]
    assert life.due(2.0) == []


def test_a_directory_that_ray_gives_up_is_made_again_and_all_is_told_of_the_new_one() -> None:
    life = begun()
    life.handle(Lost("directory", "", is_over=True), 1.0)

    [make, *tells] = life.due(1.0)

    assert make == Make("directory")
    wires = [(tell.wire, tell.part) for tell in tells if isinstance(tell, Tell)]
    names = [*WORKERS, "cache node node-0", "cache node node-1"]
    assert wires == [(Wire.ATTACH, "directory"), *((Wire.ANNOUNCE, name) for name in names)]


def test_what_has_no_machine_is_tried_again_and_again_and_gives_up_nothing() -> None:
    life, said = begun(), []
    life.handle(Lost("worker-0", "", is_over=True), 0.0)
    life.handle(Lost("worker-1", "", is_over=True), 0.0)
    makes = 0
    for second in range(300):
        for command in life.due(float(second)):
            if isinstance(command, Make):
                makes += 1
                said += life.handle(Postponed(command.part, "no machine has room"), float(second))

    assert makes == 2 * 300
    assert said == [Say(f"worker-{number} waits: no machine has room") for number in range(2)]
    assert life.hopeless() == ""
    life.due(300.0)
    assert life.handle(Answered("worker-0", "2"), 301.0) == [Say("worker-0 runs again")]


def test_a_part_whose_constructor_hangs_is_made_again_and_hopeless_in_the_end() -> None:
    """No call to it is ever answered and no process dies: it was waited for without end."""
    life, now = begun(), 0.0
    life.handle(Lost("gateway", "", is_over=True), now)
    assert life.due(now) == [Make("gateway")]

    for _ in range(GIVE_UP - 1):
        assert life.due(now + ABSENT_S - 1) == [] and not life.hopeless()
        now += ABSENT_S
        assert Say("gateway answers nothing for 300 s, and is restarted") in life.due(now)
        now += LONGEST_WAIT_S
        assert life.due(now) == [Make("gateway")]
    assert life.hopeless() == "the gateway can't be started again: it answers nothing for 300 s"


def test_what_can_not_be_reached_is_made_again_after_a_while_unless_it_answers() -> None:
    life = begun()
    life.handle(Lost("worker-0", "", is_dead=False), 0.0)
    life.handle(Lost("worker-1", "", is_dead=False), 0.0)
    life.handle(Answered("worker-1", "1"), 1.0)

    assert life.due(ABSENT_S - 1) == []
    commands = life.due(ABSENT_S)

    assert commands == [Say("worker-0 answers nothing for 300 s, and is restarted"), Make("worker-0")]


@dataclass
class World:
    """Processes as they are, and what each has been told, by the incarnations that it was about."""

    alive: dict[str, str] = field(default_factory=lambda: {member.name: "1" for member in MEMBERS})
    started: tuple[str, ...] = ("1",)  # the gateway that serves
    attached: dict[str, str] = field(default_factory=lambda: {name: "1" for name in ATTACHED})
    directory: int = 0  # how often it was restarted: all has to know the handle of the last time
    gateway_knows: int = 0
    announced: dict[str, tuple[str, ...]] = field(default_factory=dict)
    births: int = 1

    def born(self, name: str) -> None:
        self.births += 1
        self.alive[name] = str(self.births)

    def take(self, tell: Tell) -> bool:
        """Do it, if those it is about live; whether it went well."""
        if self.alive.get(tell.part) is None or self.alive.get("gateway") is None:
            return False
        if tell.wire is Wire.START:
            self.started = (self.alive["gateway"],)
            self.attached = {name: inc for name, inc in tell.living if self.alive.get(name) == inc}
            self.gateway_knows = self.directory
        elif tell.part == "directory":
            self.gateway_knows = self.directory
        elif tell.wire is Wire.ATTACH:
            self.attached[tell.part] = self.alive[tell.part]
        else:
            self.announced[tell.part] = tell.about
        return True


KINDS = {member.name: member.kind for member in MEMBERS}


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_after_any_deaths_all_is_told_of_all(data: st.DataObject) -> None:
    """Whatever dies when, whatever fails and in which order it is seen: in quiet time nothing is left out.

    Ray starts the directory again until it gives up, which may be at any time.
    """
    life, world, now = Life(MEMBERS), World(), 0.0
    life.began(dict(world.alive))

    def see(name: str) -> Event:
        incarnation = world.alive.get(name)
        if incarnation is not None:
            return Answered(name, incarnation)
        return Lost(name, "", is_over=KINDS[name] is not Kind.DIRECTORY or is_given_up)

    def carry_out(commands: list[Command], *, may_fail: bool) -> None:
        for command in commands:
            if isinstance(command, Make):
                if may_fail and data.draw(st.booleans(), label="has no machine"):
                    life.handle(Postponed(command.part, "no machine"), now)
                    continue
                world.born(command.part)
                world.directory += command.part == "directory"
            elif isinstance(command, Tell):
                fails = may_fail and data.draw(st.booleans(), label="fails")
                ok = not fails and world.take(command)
                life.handle(Told(command, "" if ok else "failed"), now)

    is_given_up = False
    for _ in range(data.draw(st.integers(1, 12), label="steps")):
        is_given_up = is_given_up or data.draw(st.booleans(), label="Ray gives the directory up")
        now += data.draw(st.floats(0.1, 5.0), label="seconds")
        name = data.draw(st.sampled_from(sorted(KINDS)), label="part")
        if data.draw(st.booleans(), label="dies"):
            world.alive.pop(name, None)
        elif name == "directory" and name not in world.alive and not is_given_up:
            world.born(name)  # Ray does
        if data.draw(st.booleans(), label="is seen"):
            life.handle(see(name), now)
        carry_out(life.due(now), may_fail=True)
    for _ in range(60):
        now += 5.0
        for name in KINDS:
            life.handle(see(name), now)
        carry_out(life.due(now), may_fail=False)
        if life.hopeless():
            return

    assert world.started == (world.alive["gateway"],)
    assert world.attached == {name: world.alive[name] for name in ATTACHED}
    for name in [*WORKERS, *NODES]:
        exchange = world.alive[f"exchange of node-{name[-1]}"]
        assert world.announced[name] == (world.alive[name], f"handle {world.directory}", exchange)
    assert world.gateway_knows == world.directory
    assert life.due(now) == []


@pytest.mark.parametrize("kind", list(Kind))
def test_without_a_directory_nothing_is_told_of_one(kind: Kind) -> None:
    life = Life([Member("worker-0", Kind.WORKER, "node-0"), Member("gateway", Kind.GATEWAY)])
    life.began({"worker-0": "1", "gateway": "1"})

    assert life.due(0.0) == []
    assert life.living(kind) == {Kind.WORKER: ["worker-0"], Kind.GATEWAY: ["gateway"]}.get(kind, [])
