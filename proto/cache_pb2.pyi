from kvtier.proto import inference_pb2 as _inference_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Outcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTCOME_UNSPECIFIED: _ClassVar[Outcome]
    OUTCOME_ACCEPTED: _ClassVar[Outcome]
    OUTCOME_CLIPPED: _ClassVar[Outcome]
    OUTCOME_DEFERRED: _ClassVar[Outcome]
    OUTCOME_REJECTED: _ClassVar[Outcome]
    OUTCOME_MISSING: _ClassVar[Outcome]
OUTCOME_UNSPECIFIED: Outcome
OUTCOME_ACCEPTED: Outcome
OUTCOME_CLIPPED: Outcome
OUTCOME_DEFERRED: Outcome
OUTCOME_REJECTED: Outcome
OUTCOME_MISSING: Outcome

class StatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatsReply(_message.Message):
    __slots__ = ("tiers", "requests", "prompt_tokens", "computed_tokens", "cached_tokens", "aborted_prompt_tokens", "page_fill", "failed_requests", "bad_messages")
    class TiersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: TierStats
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[TierStats, _Mapping]] = ...) -> None: ...
    TIERS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ABORTED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PAGE_FILL_FIELD_NUMBER: _ClassVar[int]
    FAILED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    BAD_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    tiers: _containers.MessageMap[str, TierStats]
    requests: int
    prompt_tokens: int
    computed_tokens: int
    cached_tokens: int
    aborted_prompt_tokens: int
    page_fill: float
    failed_requests: int
    bad_messages: int
    def __init__(self, tiers: _Optional[_Mapping[str, TierStats]] = ..., requests: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., computed_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., aborted_prompt_tokens: _Optional[int] = ..., page_fill: _Optional[float] = ..., failed_requests: _Optional[int] = ..., bad_messages: _Optional[int] = ...) -> None: ...

class TierStats(_message.Message):
    __slots__ = ("capacity_bytes", "used_bytes", "pages", "lookups_tokens", "hit_tokens", "hit_rate", "promoted_pages", "demoted_pages", "evicted_pages", "bytes_in", "bytes_out", "load_ms_p50", "load_ms_p99", "corrupt_pages", "page_bytes", "raw_bytes", "variants", "converted_pages", "dropped_pages", "policy", "fallbacks", "refused_writes")
    class VariantsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    LOOKUPS_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HIT_RATE_FIELD_NUMBER: _ClassVar[int]
    PROMOTED_PAGES_FIELD_NUMBER: _ClassVar[int]
    DEMOTED_PAGES_FIELD_NUMBER: _ClassVar[int]
    EVICTED_PAGES_FIELD_NUMBER: _ClassVar[int]
    BYTES_IN_FIELD_NUMBER: _ClassVar[int]
    BYTES_OUT_FIELD_NUMBER: _ClassVar[int]
    LOAD_MS_P50_FIELD_NUMBER: _ClassVar[int]
    LOAD_MS_P99_FIELD_NUMBER: _ClassVar[int]
    CORRUPT_PAGES_FIELD_NUMBER: _ClassVar[int]
    PAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    RAW_BYTES_FIELD_NUMBER: _ClassVar[int]
    VARIANTS_FIELD_NUMBER: _ClassVar[int]
    CONVERTED_PAGES_FIELD_NUMBER: _ClassVar[int]
    DROPPED_PAGES_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    FALLBACKS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_WRITES_FIELD_NUMBER: _ClassVar[int]
    capacity_bytes: int
    used_bytes: int
    pages: int
    lookups_tokens: int
    hit_tokens: int
    hit_rate: float
    promoted_pages: int
    demoted_pages: int
    evicted_pages: int
    bytes_in: int
    bytes_out: int
    load_ms_p50: float
    load_ms_p99: float
    corrupt_pages: int
    page_bytes: int
    raw_bytes: int
    variants: _containers.ScalarMap[str, int]
    converted_pages: int
    dropped_pages: int
    policy: str
    fallbacks: int
    refused_writes: int
    def __init__(self, capacity_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., pages: _Optional[int] = ..., lookups_tokens: _Optional[int] = ..., hit_tokens: _Optional[int] = ..., hit_rate: _Optional[float] = ..., promoted_pages: _Optional[int] = ..., demoted_pages: _Optional[int] = ..., evicted_pages: _Optional[int] = ..., bytes_in: _Optional[int] = ..., bytes_out: _Optional[int] = ..., load_ms_p50: _Optional[float] = ..., load_ms_p99: _Optional[float] = ..., corrupt_pages: _Optional[int] = ..., page_bytes: _Optional[int] = ..., raw_bytes: _Optional[int] = ..., variants: _Optional[_Mapping[str, int]] = ..., converted_pages: _Optional[int] = ..., dropped_pages: _Optional[int] = ..., policy: _Optional[str] = ..., fallbacks: _Optional[int] = ..., refused_writes: _Optional[int] = ...) -> None: ...

