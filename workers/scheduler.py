"""Decides what each step computes: decode rows first, then prefill chunks; who is admitted, who is preempted. Pure.

Continuous batching with chunked prefill. Requests are admitted in order of arrival once their pages fit. When no frame
is free and nothing can be evicted, the running sequence with the lowest score is preempted: its pages go down to L3,
held there for it, and it queues up again at its place by arrival.

Why this can't live-lock: the oldest running sequence is never a victim, so it goes on to its end; a request that
couldn't fit alone was never accepted; and while the head of the queue waits for room, nobody behind it gets any.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field

from kvtier.tier.page import PageKey, TierName
from kvtier.workers.page_table import CopyHead, PageTable, SaveState
from kvtier.workers.sequence import Load, Sequence, SequenceState


@dataclass(frozen=True, slots=True)
class ScoreWeights:
    """Of a running sequence's score; the lowest is preempted first. Each term is in [0, 1] over the candidates.

    recency: more keeps those that made progress last, so a stalled one goes. memory: more (negative) lets those with
    many pages go, which frees most at once. remaining: more (negative) lets those with most tokens to go; a nearly
    finished one stays.
    """

    recency: float = 0.2
    memory: float = -0.2
    remaining: float = -0.6


@dataclass(slots=True)
class Row:
    """Tokens [start, start + length) of a sequence are computed in this step; `samples` when a token follows."""

    seq: Sequence
    start: int
    length: int
    samples: bool


@dataclass(frozen=True, slots=True)
class DemotedPage:
    """Page `depth` of a preempted sequence, to be copied to L3 with its first `tokens` tokens; has a copy started."""

    depth: int
    frame: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Demotion:
    """A preempted sequence, and those of its pages that have no copy below L1 yet."""

    seq: Sequence
    pages: list[DemotedPage]


@dataclass(slots=True)
class Step:
    """What the worker is to do now, in this order: copies, demotions, loads, then one forward over the rows."""

    rows: list[Row] = field(default_factory=list)
    copies: list[CopyHead] = field(default_factory=list)
    demotions: list[Demotion] = field(default_factory=list)
    loads: list[Sequence] = field(default_factory=list)  # LOADING from now on: locate their pages
    leases_over: list[str] = field(default_factory=list)  # of preempted ones that found all they need in L1
    broken_pins: int = 0


class Scheduler:
    """The queue and the running sequences of one worker. Owned by the step loop.

    `claims` names, by key, the pages of prompts that a running or loading sequence will fill: a request that needs one
    waits for it in the queue, so that a burst of requests with one prefix computes and loads it once.
    """

    def __init__(
        self,
        table: PageTable,
        *,
        max_batch_tokens: int,
        max_sequences: int,
        load_deadline_s: float,
        weights: ScoreWeights | None = None,
    ) -> None:
        if not 1 <= max_sequences <= max_batch_tokens:
            raise ValueError(
                f"max_sequences must be from 1 to max_batch_tokens ({max_batch_tokens}), got {max_sequences}"
            )
        self.table = table
        self.max_batch_tokens = max_batch_tokens
        self.max_sequences = max_sequences
        self.load_deadline_s = load_deadline_s
        self.weights = weights or ScoreWeights()
        self.waiting: list[Sequence] = []  # WAITING and PREEMPTED, oldest first
        self.active: list[Sequence] = []  # LOADING and RUNNING, oldest first
        self.claims: dict[PageKey, Sequence] = {}
        self.preemptions = 0
        # To be made in this order, whoever makes them: a frame that one reads may be the next one's to write.
        self._copies: list[CopyHead] = []
        self._started: list[Sequence] = []  # since this step's decode rows were chosen
        self._leases = 0

    def check_fits(self, prompt_tokens: int, max_tokens: int) -> None:
        """Raise ValueError, with the numbers, when such a sequence can never fit in L1. From any thread."""
        pages = self.table.pages_for(prompt_tokens + max_tokens - 1)
        if pages > self.table.capacity:
            raise ValueError(
                f"prompt of {prompt_tokens} tokens and max_tokens {max_tokens} need {pages} pages of "
                f"{self.table.page_tokens} tokens; L1 has {self.table.capacity}"
            )

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence."""
        insort(self.waiting, seq, key=_age)

    # One step

    def schedule(self, now: float, *, can_load: bool, free_slots: int) -> Step:
        """What to do in the next step. `free_slots` L3 slots are at hand for pages of preempted sequences."""
        step = Step()
        slots = _Slots(free_slots)
        budget = self.max_batch_tokens - self._decode(step, slots, now)
        self._started = []
        if not step.demotions:
            self._admit(step, can_load, now)
        self._prefill(step, slots, budget, now)
        step.copies = self._take_copies()
        return step

    def _decode(self, step: Step, slots: _Slots, now: float) -> int:
        page_tokens = self.table.page_tokens
        for seq in self.active[:]:
            if seq.state is not SequenceState.RUNNING or seq.length - seq.computed != 1:
                continue
            if seq.length > seq.num_pages * page_tokens and not self._make_room(step, slots, seq, now):
                continue
            step.rows.append(Row(seq, seq.computed, 1, True))
        return len(step.rows)

    def _prefill(self, step: Step, slots: _Slots, budget: int, now: float) -> None:
        for seq in self.active[:]:
            if budget <= 0:
                return
            if seq.state is not SequenceState.RUNNING:
                continue
            if seq.length - seq.computed == 1 and seq not in self._started:
                continue  # a decode row
            wanted = seq.computed + min(seq.pending, budget)
            fit = min(wanted, self.table.grow(seq, wanted, now))
            if fit <= seq.computed:
                if seq is not self._oldest_running() or not self._make_room(step, slots, seq, now):
                    continue
                fit = min(wanted, self.table.grow(seq, wanted, now))
            step.rows.append(Row(seq, seq.computed, fit - seq.computed, fit == seq.length))
            budget -= fit - seq.computed

    def advance(self, row: Row, now: float) -> list[int]:
        """The row's tokens have been computed: seal what is full. Frames of newly cached pages, to be saved."""
        seq = row.seq
        seq.computed = row.start + row.length
        request = seq.request
        if request.usage is None:
            request.accounted = max(request.accounted, min(seq.computed, request.prompt_tokens))
        if seq.computed // self.table.page_tokens == seq.num_cached:
            return []
        sealed = self.table.seal(seq, now)
        self._drop_claims(seq, seq.num_cached)
        return sealed

    def loaded(self, seq: Sequence, now: float) -> None:
        """The sequence's load is over, whatever came of it: use what came, run."""
        load = seq.load
        assert load is not None and load.is_complete
        seq.load = None
        page_tokens = self.table.page_tokens
        pages = load.first_page + load.wanted
        self.table.trim(seq, pages)
        seq.computed = pages * page_tokens
        if load.tail_tokens and load.wanted == len(load.keys):
            seq.computed += load.tail_tokens - page_tokens
        seq.computed = min(seq.computed, seq.length - 1)
        for page, tier in enumerate(load.came[: load.wanted], start=load.first_page):
            assert tier is not None
            seq.request.credit(page * page_tokens, min((page + 1) * page_tokens, seq.computed), tier)
        seq.stored_pages = pages
        self.table.seal(seq, now)
        self._run(seq, now)

    def fork(self, parent: Sequence, child: Sequence, now: float) -> list[CopyHead]:
        """Let a sibling share the pages of a prompt just computed, or queue it where there is no room.

        The copies are to be made at once, before anything else is computed. Those of sequences whose load ended since
        the step was scheduled are among them, first: the sibling's frame may be the page that one of them reads.
        """
        if len(self.active) < self.max_sequences:
            copies = self.table.fork(parent, child, now)
            if copies is not None:
                child.enter(SequenceState.RUNNING)
                insort(self.active, child, key=_age)
                self._copies += copies
                return self._take_copies()
        self.add(child)
        return []

    def finish(self, seq: Sequence, now: float) -> None:
        """Take a sequence out, in whatever state it is; its pages go back. A load's lease is the caller's to end."""
        if seq.state in (SequenceState.WAITING, SequenceState.PREEMPTED):
            self.waiting.remove(seq)
        else:
            self._leave(seq, now)
        seq.enter(SequenceState.FINISHED)

    @property
    def unfinished(self) -> int:
        """Sequences queued or active."""
        return len(self.waiting) + len(self.active)

    def check(self) -> None:
        """Re-derive the page table's counts and this class's own; AssertionError where one differs."""
        self.table.check(self.active)
        for queue in (self.waiting, self.active):
            numbers = [seq.number for seq in queue]
            assert numbers == sorted(numbers), "a queue out of order"
        assert len(self.active) <= self.max_sequences, "more sequences active than allowed"
        for seq in self.waiting:
            assert seq.num_pages == 0 and seq.path is None, f"queued sequence {seq.number} holds pages"
        for key, seq in self.claims.items():
            assert seq in self.active and key in seq.keys, "a claim of nobody"

    # Admission

    def _admit(self, step: Step, can_load: bool, now: float) -> None:
        for seq in self.waiting[:]:
            if len(self.active) >= self.max_sequences:
                return
            if seq.copies or (seq.blocked_on is not None and seq.blocked_on in self.claims):
                continue
            self.table.adopt(seq, now)
            seq.blocked_on = self._claimed_by_another(seq)
            if seq.blocked_on is not None:
                self.table.release(seq, now)
                continue
            load = self._plan_load(seq, now) if can_load else None
            if not self._has_room(seq, step, now) or not self._reserve(seq, load, now):
                self.table.release(seq, now)
                return
            self._enter(seq, load, step, now)

    def _claimed_by_another(self, seq: Sequence) -> PageKey | None:
        if not seq.request.spec.use_cache:
            return None
        page_tokens = self.table.page_tokens
        next_page = seq.num_cached
        if (next_page + 1) * page_tokens > seq.length:
            return None
        key = seq.page_keys(next_page + 1, page_tokens)[next_page]
        return key if key in self.claims else None

    def _plan_load(self, seq: Sequence, now: float) -> Load | None:
        """Which pages to look for below L1: all whole pages of the known tokens, and the tail that a preemption saved."""
        if not seq.request.spec.use_cache:
            return None
        page_tokens = self.table.page_tokens
        pages, tail = divmod(seq.saved or seq.length, page_tokens)
        if not seq.saved:
            tail = 0
            if pages * page_tokens == seq.length and seq.computed + seq.head_tokens == seq.length - 1:
                return None  # L1 has all but the last token, which is computed anyhow
        keys = seq.page_keys(pages, page_tokens)[seq.num_cached :]
        if tail and seq.num_cached <= pages:
            keys.append(seq.tail_key(seq.saved, page_tokens))
        else:
            tail = 0
        if not keys:
            return None
        return Load(
            lease=seq.lease or self.new_lease(seq),
            first_page=seq.num_cached,
            keys=keys,
            started_s=now,
            deadline_s=now + self.load_deadline_s,
            tail_tokens=tail,
        )

    def new_lease(self, seq: Sequence) -> str:
        """A name, never used before by this worker, for what the CacheNode holds for a sequence."""
        self._leases += 1
        return f"{seq.request.spec.request_id}:{seq.index}:{self._leases}"

    def _has_room(self, seq: Sequence, step: Step, now: float) -> bool:
        """Room for its known tokens and one more, beside what the active ones are yet to fill and one page each."""
        promised = sum(max(0, self._pages_soon(other) - other.num_pages) for other in self.active) + len(
            self.active
        )
        missing = self._pages_soon(seq) - seq.num_pages
        if missing + promised <= self.table.available:
            return True
        if not self.active and not self.table.limbo:
            step.broken_pins += self.table.break_pins(now)
            assert missing <= self.table.available, f"sequence {seq.number} can never fit"
            return True
        return False

    def _pages_soon(self, seq: Sequence) -> int:
        return self.table.pages_for(min(seq.length + 1, seq.final_tokens))

    def _reserve(self, seq: Sequence, load: Load | None, now: float) -> bool:
        if load is None:
            return True
        tokens = (load.first_page + len(load.keys)) * self.table.page_tokens
        return self.table.grow(seq, tokens, now) >= tokens  # else a copy in flight keeps a frame counted on

    def _enter(self, seq: Sequence, load: Load | None, step: Step, now: float) -> None:
        request = seq.request
        self.waiting.remove(seq)
        insort(self.active, seq, key=_age)
        if request.admitted_s is None:
            request.admitted_s = now
            self.table.touch(seq)
        request.looked(TierName.HBM, request.prompt_tokens if request.spec.use_cache else 0)
        request.credit(0, seq.computed, TierName.HBM)
        self._claim(seq)
        seq.stored_pages = 0
        if load is None:
            if seq.lease is not None:
                step.leases_over.append(seq.lease)
                seq.lease = None
            self._run(seq, now)
            return
        seq.load = load
        seq.enter(SequenceState.LOADING)
        step.loads.append(seq)

    def _run(self, seq: Sequence, now: float) -> None:
        """From here on the sequence gets rows."""
        seq.enter(SequenceState.RUNNING)
        self._started.append(seq)
        before = seq.computed
        copy = self.table.readopt(seq, now)
        if copy is not None:
            self._copies.append(copy)
        seq.request.credit(before, seq.computed, TierName.HBM)
        seq.saved = 0
        if seq.request.started_s is None:
            seq.request.started_s = now
        self._drop_claims(seq, seq.num_cached)

    def _take_copies(self) -> list[CopyHead]:
        copies, self._copies = self._copies, []
        return copies

    # Room

    def _make_room(self, step: Step, slots: _Slots, seq: Sequence, now: float) -> bool:
        """A page for the sequence's next token, preempting others where it must; False when it can't run now."""
        tokens = seq.computed + 1
        while self.table.grow(seq, tokens, now) < tokens:
            if self.table.limbo:
                return False  # a frame comes free as soon as a copy ends
            victim = self._victim(now)
            if victim is None:
                step.broken_pins += self.table.break_pins(now)
                if not self.table.available:
                    return False  # the others are loading; each load ends at its deadline
                continue
            self._preempt(victim, step, slots, now)
            if victim is seq:
                return False
        return True

    def _oldest_running(self) -> Sequence | None:
        return next((seq for seq in self.active if seq.state is SequenceState.RUNNING), None)

    def _victim(self, now: float) -> Sequence | None:
        """The running sequence with the lowest score, never the oldest; of equal ones the youngest."""
        candidates = [seq for seq in self.active if seq.state is SequenceState.RUNNING][1:]
        if not candidates:
            return None
        idle = max(now - seq.last_token_s for seq in candidates) or 1.0
        pages = max(seq.num_pages for seq in candidates) or 1
        remaining = max(seq.remaining_tokens for seq in candidates) or 1
        w = self.weights

        def score(seq: Sequence) -> tuple[float, int]:
            terms = (
                w.recency * (1.0 - (now - seq.last_token_s) / idle)
                + w.memory * seq.num_pages / pages
                + w.remaining * seq.remaining_tokens / remaining
            )
            return terms, -seq.number

        return min(candidates, key=score)

    def _preempt(self, victim: Sequence, step: Step, slots: _Slots, now: float) -> None:
        pages = self._pages_to_save(victim, slots)
        for page in pages:
            self.table.start_copy(page.frame)
        full = victim.computed - victim.computed % self.table.page_tokens
        tail_saved = bool(pages) and pages[-1].tokens < self.table.page_tokens
        victim.saved = victim.computed if tail_saved else full if victim.request.spec.use_cache else 0
        step.rows = [row for row in step.rows if row.seq is not victim]
        self._leave(victim, now)
        victim.enter(SequenceState.PREEMPTED)
        victim.blocked_on = None
        self.add(victim)
        self.preemptions += 1
        victim.request.preemptions += 1
        if pages:
            victim.lease = self.new_lease(victim)
            victim.copies = len(pages)
        step.demotions.append(Demotion(victim, pages))

    def _pages_to_save(self, victim: Sequence, slots: _Slots) -> list[DemotedPage]:
        """Its pages without a copy below L1, first ones first: a later page is worth nothing without those before."""
        if not victim.request.spec.use_cache:
            return []  # it leaves no pages behind; they are recomputed
        page_tokens = self.table.page_tokens
        pages: list[DemotedPage] = []
        for depth, frame in enumerate(victim.frames[: victim.num_cached].tolist()):
            record = self.table.record(frame)
            assert record is not None
            if record.save is SaveState.DIRTY:
                if not slots.take():
                    return pages
                record.save = SaveState.SAVING
                pages.append(DemotedPage(depth, frame, page_tokens))
        tail = victim.computed % page_tokens
        if tail and slots.take():
            pages.append(DemotedPage(victim.num_cached, int(victim.frames[victim.num_cached]), tail))
        return pages

    def _leave(self, seq: Sequence, now: float) -> None:
        self.active.remove(seq)
        self._drop_claims(seq, len(seq.keys))
        self.table.release(seq, now)

    # Claims

    def _claim(self, seq: Sequence) -> None:
        if not seq.request.spec.use_cache:
            return
        pages = seq.length // self.table.page_tokens
        for key in seq.page_keys(pages, self.table.page_tokens)[seq.num_cached :]:
            self.claims.setdefault(key, seq)
        seq.claimed = range(seq.num_cached, pages)

    def _drop_claims(self, seq: Sequence, upto: int) -> None:
        """Pages before `upto` are cached, or will not come: nobody waits for them any more."""
        if not seq.claimed:
            return
        for page in range(seq.claimed.start, min(upto, seq.claimed.stop)):
            if self.claims.get(seq.keys[page]) is seq:
                del self.claims[seq.keys[page]]
        seq.claimed = range(min(upto, seq.claimed.stop), seq.claimed.stop)


@dataclass(slots=True)
class _Slots:
    """L3 slots that may still be used in this step."""

    left: int

    def take(self) -> bool:
        """Use one, if there is one."""
        if self.left < 1:
            return False
        self.left -= 1
        return True


def _age(seq: Sequence) -> int:
    return seq.number
