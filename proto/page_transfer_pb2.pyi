from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class MeetRequest(_message.Message):
    __slots__ = ("protocol", "node_id")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    node_id: str
    def __init__(self, protocol: _Optional[int] = ..., node_id: _Optional[str] = ...) -> None: ...

class MeetReply(_message.Message):
    __slots__ = ("protocol", "node_id", "boot_id", "socket_path", "incarnation")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    SOCKET_PATH_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    node_id: str
    boot_id: str
    socket_path: str
    incarnation: str
    def __init__(self, protocol: _Optional[int] = ..., node_id: _Optional[str] = ..., boot_id: _Optional[str] = ..., socket_path: _Optional[str] = ..., incarnation: _Optional[str] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("node_id", "root", "tenant", "page_tokens", "first_page", "keys", "held", "variant", "spec_digest", "payload_bytes", "wait_ms", "checks", "cleared")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    ROOT_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FIRST_PAGE_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    VARIANT_FIELD_NUMBER: _ClassVar[int]
    SPEC_DIGEST_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    CHECKS_FIELD_NUMBER: _ClassVar[int]
    CLEARED_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    root: bytes
    tenant: bytes
    page_tokens: int
    first_page: int
    keys: bytes
    held: bytes
    variant: str
    spec_digest: bytes
    payload_bytes: int
    wait_ms: int
    checks: bool
    cleared: int
    def __init__(self, node_id: _Optional[str] = ..., root: _Optional[bytes] = ..., tenant: _Optional[bytes] = ..., page_tokens: _Optional[int] = ..., first_page: _Optional[int] = ..., keys: _Optional[bytes] = ..., held: _Optional[bytes] = ..., variant: _Optional[str] = ..., spec_digest: _Optional[bytes] = ..., payload_bytes: _Optional[int] = ..., wait_ms: _Optional[int] = ..., checks: _Optional[bool] = ..., cleared: _Optional[int] = ...) -> None: ...

class FetchFrame(_message.Message):
    __slots__ = ("pages", "ending")
    PAGES_FIELD_NUMBER: _ClassVar[int]
    ENDING_FIELD_NUMBER: _ClassVar[int]
    pages: bytes
    ending: Ending
    def __init__(self, pages: _Optional[bytes] = ..., ending: _Optional[_Union[Ending, _Mapping]] = ...) -> None: ...

class Ending(_message.Message):
    __slots__ = ("pages", "reason", "detail")
    PAGES_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    pages: int
    reason: str
    detail: str
    def __init__(self, pages: _Optional[int] = ..., reason: _Optional[str] = ..., detail: _Optional[str] = ...) -> None: ...
