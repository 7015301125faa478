"""One model on several ranks, as one runner: this process leads, and is rank 0; the others are its children.

To the worker above it a group is a runner with one arena of whole pages. Each call becomes a step of the plan, which the
leader sends to the other ranks and carries out itself on its own share, with the same frame numbers.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from kvtier.tier.l1.arena import ArenaShare
from kvtier.tier.pages.page import HEADER_BYTES, PageCorrupt, PageFormat, PageSpec, page_checksum
from kvtier.tier.protocol.ipc import NodeClient
from kvtier.workers.models.base import read_shape
from kvtier.workers.models.files.files import resolve_model
from kvtier.workers.models.files.store import default_cache
from kvtier.workers.models.formats import unit_bytes_of
from kvtier.workers.models.shards.collective import Collective
from kvtier.workers.models.shards.share import Share
from kvtier.workers.paging.copier import (
    Job,
    LoadJob,
    LoadPage,
    SaveJob,
    SavePage,
    verify,
    write_envelope,
)
from kvtier.workers.parallel.link import GroupLink, Launch, launch_process
from kvtier.workers.parallel.pages import RankPages
from kvtier.workers.parallel.plan import (
    Begin,
    CloseSlab,
    Convert,
    CopyHead,
    CopyIn,
    CopyOut,
    GroupBroken,
    Move,
    OpenSlab,
    SlotPage,
    forward_step,
)
from kvtier.workers.runner.runner import IntArray, Runner, StepBatch, load_runner

log = logging.getLogger(__name__)

Page = TypeVar("Page", LoadPage, SavePage)

# Of a step. Kernels are compiled while the ranks load (workers/runner/warm_up.py), so what a step can still compile is rare. A leader that waits
# counts as turning (see Heartbeat): the group names the rank that is stalled, whatever cluster.stalled_after_s is.
PATIENCE_S = 45.0
_MEET_STEP_S = 0.1
LOAD_S = 1800.0  # of large models' weights from a slow disk


def load_group(
    path: str,
    tensor_parallel: int,
    *,
    patience_s: float = PATIENCE_S,
    load_s: float = LOAD_S,
    launch: Launch = launch_process,
    **options: Any,
) -> GroupRunner:
    """Load the model of `path` on so many ranks of this machine; `options` are load_runner's.

    A rank that takes longer than `patience_s` for a step ends the group. Raises what load_runner raises, and GroupBroken.
    """
    if tensor_parallel < 2:
        raise ValueError(f"a group has at least 2 ranks, got {tensor_parallel}")
    if options.get("share_arena"):
        raise ValueError(f"tensor_parallel {tensor_parallel} can't lend L1 to peers: leave tiers.l2.share 0")
    cache_dir = options.get("cache_dir")
    share = Share(0, tensor_parallel)
    share.check(read_shape(resolve_model(path, cache_dir or default_cache())))  # before processes are started
    sent = {**options, "cache_dir": None if cache_dir is None else str(cache_dir)}
    meeting = Path(tempfile.mkdtemp(prefix="kvtier-group-"))
    link = GroupLink(tensor_parallel, patience_s=patience_s, load_s=load_s, launch=launch)
    try:
        store = str(meeting / "store")
        link.begin(
            [Begin(rank, tensor_parallel, path, sent, store, load_s) for rank in range(1, tensor_parallel)]
        )
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        collective = _met(link, partial(Collective, share, store, device, load_s))
        link.abort = collective.abort
        own = load_runner(path, share=share, reduce=collective.sum, **options)
        for rank, ready in enumerate(link.wait_ready(), 1):
            if ready.units != len(own.arena) or ready.root_fields != own.root_fields():
                raise ValueError(f"rank {rank} has loaded another model than the leader, or other pages")
    except BaseException as error:
        link.close()
        if isinstance(error, RuntimeError) and link.error is not None:
            raise GroupBroken(link.error) from error  # a sum that failed says less than why
        raise
    finally:
        shutil.rmtree(meeting, ignore_errors=True)
    return GroupRunner(own, share, link)


def _met(link: GroupLink, meet: Callable[[], Collective]) -> Collective:
    """The ranks' sums. Nothing can end a wait for a rank that died on its way there, so it is left to a thread of its own.

    Raises GroupBroken as soon as the group is broken, and what `meet` raises.
    """
    meeting: Future[Collective] = Future()

    def run() -> None:
        try:
            meeting.set_result(meet())
        except Exception as error:  # whatever it is: the meeting is waited for
            log.exception("the ranks did not meet")
            meeting.set_exception(error)

    threading.Thread(target=run, name="group-meeting", daemon=True).start()
    while True:
        try:
            return meeting.result(_MEET_STEP_S)
        except TimeoutError:
            if meeting.done():
                raise
            if link.error is not None:
                raise GroupBroken(link.error) from None


class GroupRunner:
    """A ModelRunner whose pages lie on several ranks. Owned by one worker's step loop.

    `groups` are of whole pages, and `arena` has their units, but no bytes: nothing on this machine has whole pages
    before they are copied down.
    """

    def __init__(self, own: Runner, share: Share, link: GroupLink) -> None:
        self._own = own
        self._link = link
        self._pages = RankPages(own.arena, share, own.groups, own.whole_groups, own.fences)
        self.groups = own.whole_groups
        units = len(own.arena), unit_bytes_of(own.whole_groups)
        self.arena = torch.empty(units, dtype=torch.uint8, device="meta")
        self.share: ArenaShare | None = None  # a group neither lends nor borrows frames
        self.device = own.device
        self.recipe = own.recipe
        self.raw_format = own.raw_format
        self.l4_format = own.l4_format
        self.page_tokens = own.page_tokens
        self.vocab_size = own.vocab_size
        self.max_context = own.max_context
        self.eos_ids = own.eos_ids
        self.model_name = own.model_name
        self.dtype = own.dtype
        self.window, self.sinks, self.window_refusal = own.window, own.sinks, own.window_refusal
        self.tokenizer_digest = own.tokenizer_digest
        self.max_batch_tokens = own.max_batch_tokens
        self.forward_kind = own.forward_kind

    @property
    def error(self) -> str | None:
        """See ModelRunner."""
        return self._link.error

    def wait_broken(self) -> str | None:
        """Wait until a rank is gone or hangs, and say which and why; None when the group was closed instead."""
        return self._link.wait_broken()

    def root_fields(
        self, group: int = 0, window: int = 0, sinks: int = 0, lossy: bool = False
    ) -> dict[str, str]:
        """See ModelRunner."""
        return self._own.root_fields(group, window, sinks, lossy)

    def open_l1(self) -> tuple[GroupFrames, GroupCopies]:
        """See ModelRunner."""
        return GroupFrames(self._link, self._pages, self.arena.shape[1]), GroupCopies(self._link, self._pages)

    def forward(self, batch: StepBatch) -> torch.Tensor:
        """See Runner.forward. Raises GroupBroken."""
        if len(batch.token_ids) > self.max_batch_tokens:
            raise ValueError(f"{len(batch.token_ids)} rows, at most {self.max_batch_tokens} fit in a step")
        self._link.step(forward_step(batch))
        try:
            return self._own.forward(batch)
        except BaseException as error:
            self._link.fail(f"the leader's forward failed: {type(error).__name__}: {error}")
            raise GroupBroken(self._link.error) from error

    def convert(
        self,
        group: int,
        sources: IntArray,
        source_format: PageFormat,
        targets: IntArray,
        target_format: PageFormat,
    ) -> None:
        """See ModelRunner."""
        self._link.step(
            Convert(group, sources.tolist(), source_format.value, targets.tolist(), target_format.value)
        )
        self._own.convert(group, sources, source_format, targets, target_format)

    def close(self) -> None:
        """End the other ranks, and what this one has. No call may follow."""
        self._link.close()
        self._own.close()


class GroupFrames:
    """Copies between frames, on all ranks. Owned by the step loop."""

    def __init__(self, link: GroupLink, pages: RankPages, unit_bytes: int) -> None:
        """`unit_bytes`: of a unit of whole pages."""
        self._link = link
        self._pages = pages
        self._unit_bytes = unit_bytes

    def copy_head(self, src: int, dst: int, tokens: int, spec: PageSpec) -> None:
        """See FrameCopies."""
        self._link.step(CopyHead(src, dst, tokens, spec.digest))
        self._pages.copy_head(src, dst, tokens, spec.digest)

    def move(self, src: int, dst: int, nbytes: int) -> None:
        """See FrameCopies."""
        units = -(-nbytes // self._unit_bytes)
        self._link.step(Move(src, dst, units))
        self._pages.move(src, dst, units)


class GroupCopies:
    """Copies between the ranks' frames and whole pages in slots: each rank its own heads.

    The leader verifies a page before all ranks copy it, and takes its checksum after all have written it. A page that
    one rank can't copy counts as copied by none.
    """

    def __init__(self, link: GroupLink, pages: RankPages) -> None:
        self._link = link
        self._pages = pages

    def follow(self, client: NodeClient | None) -> None:
        """See Copies. After None no rank maps the slab."""
        if client is None:
            # Without ranks there is nothing to let go.
            with contextlib.suppress(GroupBroken):
                self._link.result(self._link.step(CloseSlab(), wanted=True))
        elif client.slab is not None:
            self._link.step(OpenSlab(client.slab.capacity_bytes), fds=(client.slab.fd, client.fd))

    def do(self, job: Job) -> None:
        """See Copies."""
        if isinstance(job, LoadJob):
            self._load(job)
        elif isinstance(job, SaveJob):
            self._save(job)
        else:
            raise TypeError("a group neither lends nor borrows frames")

    def _load(self, job: LoadJob) -> None:
        start = time.perf_counter()
        good: list[LoadPage] = []
        for page in job.pages:
            assert isinstance(page, LoadPage), "a group borrows no frames"
            try:
                verify(page, _payload(page))
            except PageCorrupt as error:
                job.bad[page.ref] = str(error)
            else:
                good.append(page)
        if good:
            slots = [_slot_page(page) for page in good]
            for place, why in self._on_all(CopyIn(slots), good, self._copy_in).items():
                job.bad[good[place].ref] = why
        job.seconds = time.perf_counter() - start

    def _save(self, job: SaveJob) -> None:
        slots = [_slot_page(page) for page in job.pages]
        failed = self._on_all(CopyOut(slots), job.pages, self._copy_out)
        if failed:
            job.error = "; ".join(failed.values())
            return
        for page in job.pages:
            # Computed again, of what was written: the padding of a page that came from elsewhere may have been another.
            spec = page.spec
            page.checksum = page_checksum(page.key, spec.format.value, spec.digest, _payload(page))
            write_envelope(page)

    def _on_all(
        self, step: CopyIn | CopyOut, pages: list[Page], copy: Callable[[Page], None]
    ) -> dict[int, str]:
        """Copy on all ranks at once; what failed on any, by its place. Raises GroupBroken once the other ranks are gone:
        the slots of a failed job go back to the node, and a rank that isn't gone may still write into them.
        """
        try:
            number = self._link.step(step, wanted=True)
            failed = self._own(pages, copy)
            return self._link.result(number) | failed
        except GroupBroken:
            self._link.wait_gone()
            raise

    def _own(self, pages: list[Page], copy: Callable[[Page], None]) -> dict[int, str]:
        failed: dict[int, str] = {}
        for place, page in enumerate(pages):
            try:
                copy(page)
            except Exception as error:  # whatever it is: the others' answers must be taken
                log.exception("a page copy failed")
                failed[place] = f"rank 0: {type(error).__name__}: {error}"
        return failed

    def _copy_in(self, page: LoadPage) -> None:
        self._pages.copy_in(page.frame, _payload(page), page.spec.digest)

    def _copy_out(self, page: SavePage) -> None:
        self._pages.copy_out(page.frame, _payload(page), page.spec.digest, page.tokens)


def _payload(page: LoadPage | SavePage) -> memoryview:
    return page.slot[HEADER_BYTES : HEADER_BYTES + page.spec.nbytes]


def _slot_page(page: LoadPage | SavePage) -> SlotPage:
    return SlotPage(page.grant.slot, page.frame, page.spec.digest, page.tokens)
