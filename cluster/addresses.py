"""Network addresses: whether a process answers at one, and which of this machine's lies in a network."""

from __future__ import annotations

import socket
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

import psutil

_CONNECT_S = 5.0


def unreachable(address: str) -> str:
    """Why nothing answers at HOST:PORT; "" when something does."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


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
