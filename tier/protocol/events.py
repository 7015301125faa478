"""What the coordinator hears and what it orders. Pure data; tier/node/coordinator.py decides, tier/node/executor/mover.py and tier/node/service.py carry out.

Events are in the past tense (admin verbs aside, which ask), commands in the imperative. A `transfer` is the number of
one piece of I/O, a `ticket` that of one admin call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvtier.tier.pages.page import Envelope, PageKey, TierName
from kvtier.tier.protocol.messages import ToNode, ToWorker
from kvtier.tier.stores.base import CatalogueEntry, Outcome, Place

PageId = tuple[bytes, str]  # (key, variant)
Failure = Literal["missing", "corrupt", "io", "full"]  # why a piece of I/O failed; full: the disk has no room


@dataclass(frozen=True, slots=True)
class WorkerRef:
    """One life of one worker; a worker that starts again is another one."""

    worker_id: str
    incarnation: str


# ---- events ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FromWorker:
    """A worker said something."""

    worker: WorkerRef
    message: ToNode


@dataclass(frozen=True, slots=True)
class WorkerGone:
    """The worker is proven to touch the slab no more: its process is dead, or it closed its end itself."""

    worker: WorkerRef


@dataclass(frozen=True, slots=True)
class ReadDone:
    """ReadPage is done: the slot holds the verified page."""

    transfer: int
    envelope: Envelope


@dataclass(frozen=True, slots=True)
class ReadFailed:
    """ReadPage failed; the slot's content is undefined."""

    transfer: int
    failure: Failure
    detail: str


@dataclass(frozen=True, slots=True)
class WriteDone:
    """WritePage is done: the page's bytes and its catalogue record are in L4."""

    transfer: int


@dataclass(frozen=True, slots=True)
class WriteFailed:
    """WritePage failed and left no catalogue record. "corrupt": it was the copy in L3 that failed its checksum."""

    transfer: int
    failure: Failure
    detail: str


@dataclass(frozen=True, slots=True)
class Verified:
    """VerifyPage is done; `failure` None: the copy is whole."""

    transfer: int
    failure: Failure | None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Pin:
    """Keep these pages from being evicted, from any tier."""

    ticket: int
    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Unpin:
    """End `Pin`."""

    ticket: int
    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Evict:
    """Drop these pages from `tier` (None: from all of the node's)."""

    ticket: int
    keys: tuple[bytes, ...]
    tier: TierName | None


@dataclass(frozen=True, slots=True)
class BeginClear:
    """A tenant's pages (its digest; None: all tenants') are to be cleared under this number (0: none): ClearPages and `Clear`
    follow. From now on no page is taken in from a worker that doesn't know of it, and none is looked up until `Clear`."""

    ticket: int
    tenant: bytes | None
    number: int


@dataclass(frozen=True, slots=True)
class NoteClears:
    """Clears that the node missed while it was away. Those of tenants that it has nothing of are done by this."""

    clears: tuple[tuple[bytes | None, int], ...]


@dataclass(frozen=True, slots=True)
class ClearsKnown:
    """The node has applied all clears that it missed while it was away: what it holds may be served."""


@dataclass(frozen=True, slots=True)
class ClearPages:
    """Drop and wipe these pages, pinned ones too, ahead of the `Clear` that they are cleared for and that ends it."""

    ticket: int
    pages: tuple[PageId, ...]


@dataclass(frozen=True, slots=True)
class Clear:
    """Drop and wipe all pages of a tenant (its digest; None: all tenants), pinned ones too. `number` as in BeginClear."""

    ticket: int
    tenant: bytes | None
    number: int = 0


@dataclass(frozen=True, slots=True)
class Verify:
    """Read every copy of these pages and check it."""

    ticket: int
    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Drain:
    """The node is about to stop: grant no more slots, write out what L4 lacks, its failed writes once more."""


@dataclass(frozen=True, slots=True)
class Continue:
    """Do the next part of work that would take too long in one event; sent while the node `has_more`."""


@dataclass(frozen=True, slots=True)
class Quiesce:
    """The drain is over: start no more writes, persist what the catalogue keeps of the pages' use."""


