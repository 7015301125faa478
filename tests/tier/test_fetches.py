"""How fast a node is, by what comes of the fetches from it."""

from __future__ import annotations

import pytest

from kvtier.tier.node.state.fetches import PeerSpeed

MIB = 2**20


def fetch_at(
    speed: PeerSpeed, now: float, nbytes: int, bytes_s: float, latency_s: float, batch: int
) -> float:
    """A fetch of so many bytes, told of in batches; when it is over."""
    speed.began(now)
    now += latency_s
    while nbytes > 0:
        now += min(batch, nbytes) / bytes_s
        speed.came(min(batch, nbytes), now)
        nbytes -= batch
    speed.ended(now)
    return now


@pytest.mark.parametrize("bytes_s", [1e6, 1e7, 1e8, 2e9])
def test_the_first_fetch_of_a_few_batches_tells_both_numbers(bytes_s: float) -> None:
    """The time of the first batch of a slow node was taken for latency, as if the batch had come at the assumed speed."""
    speed = PeerSpeed()

    fetch_at(speed, 5.0, 24 * MIB, bytes_s, 0.004, 2 * MIB)

    for nbytes in (MIB, 20 * MIB, 100 * MIB):
        assert speed.load_s(nbytes) == pytest.approx(0.004 + nbytes / bytes_s, rel=0.05)


def test_a_fetch_of_a_single_batch_tells_what_another_one_takes_and_is_not_taken_for_more() -> None:
    speed = PeerSpeed()

    now = fetch_at(speed, 5.0, 2 * MIB, 1e6, 0.004, 2 * MIB)

    assert speed.load_s(2 * MIB) == pytest.approx(2.1, rel=0.1)
    assert speed.may_try(60.0, now), "its speed isn't known"


def test_the_pause_between_two_fetches_is_not_taken_for_slowness() -> None:
    """A second fetch that begins once the first one's pages are here waits for its own first byte: that is latency."""
    speed = PeerSpeed()

    now = 5.0
    for nbytes in (MIB, 12 * MIB, 12 * MIB):
        speed.began(now)
        now += 0.2
        for _ in range(nbytes // MIB):
            now += MIB / 16e6
            speed.came(MIB, now)
    speed.ended(now)

    assert speed.load_s(32 * MIB) == pytest.approx(0.2 + 32 * MIB / 16e6, rel=0.1)


def test_bursts_are_averaged_over_time() -> None:
    """Two streams whose batches come in pairs: each second window was one of milliseconds, and counted as the first one."""
    speed = PeerSpeed()
    speed.began(5.0)

    now = 5.0
    for _ in range(8):
        now += 4 * MIB / 8e6
        speed.came(2 * MIB, now)
        speed.came(2 * MIB, now + 0.006)
    speed.ended(now + 0.006)

    assert speed.load_s(32 * MIB) == pytest.approx(32 * MIB / 8e6, rel=0.15)
    assert speed.load_s(64 * MIB) == pytest.approx(64 * MIB / 8e6, rel=0.15)


def test_a_pair_of_batches_that_came_together_tells_no_speed_at_which_they_came() -> None:
    """The 6 ms between the first two batches of a node were its first window: it was taken for 350 MB/s."""
    speed = PeerSpeed()
    speed.began(5.0)
    speed.came(2 * MIB, 5.5)

    speed.came(2 * MIB, 5.506)
    speed.ended(5.506)

    assert speed.load_s(32 * MIB) > 2.0
    assert not speed.is_known(5.506)


def test_a_node_that_stays_as_slow_as_it_was_is_tried_no_more_often() -> None:
    """What said nothing new was not counted, so that the node was one of unknown speed from the second failure on."""
    speed, now, tries = PeerSpeed(), 5.0, 0
    while now < 605.0:
        if speed.may_try(30.0, now):
            tries += 1
            speed.tries(now)
            speed.began(now)
            speed.failed(now + 1.6, was_slow=True)
            speed.ended(now + 1.6)
        now += 1.0

    assert tries <= 600.0 / PeerSpeed.TRUSTED_S


def test_a_fetch_that_stalls_behind_its_first_batch_teaches_that_too() -> None:
    speed = PeerSpeed()
    speed.began(5.0)
    speed.came(2 * MIB, 5.01)

    speed.failed(8.01, was_slow=True)
    speed.ended(8.01)

    assert speed.load_s(20 * MIB) > 20.0


def test_a_wait_for_what_the_other_node_had_to_save_first_is_not_taken_for_slowness() -> None:
    speed = PeerSpeed()
    now = fetch_at(speed, 5.0, 24 * MIB, 1e8, 0.004, 2 * MIB)
    before = speed.load_s(MIB), speed.load_s(100 * MIB)

    for first in (False, True):
        speed.began(now)
        if first:
            speed.came(2 * MIB, now + 0.004 + 2 * MIB / 1e8)
            speed.came(1024, now + 0.03)
        now += 0.8
        speed.waited(now)
        speed.ended(now)

    assert (speed.load_s(MIB), speed.load_s(100 * MIB)) == pytest.approx(before, rel=0.05)