class LookupRequest(_message.Message):
    __slots__ = ("tenant", "text", "token_ids", "chat")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    text: str
    token_ids: _inference_pb2.TokenIds
    chat: _inference_pb2.Chat
    def __init__(self, tenant: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Union[_inference_pb2.TokenIds, _Mapping]] = ..., chat: _Optional[_Union[_inference_pb2.Chat, _Mapping]] = ...) -> None: ...

class LookupReply(_message.Message):
    __slots__ = ("prompt_tokens", "pages")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    pages: _containers.RepeatedCompositeFieldContainer[FoundPage]
    def __init__(self, prompt_tokens: _Optional[int] = ..., pages: _Optional[_Iterable[_Union[FoundPage, _Mapping]]] = ...) -> None: ...

class FoundPage(_message.Message):
    __slots__ = ("key", "start", "end", "tiers", "variants")
    KEY_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    VARIANTS_FIELD_NUMBER: _ClassVar[int]
    key: str
    start: int
    end: int
    tiers: _containers.RepeatedScalarFieldContainer[str]
    variants: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, key: _Optional[str] = ..., start: _Optional[int] = ..., end: _Optional[int] = ..., tiers: _Optional[_Iterable[str]] = ..., variants: _Optional[_Iterable[str]] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class ExplainReply(_message.Message):
    __slots__ = ("request_id", "tenant", "worker", "prompt_tokens", "preemptions", "usage", "notes", "moves")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    MOVES_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tenant: str
    worker: str
    prompt_tokens: int
    preemptions: int
    usage: _inference_pb2.Usage
    notes: _containers.RepeatedCompositeFieldContainer[Note]
    moves: _containers.RepeatedCompositeFieldContainer[Move]
    def __init__(self, request_id: _Optional[str] = ..., tenant: _Optional[str] = ..., worker: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., preemptions: _Optional[int] = ..., usage: _Optional[_Union[_inference_pb2.Usage, _Mapping]] = ..., notes: _Optional[_Iterable[_Union[Note, _Mapping]]] = ..., moves: _Optional[_Iterable[_Union[Move, _Mapping]]] = ...) -> None: ...

class Move(_message.Message):
    __slots__ = ("worker", "tokens", "reason")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    worker: str
    tokens: int
    reason: str
    def __init__(self, worker: _Optional[str] = ..., tokens: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class Note(_message.Message):
    __slots__ = ("start", "end", "tier", "reason", "detail")
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    start: int
    end: int
    tier: str
    reason: str
    detail: str
    def __init__(self, start: _Optional[int] = ..., end: _Optional[int] = ..., tier: _Optional[str] = ..., reason: _Optional[str] = ..., detail: _Optional[str] = ...) -> None: ...

class ListPagesRequest(_message.Message):
    __slots__ = ("tenant", "tier", "limit")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    tier: str
    limit: int
    def __init__(self, tenant: _Optional[str] = ..., tier: _Optional[str] = ..., limit: _Optional[int] = ...) -> None: ...

class ShowPageRequest(_message.Message):
    __slots__ = ("key",)
    KEY_FIELD_NUMBER: _ClassVar[int]
    key: str
    def __init__(self, key: _Optional[str] = ...) -> None: ...

class ListPagesReply(_message.Message):
    __slots__ = ("pages", "more")
    PAGES_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    pages: _containers.RepeatedCompositeFieldContainer[Page]
    more: bool
    def __init__(self, pages: _Optional[_Iterable[_Union[Page, _Mapping]]] = ..., more: _Optional[bool] = ...) -> None: ...

class Page(_message.Message):
    __slots__ = ("key", "tier", "owner", "tenant", "root", "parent", "variant", "depth", "tokens", "nbytes", "uses", "idle_s", "pinned", "readers", "state", "made_from")
    KEY_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    VARIANT_FIELD_NUMBER: _ClassVar[int]
    DEPTH_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    USES_FIELD_NUMBER: _ClassVar[int]
    IDLE_S_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    READERS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    MADE_FROM_FIELD_NUMBER: _ClassVar[int]
    key: str
    tier: str
    owner: str
    tenant: str
    root: str
    parent: str
    variant: str
    depth: int
    tokens: int
    nbytes: int
    uses: int
    idle_s: float
    pinned: bool
    readers: int
    state: str
    made_from: str
    def __init__(self, key: _Optional[str] = ..., tier: _Optional[str] = ..., owner: _Optional[str] = ..., tenant: _Optional[str] = ..., root: _Optional[str] = ..., parent: _Optional[str] = ..., variant: _Optional[str] = ..., depth: _Optional[int] = ..., tokens: _Optional[int] = ..., nbytes: _Optional[int] = ..., uses: _Optional[int] = ..., idle_s: _Optional[float] = ..., pinned: _Optional[bool] = ..., readers: _Optional[int] = ..., state: _Optional[str] = ..., made_from: _Optional[str] = ...) -> None: ...

class KeysRequest(_message.Message):
    __slots__ = ("keys",)
    KEYS_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, keys: _Optional[_Iterable[str]] = ...) -> None: ...