Event = (
    FromWorker
    | WorkerGone
    | ReadDone
    | ReadFailed
    | WriteDone
    | WriteFailed
    | Verified
    | Pin
    | Unpin
    | Evict
    | BeginClear
    | NoteClears
    | ClearsKnown
    | ClearPages
    | Clear
    | Verify
    | Drain
    | Continue
    | Quiesce
)


# ---- commands ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    """Tell a worker."""

    worker: WorkerRef
    message: ToWorker


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Hear this worker no more; it counts as alive until WorkerGone."""

    worker: WorkerRef
    reason: str


@dataclass(frozen=True, slots=True)
class ReadPage:
    """L4 -> L3: fill slot `slot`, for `payload_bytes`, from `place`. Answered by ReadDone or ReadFailed."""

    transfer: int
    place: Place
    slot: int
    payload_bytes: int
    key: PageKey
    variant: str


@dataclass(frozen=True, slots=True)
class WritePage:
    """L3 -> L4: check the page in slot `slot`, write it to `entry.place`, then put `entry` in the catalogue.

    Answered by WriteDone or WriteFailed. Carried out in the order of all WritePage and CommitCatalogue commands.
    """

    transfer: int
    slot: int
    entry: CatalogueEntry


@dataclass(frozen=True, slots=True)
class VerifyPage:
    """Check the copy in L3 slot `place.index` or L4 place `place`. Answered by Verified."""

    transfer: int
    tier: TierName
    place: Place
    envelope: Envelope


@dataclass(frozen=True, slots=True)
class CommitCatalogue:
    """Put and drop catalogue records in L4."""

    puts: tuple[CatalogueEntry, ...]
    drops: tuple[PageId, ...]


@dataclass(frozen=True, slots=True)
class WipeSlots:
    """Make L4 slots whose records are dropped unreadable for good; before anything is written there."""

    places: tuple[Place, ...]


@dataclass(frozen=True, slots=True)
class MarkClear:
    """Put it down, to stay, that clears have begun (as BeginClear): whatever uses the folder next finishes them first."""

    clears: tuple[tuple[bytes | None, int], ...]


@dataclass(frozen=True, slots=True)
class CatchUp:
    """A worker knows of a clear that this node missed, which has begun by that: have it go on, ClearPages and then Clear."""

    tenant: bytes
    number: int


@dataclass(frozen=True, slots=True)
class ForgetTenant:
    """Nothing that the tenant (None: anyone) wrote to L4 before this may come back, from no old slot header either.

    It ends a clear: once all that was ordered for that is on the disk, the mark is taken away.
    """

    tenant: bytes | None


@dataclass(frozen=True, slots=True)
class SaveRoots:
    """Persist the table of root fields, so that `explain` can name a difference after a restart."""

    roots: tuple[tuple[bytes, dict[str, str]], ...]


@dataclass(frozen=True, slots=True)
class StoredBefore:
    """Which prompts were ever stored, oldest first; kept over restarts to explain misses with, and for nothing else."""

    contents: tuple[tuple[bytes, bytes, tuple[bytes, ...]], ...] = ()  # tenant, content digest, roots
    first_pages: tuple[tuple[bytes, str, bytes], ...] = ()  # key, variant, tenant


@dataclass(frozen=True, slots=True)
class SaveStored:
    """Persist which prompts were ever stored, so that `explain` still knows after a restart."""

    before: StoredBefore


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of an admin call."""

    ticket: int
    results: tuple[tuple[bytes, Outcome], ...]


@dataclass(frozen=True, slots=True)
class HoldsChanged:
    """Pages that a tier of this node has, or has no more, since the last one: for the cluster's directory."""

    tier: TierName
    came: tuple[bytes, ...]  # keys
    left: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class HintWrong:
    """A node has not the page that the cluster's directory said it has."""

    node_id: str
    key: bytes


@dataclass(frozen=True, slots=True)
class Note:
    """One line for the log and for `notes()`."""

    text: str


Command = (
    Send
    | Disconnect
    | ReadPage
    | WritePage
    | VerifyPage
    | CommitCatalogue
    | WipeSlots
    | MarkClear
    | CatchUp
    | ForgetTenant
    | SaveRoots
    | SaveStored
    | Answer
    | HoldsChanged
    | HintWrong
    | Note
)
