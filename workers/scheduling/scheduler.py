"""Decides what each step computes: decode rows first, then prefill chunks; who is admitted, who is preempted. Pure.

Continuous batching with chunked prefill. Requests are admitted in order of arrival once their pages fit. When no frame
is free and nothing can be evicted, the running sequence with the lowest score is preempted: its pages go down to L3,
held there for it, and it queues up again at its place by arrival.

Why this can't live-lock: the oldest running sequence is never a victim, so it goes on to its end; a request that
couldn't fit alone was never accepted; and while the head of the queue waits for room, nothing behind it gets any. Where
pages have several sizes, what is free of one comes to another by moving pages together, some in each step.

Why nothing starves: the queue is by arrival, so who was preempted comes before all who arrived later. One that was
preempted SPARED_AFTER times is a victim only where all others that may be are such too, and none of them is younger.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvtier.tier.pages.page import PageFormat, PageKey, TierName
from kvtier.tier.pages.recipe import ChainNeeds
from kvtier.tier.policy.base import Kind, ScoreWeights, Use
from kvtier.workers.paging.frames import Op, PageRecord, SaveState
from kvtier.workers.paging.page_table import PageTable
from kvtier.workers.requests.api import EngineRequest, FinishReason
from kvtier.workers.requests.output_length import Expected
from kvtier.workers.requests.sequence import Load, Namespace, Request, Sequence, SequenceState

# Of a running sequence's score, of which the lowest is preempted. recency: more keeps those that made progress last, so
# a stalled one goes. memory: more (negative) lets those with many pages go, which frees most at once. remaining: more
# (negative) lets those go that expect most tokens yet; a nearly finished one stays.
PREEMPTION = ScoreWeights(recency=0.2, memory=-0.2, remaining=-0.6)
PROMPT_LOGITS = (
    64  # rows of a step at most whose logits are read beside those that sample: each is a vocabulary
)
SPARED_AFTER = 2  # preemptions: from then on a sequence gives way to no younger one


@dataclass(slots=True)
class Row:
    """Tokens [start, start + length) of a sequence are computed in this step; `samples` when a token follows."""

    seq: Sequence
    start: int
    length: int
    samples: bool


@dataclass(frozen=True, slots=True)
class DemotedPage:
    """Page `depth` of a preempted sequence, to be copied to L3 with its first `tokens` tokens; has a copy started.

    `record` is None for the page that isn't full. `parent` is the key of the page before, or the group's root.
    """

    group: int
    depth: int
    frame: int
    tokens: int
    format: PageFormat
    key: PageKey
    parent: bytes
    record: PageRecord | None


@dataclass(frozen=True, slots=True)
class Demotion:
    """A preempted sequence, and those of its pages that have no copy below L1 yet."""

    seq: Sequence
    pages: list[DemotedPage]


@dataclass(slots=True)
class Step:
    """What the worker is to do now, in this order: ops, demotions, loads, one forward over the rows, saves of `converted`."""

    rows: list[Row] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    demotions: list[Demotion] = field(default_factory=list)
    loads: list[Sequence] = field(default_factory=list)  # LOADING from now on: locate their pages
    leases_over: list[str] = field(default_factory=list)  # of preempted ones that found all they need in L1
    converted: list[PageRecord] = field(default_factory=list)  # pages that the ops make, newly cached
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
        weights: ScoreWeights = PREEMPTION,
        eos_ids: tuple[int, ...] = (),
    ) -> None:
        """`eos_ids` end a sequence; see `Step` for what is done of each step."""
        if not 1 <= max_sequences <= max_batch_tokens:
            raise ValueError(
                f"max_sequences must be from 1 to max_batch_tokens ({max_batch_tokens}), got {max_sequences}"
            )
        self.table = table
        self.max_batch_tokens = max_batch_tokens
        self.max_sequences = max_sequences
        self.load_deadline_s = load_deadline_s
        self.weights = weights
        self.eos_ids = eos_ids
        self.rows: list[Row] = []  # of the step that is being computed
        self.expected = Expected()
        self.waiting: list[Sequence] = []  # WAITING and PREEMPTED, oldest first
        self.active: list[Sequence] = []  # LOADING and RUNNING, oldest first
        self.claims: dict[PageKey, Sequence] = {}
        self.preemptions = 0
        self._started: list[Sequence] = []  # since this step's decode rows were chosen
        self._leases = 0

    def check_fits(self, prompt_tokens: int, max_tokens: int, needs: tuple[ChainNeeds, ...]) -> None:
        """Raise ValueError, with the numbers, when such a sequence can never fit in L1. From any thread.

        `needs` are the layer groups' of its kind. Of what a window lets go, nothing counts.
        """
        table = self.table
        needed = table.most_needed(needs, prompt_tokens + max_tokens - 1)
        slabs = table.frames.slabs
        if slabs.can_hold(needed):
            return
        pages, nbytes = (
            sum(needed.values()),
            sum(size * n for size, n in needed.items()) * table.frames.unit_bytes,
        )
        cut = f", cut in {slabs.num_slabs} parts for pages of one size each" if slabs.num_slabs > 1 else ""
        raise ValueError(
            f"prompt of {prompt_tokens} tokens and max_tokens {max_tokens} need {pages} pages of {table.page_tokens} "
            f"tokens at once, {nbytes} bytes; L1 has {table.capacity_bytes}{cut} (tiers.l1.bytes)"
        )

    def submit(
        self,
        spec: EngineRequest,
        number: int,
        namespace: Namespace,
        longest: int,
        *,
        submitted_s: float,
        wall_s: float,
        turn: int,
    ) -> Request:
        """Queue a request, whose sequences have the numbers from `number` on and at most `longest` tokens.

        Sequences that are resumed begin at once, each with the tokens that it has; else the others follow the first one,
        see `siblings`.
        """
        request = Request(spec, number, namespace, submitted_s, wall_s, turn)
        for index in range(spec.sampling.n) if spec.is_resumed else range(1):
            if index not in spec.ended:
                self.add(self._new_sequence(request, index, longest))
        return request

    def siblings(self, seq: Sequence, longest: int) -> list[Sequence]:
        """The other sequences of a request whose prompt has been computed; `fork` or `add` each."""
        request = seq.request
        indices = range(seq.index + 1, request.spec.sampling.n)
        return [self._new_sequence(request, index, longest) for index in indices]

    def _new_sequence(self, request: Request, index: int, longest: int) -> Sequence:
        seq = Sequence(request, index, self.table.page_tokens, self.eos_ids, longest)
        request.sequences.append(seq)
        return seq

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence."""
        insort(self.waiting, seq, key=_age)

    # One step

    def schedule(self, now: float, *, can_load: bool, free_slots: Mapping[int, int]) -> Step:
        """What to do in the next step. `free_slots`: L3 slots at hand for preempted sequences' pages, by their bytes."""
        step = Step()
        slots = _Slots(free_slots)
        self.table.frames.begin_step()
        self.table.lent_wanted = False
        budget = self.max_batch_tokens - self._decode(step, slots, now)
        self._started = []
        if not step.demotions:
            self._admit(step, can_load, now)
        self._prefill(step, slots, budget, now)
        step.ops = self.table.take_ops()
        step.converted = self.table.take_converted()
        self.rows = step.rows
        return step

    def _decode(self, step: Step, slots: _Slots, now: float) -> int:
        for seq in self.active[:]:
            length = seq.length
            if seq.state is not SequenceState.RUNNING or length - seq.computed != 1:
                continue
            if not self.table.is_ready(seq, length) and not self._make_room(step, slots, seq, now):
                continue
            step.rows.append(Row(seq, seq.computed, 1, True))
        return len(step.rows)

    def _prefill(self, step: Step, slots: _Slots, budget: int, now: float) -> None:
        prompt_logits = PROMPT_LOGITS
        for seq in self.active[:]:
            if budget <= 0:
                return
            if seq.state is not SequenceState.RUNNING:
                continue
            if seq.length - seq.computed == 1 and seq not in self._started:
                continue  # a decode row
            most = prompt_logits if seq.tells_prompt else budget
            if most <= 0:
                continue
            wanted = seq.computed + min(seq.pending, budget, most, _rows_alike(seq))
            fit = min(wanted, self.table.grow(seq, wanted, now))
            if fit <= seq.computed:
                if seq is not self._oldest_running() or not self._make_room(step, slots, seq, now):
                    continue
                fit = min(wanted, self.table.grow(seq, wanted, now))
            step.rows.append(Row(seq, seq.computed, fit - seq.computed, fit == seq.length))
            budget -= fit - seq.computed
            if seq.tells_prompt:
                prompt_logits -= fit - seq.computed

    def computed(self, now: float) -> list[PageRecord]:
        """All rows of the step have been computed. The pages that are newly cached, to be saved."""
        rows, self.rows = self.rows, []
        return [record for row in rows for record in self.advance(row, now)]

    def sampled(self, seqs: list[Sequence], tokens: list[int], now: float) -> list[Sequence]:
        """Each of these sequences has one more token. Those of which it is their request's first."""
        firsts: list[Sequence] = []
        for seq, token in zip(seqs, tokens, strict=True):
            if seq.request.usage is None:
                seq.request.count_usage()
                firsts.append(seq)
            seq.append(token, now)
        return firsts

    def advance(self, row: Row, now: float) -> list[PageRecord]:
        """The row's tokens have been computed: seal what is full, let go what left a window.

        Newly cached pages, to be saved.
        """
        seq = row.seq
        seq.computed = row.start + row.length
        request = seq.request
        if request.usage is None:
            request.accounted = max(request.accounted, min(seq.computed, request.prompt_tokens))
        sealed: list[PageRecord] = []
        if seq.computed // self.table.page_tokens != seq.num_cached:
            sealed = self.table.seal(seq, now)
            self._drop_claims(seq, seq.num_cached)
        if seq.is_plain:
            return sealed
        self.table.slide(seq, now)
        return [record for record in sealed if self.table.is_cached(record)]

    def loaded(self, seq: Sequence, now: float) -> int:
        """The sequence's load is over, whatever came of it: use what came, run. The pages of its prefix."""
        load = seq.load
        assert load is not None
        seq.lease = None
        pages = self.table.loaded(seq, now)
        page_tokens = self.table.page_tokens
        for page, tier in enumerate(_tiers(load, pages), start=load.first_page):
            seq.request.credit(page * page_tokens, min((page + 1) * page_tokens, seq.computed), tier)
        self._run(seq, now)
        return pages

    def fork(self, parent: Sequence, child: Sequence, now: float) -> list[Op]:
        """Let a sibling share the pages of a prompt just computed, or queue it where there is no room.

        The operations are to be done at once, before anything else is computed. Those of sequences whose load ended
        since the step was scheduled are among them, first: the sibling's frame may be the page that one of them reads.
        """
        if len(self.active) < self.max_sequences and self.table.fork(parent, child, now):
            child.enter(SequenceState.RUNNING)
            insort(self.active, child, key=_age)
            return self.table.take_ops()
        self.add(child)
        return []

    def finish(self, seq: Sequence, now: float, reason: FinishReason, kind: Kind | None = None) -> None:
        """Take a sequence out, in whatever state it is; its pages go back. A load's lease is the caller's to end.

        What its request leaves behind tells the cache when to expect the next use. `kind` is seq.kind(reason) for one
        who knows it. Nothing is learned of one that goes on at another worker.

        Called in the middle of a step, it also removes the sequence's rows: nothing has been computed for them.
        """
        self.rows = [row for row in self.rows if row.seq is not seq]
        goes_on = reason is FinishReason.PREFILLED
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self.expected.learn(seq.request.spec, seq.completion_tokens)
        if seq.state in (SequenceState.WAITING, SequenceState.PREEMPTED):
            self.waiting.remove(seq)
        else:
            page_tokens = self.table.page_tokens
            use = seq.use(seq.kind(reason) if kind is None else kind, page_tokens)
            if goes_on:
                use = seq.use_so_far(page_tokens)
            is_over = seq.is_last and seq.request.spec.use_cache and not goes_on
            keys = seq.used_keys(use.pages, page_tokens) if is_over else []
            self._leave(seq, now, use)
            if keys:
                self.table.policy.observe(keys, use, now)
        seq.enter(SequenceState.FINISHED)

    def use_of(self, seq: Sequence, kind: Kind) -> tuple[Use, list[list[PageKey]]]:
        """What a sequence that is about to be over leaves behind: the keys of the pages that it used, by layer group."""
        page_tokens = self.table.page_tokens
        use = seq.use(kind, page_tokens)
        keys = [seq.page_keys(use.pages, page_tokens, group) for group in range(len(seq.groups))]
        if not seq.is_plain:
            keys = [
                [chain[page] for page in pages.held(0, use.pages)]
                for chain, pages in zip(keys, seq.groups, strict=True)
            ]
        return use, keys

    @property
    def unfinished(self) -> int:
        """Sequences queued or active."""
        return len(self.waiting) + len(self.active)

    def needed_soon(self) -> Counter[int]:
        """Pages, by size in units, that sequences may need beside those they hold: the active ones, and who comes next."""
        missing: Counter[int] = Counter()
        waiting = self.waiting[: self.max_sequences - len(self.active)]
        for seq in (*self.active, *waiting):
            self.table.add_missing(missing, seq, self._tokens_soon(seq), self.max_batch_tokens)
            for group, need in enumerate(seq.request.namespace.needs):
                missing[self.table.size_of(group, need.recipe.write)] += 1
        return missing

    def check(self) -> None:
        """Re-derive the page table's counts and this class's own; AssertionError where one differs."""
        self.table.check(self.active)
        for queue in (self.waiting, self.active):
            numbers = [seq.number for seq in queue]
            assert numbers == sorted(numbers), "a queue out of order"
        assert len(self.active) <= self.max_sequences, "more sequences active than allowed"
        for seq in self.waiting:
            assert seq.num_held == 0 and seq.path is None, f"queued sequence {seq.number} holds pages"
        for key, seq in self.claims.items():
            assert seq in self.active and key in seq.groups[0].keys, "a claim of nothing"

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
            seq.load = load
            if not self._has_room(seq, step, now) or not self._reserve(seq, now):
                self.table.release(seq, now)
                seq.load = None
                return
            self._enter(seq, step, now)

    def _claimed_by_another(self, seq: Sequence) -> PageKey | None:
        if not seq.request.spec.use_cache:
            return None
        page_tokens = self.table.page_tokens
        if (seq.num_cached + 1) * page_tokens > seq.length:
            return None
        key = seq.page_key(seq.num_cached, page_tokens)
        return key if key in self.claims else None

    def _plan_load(self, seq: Sequence, now: float) -> Load | None:
        lease = seq.lease or self.new_lease(seq)
        return self.table.plan_load(seq, lease, now, now + self.load_deadline_s)

    def new_lease(self, seq: Sequence) -> str:
        """A name, never used before by this worker, for what the CacheNode holds for a sequence."""
        self._leases += 1
        return f"{seq.request.spec.request_id}:{seq.index}:{self._leases}"

    def _has_room(self, seq: Sequence, step: Step, now: float) -> bool:
        """Room for its known tokens and one more, beside what the active ones are yet to fill and one page each."""
        missing: Counter[int] = Counter()
        self.table.add_missing(missing, seq, self._tokens_soon(seq), self.max_batch_tokens)
        for other in self.active:
            self.table.add_missing(missing, other, self._tokens_soon(other), self.max_batch_tokens)
            for group, need in enumerate(other.request.namespace.needs):
                missing[self.table.size_of(group, need.recipe.write)] += 1
        if self.table.has_room(missing):
            return True
        if self.active or self.table.limbo or self.table.wait_for_lent():
            return False
        step.broken_pins += self.table.break_pins(now)
        if not self._fits_alone(seq):
            # What is cached of it lies in more room than it needs: it goes on without.
            self.table.release(seq, now)
            seq.load = None
            self.table.adopt(seq, now, limit=0)
            if self.table.frames.lent and not self._fits_alone(seq):
                return False  # a peer holds on to what is lent to it
            assert self._fits_alone(seq), f"sequence {seq.number} can never fit"
        return True

    def _fits_alone(self, seq: Sequence) -> bool:
        missing: Counter[int] = Counter()
        self.table.add_missing(missing, seq, self._tokens_soon(seq), self.table.page_tokens)
        return self.table.has_room(missing)

    def _tokens_soon(self, seq: Sequence) -> int:
        return min(seq.length + 1, seq.final_tokens)

    def _reserve(self, seq: Sequence, now: float) -> bool:
        """Frames for a plain sequence's load; where they fail, a copy in flight keeps a frame that was counted on."""
        if seq.load is None or not seq.is_plain:
            return True
        tokens = seq.load.pages * self.table.page_tokens
        return self.table.grow(seq, tokens, now) >= tokens

    def _enter(self, seq: Sequence, step: Step, now: float) -> None:
        request = seq.request
        self.waiting.remove(seq)
        insort(self.active, seq, key=_age)
        self.table.begin(seq, now)
        if request.admitted_s is None:
            request.admitted_s = now
            self.table.touch(seq)
        request.looked(TierName.HBM, request.prompt_tokens if request.spec.use_cache else 0)
        request.credit(0, seq.computed, TierName.HBM)
        self._claim(seq)
        seq.stored_pages = 0
        if seq.load is None:
            if seq.lease is not None:
                step.leases_over.append(seq.lease)
                seq.lease = None
            self._run(seq, now)
            return
        seq.enter(SequenceState.LOADING)
        step.loads.append(seq)

    def _run(self, seq: Sequence, now: float) -> None:
        """From here on the sequence gets rows."""
        seq.enter(SequenceState.RUNNING)
        self._started.append(seq)
        before = seq.computed
        self.table.readopt(seq, now)
        seq.request.credit(before, seq.computed, TierName.HBM)
        seq.saved = 0
        if seq.request.started_s is None:
            seq.request.started_s = now
        self._drop_claims(seq, seq.num_cached)

    # Room

    def _make_room(self, step: Step, slots: _Slots, seq: Sequence, now: float) -> bool:
        """A page for the sequence's next token, preempting others where it must; False when it can't run now."""
        tokens = seq.computed + 1
        while self.table.grow(seq, tokens, now) < tokens:
            if self.table.limbo or self.table.must_wait or self.table.wait_for_lent():
                return False  # a frame comes free, or can be moved, as soon as a copy ends or a step is over
            victim = self._victim(now)
            if victim is None:
                broken = self.table.break_pins(now)
                step.broken_pins += broken
                if not broken:
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
        running = [seq for seq in self.active if seq.state is SequenceState.RUNNING][1:]
        candidates = [seq for seq in running if seq.preemptions < SPARED_AFTER]
        if not candidates:
            return running[-1] if running else None
        left = {seq: self._expected(seq) for seq in candidates}
        idle = max(now - seq.last_token_s for seq in candidates) or 1.0
        pages = max(seq.num_held for seq in candidates) or 1
        most = max(left.values()) or 1.0
        w = self.weights

        def score(seq: Sequence) -> tuple[float, int]:
            terms = (
                w.recency * (1.0 - (now - seq.last_token_s) / idle)
                + w.memory * seq.num_held / pages
                + w.remaining * left[seq] / most
            )
            return terms, -seq.number

        return min(candidates, key=score)

    def _expected(self, seq: Sequence) -> float:
        return self.expected.remaining(seq.request.spec, seq.completion_tokens, seq.remaining_tokens)

    def _preempt(self, victim: Sequence, step: Step, slots: _Slots, now: float) -> None:
        pages = self._pages_to_save(victim, slots)
        for page in pages:
            self.table.start_copy(page.frame)
        full = victim.computed - victim.computed % self.table.page_tokens
        tails = sum(page.record is None for page in pages)
        if tails == len(victim.groups):
            victim.saved = victim.computed
        else:
            victim.saved = full if victim.request.spec.use_cache else 0
        step.rows = [row for row in step.rows if row.seq is not victim]
        self._leave(victim, now, victim.use_so_far(self.table.page_tokens))
        victim.enter(SequenceState.PREEMPTED)
        victim.blocked_on = None
        self.add(victim)
        self.preemptions += 1
        victim.preemptions += 1
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
        full, tail = divmod(victim.computed, page_tokens)
        pages: list[DemotedPage] = []
        places = (
            (depth, group)
            for group, mine in enumerate(victim.groups)
            for depth in mine.held(0, full + bool(tail))
        )
        for depth, group in sorted(places):
            frame = int(victim.groups[group].frames[depth])
            record = self.table.record(frame)
            if depth < full and (record is None or record.save is not SaveState.DIRTY):
                continue
            format = victim.request.namespace.needs[group].recipe.write if record is None else record.format
            if not slots.take(self.table.groups[group][format]):
                return pages
            if record is not None:
                record.save = SaveState.SAVING
                key, parent, tokens = record.key, record.parent, page_tokens
            else:
                key = victim.tail_key(victim.computed, page_tokens, group)
                parent, tokens = victim.parent_key(depth, page_tokens, group), tail
            pages.append(DemotedPage(group, depth, frame, tokens, format, key, parent, record))
        return pages

    def _leave(self, seq: Sequence, now: float, use: Use) -> None:
        self.active.remove(seq)
        self._drop_claims(seq, len(seq.groups[0].keys))
        self.table.release(seq, now, use, only_last=not seq.is_last)

    # Claims

    def _claim(self, seq: Sequence) -> None:
        if not seq.request.spec.use_cache:
            return
        pages = seq.length // self.table.page_tokens
        for key in seq.page_keys(pages, self.table.page_tokens)[seq.num_cached :]:
            self.claims.setdefault(key, seq)
        seq.claimed = range(seq.num_cached, pages)

    def _drop_claims(self, seq: Sequence, upto: int) -> None:
        """Pages before `upto` are cached, or will not come: nothing waits for them any more."""
        if not seq.claimed:
            return
        keys = seq.groups[0].keys
        for page in range(seq.claimed.start, min(upto, seq.claimed.stop)):
            if self.claims.get(keys[page]) is seq:
                del self.claims[keys[page]]
        seq.claimed = range(min(upto, seq.claimed.stop), seq.claimed.stop)


