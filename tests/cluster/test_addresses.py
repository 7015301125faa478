"""Which address a node listens at where a network is named, and what is said of addresses that don't do."""

from __future__ import annotations

import errno
import socket
from pathlib import Path

import psutil
import pytest
from peer_stub import SECRET, stub

from kvtier.cluster.machines.addresses import bind_error, is_own, own_address, unreachable
from kvtier.cluster.transfer.actor import PageExchangeProcess
from kvtier.cluster.transfer.wire import why_not_bound
from kvtier.workers.machine.endpoints import Endpoint

NOBODYS = "203.0.113.0/24"  # set apart for documentation


def test_in_a_network_each_machine_has_an_address_of_its_own() -> None:
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    for name, addresses in psutil.net_if_addrs().items():
        for one in addresses:
            if name in up and one.family == socket.AF_INET and not one.address.startswith("169.254."):
                assert own_address(f"{one.address}/32") == one.address

    assert own_address("127.0.0.0/8") == "127.0.0.1"


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "10.1.0.7", "machine.example"])
def test_what_is_no_network_is_taken_as_it_is(host: str) -> None:
    assert own_address(host) == host


@pytest.mark.parametrize("network", [NOBODYS, "2001:db8::/32"])
def test_a_machine_without_an_address_there_says_which_it_has(network: str) -> None:
    with pytest.raises(OSError, match="leave it empty") as caught:
        own_address(network)

    assert f"transfer.host {network}" in str(caught.value) and "127.0.0.1" in str(caught.value)


def test_an_exchange_listens_at_its_own_address_in_the_network_and_is_reached_there(tmp_path: Path) -> None:
    with stub(tmp_path, "home") as node:
        there = PageExchangeProcess("home", node.path, "127.0.0.0/8", 0, SECRET)
        try:
            address = there.info()["address"]

            assert address.startswith("127.0.0.1:")
            assert unreachable(address) == ""
        finally:
            there.stop()


@pytest.mark.parametrize("host", ["203.0.113.7", "no-such-host.invalid"])
def test_a_host_that_cannot_be_listened_at_is_blamed_and_not_the_port(host: str) -> None:
    said = why_not_bound(Endpoint(host, 0))

    assert "transfer.host" in said and "10.1.0.0/16" in said and "transfer.port" not in said


def test_a_port_that_is_taken_is_blamed_and_not_the_host() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        said = why_not_bound(Endpoint("127.0.0.1", taken.getsockname()[1]))

    assert "set transfer.port to another" in said and "transfer.host" not in said


def test_nothing_answers_where_nothing_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        assert unreachable(address) == ""

    assert "refused" in unreachable(address)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "0.0.0.0", "::"])
def test_a_free_port_of_this_machine_can_be_listened_at_and_one_that_is_taken_can_not(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    assert bind_error(Endpoint(host, 0)) is None

    with socket.create_server((host, 0), family=family) as taken:
        error = bind_error(Endpoint(host, taken.getsockname()[1]))

    assert error is not None and error.errno == errno.EADDRINUSE


@pytest.mark.parametrize("host", ["203.0.113.7", "2001:db8::7", "no-such-host.invalid"])
def test_a_host_of_others_cannot_be_listened_at(host: str) -> None:
    error = bind_error(Endpoint(host, 0))

    assert error is not None and error.errno != errno.EADDRINUSE


def test_this_machine_is_known_by_its_loopback_its_addresses_and_its_name() -> None:
    assert is_own("127.0.0.1") and is_own("::1") and is_own("localhost") and is_own(socket.gethostname())
    assert not is_own("203.0.113.7") and not is_own("machine.example")
    for addresses in psutil.net_if_addrs().values():
        for one in addresses:
            if one.family == socket.AF_INET and not one.address.startswith("169.254."):
                assert is_own(one.address) or not psutil.net_if_stats()
