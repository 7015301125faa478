"""Hosts and HOST:PORT as people write them, parsed once for listening and for calling. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from typing import Self

_NAME = re.compile(r"[^\s:/\[\]]+")  # a host name or an IPv4 address
_WILDCARDS = {
    "0.0.0.0": "127.0.0.1",
    "::": "::1",
}  # all addresses of a machine, and what reaches them from there


def bare_host(text: str) -> str:
    """A host without the brackets of an IPv6 address. ValueError for what is none."""
    bare = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    if ":" in bare:
        try:
            IPv6Address(bare)
        except ValueError as error:
            raise ValueError(f"must be a host name or an IP address without a port, got {text!r}") from error
    elif bare != text or not _NAME.fullmatch(bare):
        raise ValueError(f"must be a host name or an IP address, got {text!r}")
    return bare


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where something listens. `host` has no brackets; the text form has them around an IPv6 address."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """ValueError for what is no HOST:PORT, with the way to write it."""
        host, separator, port = text.rpartition(":")
        if separator and port.isascii() and port.isdigit() and int(port) < 65536:
            bracketed = host.startswith("[") and host.endswith("]")
            if bracketed or ":" not in host:
                try:
                    return cls(bare_host(host), int(port))
                except ValueError:
                    pass
        raise ValueError(f"must be HOST:PORT, such as 127.0.0.1:50051 or [::1]:50051, got {text!r}")

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_everywhere(self) -> bool:
        """Whether the host stands for all addresses of a machine."""
        return self.host in _WILDCARDS

    def from_here(self) -> Endpoint:
        """As processes of the same machine reach it."""
        return Endpoint(_WILDCARDS.get(self.host, self.host), self.port)


def is_loopback(host: str) -> bool:
    """Whether a host without brackets is this machine whatever its network."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
