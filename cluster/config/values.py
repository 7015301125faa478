"""What sections of the configuration are made of: their base, and sizes in bytes as people write them. Pure."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    ValidationInfo,
    field_validator,
)

from kvtier.workers.machine.endpoints import bare_host

_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([KMGT]i?B?|B)?\s*$", re.IGNORECASE)
_UNITS = {
    "": 1,
    "K": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "KI": 2**10,
    "MI": 2**20,
    "GI": 2**30,
    "TI": 2**40,
}


class Section(BaseModel):
    """Frozen, without keys that nothing reads, with finite numbers only, and yes or no only where that is asked for."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_flag_is_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, bool) and cls.model_fields[info.field_name or ""].annotation is not bool:
            raise ValueError(f"must not be true or false, got {str(value).lower()}")
        return value


def parse_bytes(value: Any) -> Any:
    """Sizes are integers in bytes, or text such as 512MiB or 2GB."""
    if not isinstance(value, str):
        return value
    match = _SIZE.match(value)
    if not match:
        raise ValueError(f"not a size in bytes (say 512MiB, 2GB or 1048576): {value!r}")
    unit = (match.group(2) or "").upper().removesuffix("B")
    return int(float(match.group(1)) * _UNITS[unit])


Bytes = Annotated[int, BeforeValidator(parse_bytes)]
Host = Annotated[str, AfterValidator(bare_host)]  # a name or an IP address, without brackets from here on
