"""The baseline policies as their papers tell them, one page at a time and in plain lists, for comparison."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter


class Model(ABC):
    """Pages that are in, and what a policy keeps of them. All of a request comes in, then one page after another leaves."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.held: set[int] = set()
        self.touches = 0
        self.requests = 0
        self.chain: list[int] = []

    def request(self, chain: list[int]) -> int:
        hits = next((i for i, page in enumerate(chain) if page not in self.held), len(chain))
        was_in = self.held & set(chain)
        self.held |= set(chain)
        self.chain = chain
        self.requests += 1
        self.begin()
        for page in reversed(chain):
            self.touches += 1
            self.touch(page, page in was_in)
        self.settle()
        while len(self.held) > self.capacity:
            self.held.remove(self.victim())
        self.forget()
        return hits

    def begin(self) -> None:  # noqa: B027
        """Before the first touch of a request."""

    def settle(self) -> None:  # noqa: B027
        """After its last touch."""

    def forget(self) -> None:  # noqa: B027
        """After the last page that leaves."""

    @abstractmethod
    def touch(self, page: int, was_in: bool) -> None: ...

    @abstractmethod
    def victim(self) -> int: ...


class FifoModel(Model):
    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.queue: list[int] = []

    def touch(self, page: int, was_in: bool) -> None:
        if not was_in:
            self.queue.append(page)

    def victim(self) -> int:
        return self.queue.pop(0)


class RankedModel(Model):
    """The page with the lowest tuple leaves."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.rank: dict[int, tuple[int, ...]] = {}
        self.uses: Counter[int] = Counter()

    def touch(self, page: int, was_in: bool) -> None:
        self.uses[page] += 1
        self.rank[page] = self.rank_of(page)

    def victim(self) -> int:
        return min(self.held, key=self.rank.__getitem__)

    @abstractmethod
    def rank_of(self, page: int) -> tuple[int, ...]: ...


class LfuModel(RankedModel):
    def rank_of(self, page: int) -> tuple[int, ...]:
        return self.uses[page], self.touches


class LengthFirstModel(RankedModel):
    def rank_of(self, page: int) -> tuple[int, ...]:
        return -len(self.chain), self.touches


class LengthAwareModel(RankedModel):
    def rank_of(self, page: int) -> tuple[int, ...]:
        return self.uses[page], -self.chain.index(page), self.requests


class GdsfModel(RankedModel):
    clock = 0

    def rank_of(self, page: int) -> tuple[int, ...]:
        return self.clock + self.uses[page], -self.chain.index(page), self.requests

    def victim(self) -> int:
        page = super().victim()
        self.clock = max(self.clock, self.rank[page][0])
        return page


class SlruModel(Model):
    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.probation: list[int] = []
        self.protected: list[int] = []

    def touch(self, page: int, was_in: bool) -> None:
        take(page, self.probation, self.protected)
        (self.protected if was_in else self.probation).append(page)

    def settle(self) -> None:
        while len(self.protected) > self.capacity * 4 // 5:
            self.probation.append(self.protected.pop(0))

    def victim(self) -> int:
        return self.probation.pop(0)


class ArcModel(Model):
    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.once: list[int] = []
        self.often: list[int] = []
        self.lost_once: list[int] = []
        self.lost_often: list[int] = []
        self.target = 0.0

    def touch(self, page: int, was_in: bool) -> None:
        b1, b2 = len(self.lost_once), len(self.lost_often)
        if page in self.lost_once:
            self.target = min(self.capacity, self.target + max(1.0, b2 / b1))
        elif page in self.lost_often:
            self.target = max(0.0, self.target - max(1.0, b1 / b2))
        known = take(page, self.once, self.often, self.lost_once, self.lost_often)
        (self.often if known else self.once).append(page)

    def victim(self) -> int:
        if self.once and (len(self.once) > self.target or not self.often):
            self.lost_once.append(self.once.pop(0))
            return self.lost_once[-1]
        self.lost_often.append(self.often.pop(0))
        return self.lost_often[-1]

    def settle(self) -> None:
        self.forget()

    def forget(self) -> None:
        while self.lost_once and len(self.once) + len(self.lost_once) > self.capacity:
            del self.lost_once[0]
        lists = (self.once, self.often, self.lost_once, self.lost_often)
        while self.lost_often and sum(map(len, lists)) > 2 * self.capacity:
            del self.lost_often[0]


class S3FifoModel(Model):
    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.small: list[int] = []
        self.main: list[int] = []
        self.lost: list[int] = []
        self.uses: dict[int, int] = {}

    def touch(self, page: int, was_in: bool) -> None:
        if was_in:
            self.uses[page] = min(3, self.uses[page] + 1)
            return
        self.uses[page] = 0
        (self.main if take(page, self.lost) else self.small).append(page)

    def victim(self) -> int:
        while True:
            if len(self.small) > self.capacity // 10 or not self.main:
                page = self.small.pop(0)
                if not self.uses[page]:
                    self.lost.append(page)
                    del self.lost[: max(0, len(self.lost) - self.capacity * 9 // 10)]
                    return page
                self.uses[page] = 0
            else:
                page = self.main.pop(0)
                if not self.uses[page]:
                    return page
                self.uses[page] -= 1
            self.main.append(page)


class SieveModel(Model):
    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.queue: list[int] = []
        self.used: dict[int, bool] = {}
        self.hand = 0

    def touch(self, page: int, was_in: bool) -> None:
        self.used[page] = was_in
        if not was_in:
            self.queue.append(page)

    def victim(self) -> int:
        while True:
            self.hand %= len(self.queue)
            page = self.queue[self.hand]
            if not self.used[page]:
                return self.queue.pop(self.hand)
            self.used[page] = False
            self.hand += 1

    def forget(self) -> None:
        self.hand %= len(self.queue)


class LirsModel(Model):
    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.max_hot = min(capacity - 1, capacity * 99 // 100)
        self.stack: list[int] = []  # the lowest first
        self.cold: list[int] = []
        self.lost: list[int] = []
        self.hot: set[int] = set()
        self.free = 0

    def begin(self) -> None:
        self.free = self.max_hot - len(self.hot)

    def touch(self, page: int, was_in: bool) -> None:
        on_stack = take(page, self.stack)
        self.stack.append(page)
        take(page, self.lost)
        if page in self.hot:
            return
        take(page, self.cold)
        if on_stack or self.free > 0:
            self.hot.add(page)
        else:
            self.cold.append(page)
        self.free -= 1

    def settle(self) -> None:
        while len(self.hot) > self.max_hot:
            self.prune()
            self.hot.remove(self.stack[0])
            self.cold.append(self.stack.pop(0))
        self.prune()

    def prune(self) -> None:
        while self.stack and self.stack[0] not in self.hot:
            take(self.stack.pop(0), self.lost)

    def victim(self) -> int:
        page = self.cold.pop(0)
        if page in self.stack:
            self.lost.append(page)
        return page

    def forget(self) -> None:
        while len(self.lost) > self.capacity:
            take(self.lost.pop(0), self.stack)


def take(page: int, *lists: list[int]) -> bool:
    """Remove a page from whichever of the lists has it."""
    for one in lists:
        if page in one:
            one.remove(page)
            return True
    return False


MODELS: dict[str, type[Model]] = {
    "fifo": FifoModel,
    "lfu": LfuModel,
    "length_first": LengthFirstModel,
    "length_aware": LengthAwareModel,
    "slru": SlruModel,
    "arc": ArcModel,
    "s3fifo": S3FifoModel,
    "sieve": SieveModel,
    "gdsf": GdsfModel,
    "lirs": LirsModel,
}
