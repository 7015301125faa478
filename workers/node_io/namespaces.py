"""Which identity a request's pages go by: one root per layer group for each kind of request."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b

from kvtier.tier.pages.identity import root_key, tenant_digest
from kvtier.tier.pages.page import PageFormat, RootKey
from kvtier.tier.pages.recipe import ChainNeeds, Window
from kvtier.workers.requests.sequence import Namespace
from kvtier.workers.runner.runner import ModelRunner

MAX_KINDS = 256  # remembered at once; one that comes again is made again, the same
MAX_STREAM_TOKENS = 1 << 24  # positions up to here are exact in the float32 of a rotary table


@dataclass(frozen=True, slots=True)
class Kind:
    """What of a request, beside its tenant and tokens, the bytes of its pages depend on."""

    window: int = 0  # 0: the model's own
    sinks: int = 0
    lossy: bool = False


@dataclass(frozen=True, slots=True)
class _Identity:
    fields: tuple[dict[str, str], ...]  # by layer group
    roots: tuple[RootKey, ...]
    needs: tuple[ChainNeeds, ...]


class Namespaces:
    """Makes tenancies. `kind_of` and `needs_of` may be called from any thread, the rest is the step loop's.

    A kind's identity is a function of the runner and the kind, a tenancy one of that, the tenant, and how often the
    tenant was cleared: forgetting one loses nothing. `announce` is told of each root that is new to this worker.
    """

    def __init__(
        self, runner: ModelRunner, tenants: Mapping[str, bytes], announce: Callable[[dict[str, str]], None]
    ) -> None:
        self.tenants = dict(tenants)  # name -> salt of its keys
        self._runner = runner
        self._announce = announce
        self._clears = dict.fromkeys(tenants, 0)
        self._kinds: OrderedDict[Kind, _Identity] = OrderedDict()

    @property
    def lossy_format(self) -> PageFormat | None:
        """The format that a lossy request takes beside the one that pages are written in."""
        return self._runner.l4_format or self._runner.recipe.decayed

    def kind_of(self, window: int, sinks: int, lossy: bool) -> Kind:
        """The kind of a request that says this; 0 means the deployment's window. Raises ValueError, naming the value."""
        runner = self._runner
        if not 0 <= window <= MAX_STREAM_TOKENS:
            raise ValueError(f"window must be from 0 (the model's own) to {MAX_STREAM_TOKENS}, got {window}")
        if sinks < 0 or sinks > window:
            right = f"from 0 to the window of {window}" if window else "0 without a window"
            raise ValueError(f"sinks must be {right}, got {sinks}")
        if 0 < window < runner.page_tokens:
            raise ValueError(f"window must be at least a page, {runner.page_tokens} tokens, got {window}")
        if window and runner.window_refusal:
            raise ValueError(f"window {window} can't be served: {runner.window_refusal}; leave window 0")
        own = runner.groups[0].window
        if own and window > own:
            raise ValueError(f"window {window} is more than the model's own {own}")
        if not window:
            window, sinks = runner.window, runner.sinks
        if window == own and not sinks:
            window = 0  # what the model does anyhow: one identity
        if window > runner.max_context:
            longest = runner.max_context
            raise ValueError(f"window {window} is more than the context of {longest} tokens: at most that")
        return Kind(window, sinks, lossy and self.lossy_format is not None)

    def needs_of(self, kind: Kind) -> tuple[ChainNeeds, ...]:
        """What its rows attend, by layer group."""
        windows = [Window(group.window) for group in self._runner.groups]
        if kind.window:
            windows = [Window(kind.window, kind.sinks)]  # runners of several groups refuse a request's window
        return tuple(ChainNeeds(self._runner.recipe, window, kind.lossy) for window in windows)

    def longest(self, kind: Kind) -> int:
        """Tokens that such a request may have, prompt and answer, as far as the model goes."""
        return MAX_STREAM_TOKENS if kind.window else self._runner.max_context

    def namespace(self, tenant: str, kind: Kind) -> Namespace:
        """Where the tenant's pages of such requests are found."""
        identity = self._identity(kind)
        digest = tenant_digest(tenant)
        name = b"".join(identity.roots) + digest + self._clears[tenant].to_bytes(8, "little")
        exact = self._identity(Kind(kind.window, kind.sinks)).roots if kind.lossy else ()
        return Namespace(
            roots=identity.roots,
            salt=self.tenants[tenant],
            digest=digest,
            tree=RootKey(blake2b(name, digest_size=32, person=b"kvtier.tree").digest()),
            needs=identity.needs,
            other_roots=exact,
            lossy_format=self.lossy_format if kind.lossy else None,
        )

    def fields(self) -> list[dict[str, str]]:
        """The fields of each root of the kinds remembered."""
        return [fields for identity in self._kinds.values() for fields in identity.fields]

    def cleared(self, tenant: str) -> None:
        """From now on the tenant's pages lie in other trees."""
        self._clears[tenant] += 1

    def _identity(self, kind: Kind) -> _Identity:
        known = self._kinds.get(kind)
        if known is not None:
            self._kinds.move_to_end(kind)
            return known
        fields = tuple(
            self._runner.root_fields(group, kind.window, kind.sinks, kind.lossy)
            for group in range(len(self._runner.groups))
        )
        made = _Identity(fields, tuple(map(root_key, fields)), self.needs_of(kind))
        self._kinds[kind] = made
        if len(self._kinds) > MAX_KINDS:
            self._kinds.popitem(last=False)
        for each in fields:
            self._announce(each)
        return made