class EvictRequest(_message.Message):
    __slots__ = ("keys", "tier")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedScalarFieldContainer[str]
    tier: str
    def __init__(self, keys: _Optional[_Iterable[str]] = ..., tier: _Optional[str] = ...) -> None: ...

class ClearRequest(_message.Message):
    __slots__ = ("tenant",)
    TENANT_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    def __init__(self, tenant: _Optional[str] = ...) -> None: ...

class OutcomesReply(_message.Message):
    __slots__ = ("results", "counts", "parts")
    class CountsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[KeyOutcome]
    counts: _containers.ScalarMap[str, int]
    parts: _containers.RepeatedCompositeFieldContainer[PartOutcome]
    def __init__(self, results: _Optional[_Iterable[_Union[KeyOutcome, _Mapping]]] = ..., counts: _Optional[_Mapping[str, int]] = ..., parts: _Optional[_Iterable[_Union[PartOutcome, _Mapping]]] = ...) -> None: ...

class PartOutcome(_message.Message):
    __slots__ = ("part", "outcome", "pages", "tier", "error", "detail")
    PART_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    part: str
    outcome: Outcome
    pages: int
    tier: str
    error: str
    detail: str
    def __init__(self, part: _Optional[str] = ..., outcome: _Optional[_Union[Outcome, str]] = ..., pages: _Optional[int] = ..., tier: _Optional[str] = ..., error: _Optional[str] = ..., detail: _Optional[str] = ...) -> None: ...

class KeyOutcome(_message.Message):
    __slots__ = ("key", "outcome", "owners")
    class OwnersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Outcome
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Outcome, str]] = ...) -> None: ...
    KEY_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    OWNERS_FIELD_NUMBER: _ClassVar[int]
    key: str
    outcome: Outcome
    owners: _containers.ScalarMap[str, Outcome]
    def __init__(self, key: _Optional[str] = ..., outcome: _Optional[_Union[Outcome, str]] = ..., owners: _Optional[_Mapping[str, Outcome]] = ...) -> None: ...

class RecordRequest(_message.Message):
    __slots__ = ("path", "max_bytes", "nodes")
    PATH_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    path: str
    max_bytes: int
    nodes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, path: _Optional[str] = ..., max_bytes: _Optional[int] = ..., nodes: _Optional[_Iterable[str]] = ...) -> None: ...

class StopRecordRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RecordReply(_message.Message):
    __slots__ = ("recordings",)
    RECORDINGS_FIELD_NUMBER: _ClassVar[int]
    recordings: _containers.RepeatedCompositeFieldContainer[Recording]
    def __init__(self, recordings: _Optional[_Iterable[_Union[Recording, _Mapping]]] = ...) -> None: ...

class Recording(_message.Message):
    __slots__ = ("owner", "path", "events", "nbytes", "seconds", "ended")
    OWNER_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    NBYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    owner: str
    path: str
    events: int
    nbytes: int
    seconds: float
    ended: str
    def __init__(self, owner: _Optional[str] = ..., path: _Optional[str] = ..., events: _Optional[int] = ..., nbytes: _Optional[int] = ..., seconds: _Optional[float] = ..., ended: _Optional[str] = ...) -> None: ...
