"""Network addresses: whether a process answers or can listen at one, and which are this machine's."""

from __future__ import annotations

import errno
import socket
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Any

import psutil

from kvtier.workers.machine.endpoints import Endpoint, is_loopback

_CONNECT_S = 5.0


def unreachable(address: str) -> str:
    """Why nothing answers at HOST:PORT; "" when something does."""
    where = Endpoint.parse(address)
    try:
        socket.create_connection((where.host, where.port), timeout=_CONNECT_S).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def bind_error(where: Endpoint) -> OSError | None:
    """Why nothing can listen there; None when something can.

    A host name may have several addresses: they must not be in use, and one of them must be this machine's.
    """
    try:
        found = socket.getaddrinfo(where.host, where.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        return error
    errors = [_bind_error(family, address) for family, _, _, _, address in found]
    taken = [error for error in errors if error and error.errno in (errno.EADDRINUSE, errno.EACCES)]
    if taken or all(errors):
        return next(iter(taken), errors[0])
    return None


def is_own(host: str) -> bool:
    """Whether a host is this machine, by its loopback, an address of its or its name."""
    if is_loopback(host) or host == socket.gethostname():
        return True
    try:
        return ip_address(host) in _addresses()
    except ValueError:
        return False


def own_address(host: str) -> str:
    """`host`, or where that is a network such as 10.1.0.0/16, the lowest of this machine's addresses in it.

    Raises OSError, with the way out, where it has none.
    """
    if "/" not in host:
        return host
    network = ip_network(host)
    there = _addresses()
    found = sorted((address for address in there if address in network), key=int)
    if not found:
        raise OSError(
            f"this machine has no address in transfer.host {host} (it has {', '.join(map(str, there)) or 'none'}): "
            "name a network that every node is in, or leave it empty"
        )
    return str(found[0])


def _bind_error(family: int, address: tuple[Any, ...]) -> OSError | None:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)  # IPv4 has an address of its own
            probe.bind(address)
    except OSError as error:
        return error
    return None


def _addresses() -> list[IPv4Address | IPv6Address]:
    """Of all network interfaces that are up; not those that only mean something on one link."""
    states = psutil.net_if_stats()
    found = [
        ip_address(one.address.partition("%")[0])  # an IPv6 address may name its interface
        for name, addresses in psutil.net_if_addrs().items()
        for one in addresses
        if one.family in (socket.AF_INET, socket.AF_INET6) and name in states and states[name].isup
    ]
    return [address for address in found if not address.is_link_local]