class _Slots:
    """L3 slots that may still be used in this step, by the bytes of the pages they hold."""

    def __init__(self, left: Mapping[int, int]) -> None:
        self._left = dict(left)

    def take(self, nbytes: int) -> bool:
        """Use one, if there is one."""
        left = self._left.get(nbytes, 0)
        if left < 1:
            return False
        self._left[nbytes] = left - 1
        return True


def _age(seq: Sequence) -> int:
    return seq.number


def _rows_alike(seq: Sequence) -> int:
    """Rows from the sequence's position on that see pages in the same formats."""
    return min(need.recipe.rows_until_decay(seq.computed) for need in seq.request.namespace.needs)


def _tiers(load: Load, pages: int) -> list[TierName]:
    """Where the pages of the prefix from the load's first one on came from.

    A page of several layer groups counts as its lowest one; one that no row attends any more, as the next one that is.
    """
    tiers: list[TierName] = []
    later = TierName.HBM
    for page in range(pages - 1, load.first_page - 1, -1):
        came = [
            tier for group in range(len(load.chains)) if (tier := load.came.get((group, page))) is not None
        ]
        if came:
            later = max(came, key=[*TierName].index)
        elif any((group, page) in load.kept for group in range(len(load.chains))):
            later = TierName.HBM
        tiers.append(later)
    tiers.reverse()
    return tiers
