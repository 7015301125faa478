"""Parts that stall are told and killed, and no others, whatever answers come when."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.cluster.health.heartbeats import ASK_EVERY_S, LONGEST_LOOK_S, Ask, Heartbeats, Kill
from kvtier.cluster.health.supervision import Say

AFTER_S = 60.0


def kills(commands: list[Ask | Say | Kill]) -> list[str]:
    return [command.part for command in commands if isinstance(command, Kill)]


def said(commands: list[Ask | Say | Kill]) -> list[str]:
    return [command.text for command in commands if isinstance(command, Say)]


def test_a_part_that_answers_nothing_is_told_after_a_quarter_of_the_time_and_killed_after_all_of_it() -> None:
    heartbeats = Heartbeats(AFTER_S)
    lines: list[tuple[int, str]] = []
    dead: list[int] = []
    for second in range(200):
        found = heartbeats.look({"directory": "1"}, float(second))
        lines += [(second, text) for text in said(found)]
        dead += [second for _ in kills(found)]

    assert lines[0] == (15, "directory is stalled for 15 s")
    assert lines[1] == (60, "directory is stalled for 60 s, and is killed")
    assert [second for second, _ in lines] == [15, 60, 120, 180]
    assert dead == [60, 120, 180], "a death that isn't seen is asked for again"
    assert heartbeats.stalled() == {"directory": 199.0}


def test_a_part_whose_loop_does_not_turn_is_stalled_although_it_answers() -> None:
    heartbeats, dead = Heartbeats(AFTER_S), []
    for second in range(70):
        found = heartbeats.look({"worker-0": "1"}, float(second))
        if Ask("worker-0") in found:
            heartbeats.answered("worker-0", "1", float(second))
        dead += [second for _ in kills(found)]

    assert dead == [60]


def test_one_that_goes_on_is_told_and_lives() -> None:
    heartbeats, lines = Heartbeats(AFTER_S), []
    for second in range(300):
        found = heartbeats.look({"gateway": "1"}, float(second))
        lines += said(found)
        assert not kills(found)
        if second == 40 or (second > 40 and Ask("gateway") in found):
            heartbeats.answered("gateway", "1", 0.0)

    assert lines == ["gateway is stalled for 15 s", "gateway goes on"]
    assert heartbeats.stalled() == {}


def test_another_process_begins_again_and_the_answer_of_the_old_one_says_nothing_of_it() -> None:
    heartbeats = Heartbeats(AFTER_S)
    for second in range(50):
        heartbeats.look({"worker-0": "1"}, float(second))
    for second in range(50, 109):
        found = heartbeats.look({"worker-0": "2"}, float(second))
        heartbeats.answered("worker-0", "1", 0.0)
        assert not kills(found)

    assert kills(heartbeats.look({"worker-0": "2"}, 110.0)) == ["worker-0"]


def test_time_in_which_nothing_looked_kills_nothing() -> None:
    """A supervisor that was stalled itself finds questions of long ago, whose answers it has not taken yet."""
    heartbeats = Heartbeats(AFTER_S)
    assert heartbeats.look({"worker-0": "1"}, 0.0) == [Ask("worker-0")]

    assert heartbeats.look({"worker-0": "1"}, 1000.0) == []


def test_a_question_that_failed_is_asked_again_after_a_pause() -> None:
    heartbeats = Heartbeats(AFTER_S)
    assert heartbeats.look({"worker-0": "1"}, 0.0) == [Ask("worker-0")]
    heartbeats.failed("worker-0", "1")

    assert heartbeats.look({"worker-0": "1"}, ASK_EVERY_S / 2) == []
    assert heartbeats.look({"worker-0": "1"}, ASK_EVERY_S) == [Ask("worker-0")]


@dataclass
class _Asked:
    part: str
    incarnation: str
    answer_at: float | None  # None: never
    turned: float


PARTS = ["worker-0", "cache node node-0", "exchange of node-0", "directory", "gateway"]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_what_turns_lives_and_what_is_stalled_dies_in_time(data: st.DataObject) -> None:
    """Against a world in which each part is stalled from a time on, or never, and the supervisor looks unevenly."""
    after = data.draw(st.sampled_from([5.0, 20.0]), label="after")
    stops = {part: data.draw(st.none() | st.floats(0, 30), label=part) for part in PARTS}
    answers_still = {
        part: data.draw(st.booleans(), label=f"{part} answers while it stands") for part in PARTS
    }
    lateness = data.draw(st.floats(0, 0.5), label="an answer takes")
    heartbeats, questions, now, counted = Heartbeats(after), [], 0.0, 0.0
    killed: dict[str, float] = {}
    stood: dict[str, float] = {}  # seconds that were looked at

    while counted < 30 + 2 * after:
        step = data.draw(st.sampled_from([0.5, 0.5, 0.5, 1.0, 30.0]), label="pause")
        now += step
        counted += min(step, LONGEST_LOOK_S)
        for question in [q for q in questions if q.answer_at is not None and q.answer_at <= now]:
            questions.remove(question)
            stop = stops[question.part]
            still = 0.0 if stop is None else max(0.0, question.turned - stop)
            heartbeats.answered(question.part, question.incarnation, still)
        living = {part: "1" for part in PARTS if part not in killed}
        for part in living:
            stop = stops[part]
            if stop is not None and now >= stop:
                stood.setdefault(part, counted)
        found = heartbeats.look(living, now)
        for part in kills(found):
            killed[part] = counted
        for command in found:
            if isinstance(command, Ask):
                stop = stops[command.part]
                answers = stop is None or now < stop or answers_still[command.part]
                assert not [q for q in questions if q.part == command.part], "one question at a time"
                questions.append(_Asked(command.part, "1", now + lateness if answers else None, now))

    assert {part for part, stop in stops.items() if stop is not None} == set(killed)
    slack = ASK_EVERY_S + 2 * LONGEST_LOOK_S
    for part, at in killed.items():
        if not answers_still[part]:
            assert after - slack <= at - stood[part] <= after + slack
