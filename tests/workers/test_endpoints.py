"""Hosts and HOST:PORT as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.workers.machine.endpoints import Endpoint, bare_host, is_loopback

HOSTS = st.one_of(
    st.ip_addresses(v=4).map(str),
    st.ip_addresses(v=6).map(str),
    st.sampled_from(["localhost", "machine.example", "box_7", "fe80::1%eth0", "::1", "::"]),
)


@given(host=HOSTS, port=st.integers(0, 65535))
def test_an_endpoint_is_read_back_from_its_text(host: str, port: int) -> None:
    where = Endpoint(host, port)

    assert Endpoint.parse(str(where)) == where
    assert str(where).startswith("[") == (":" in host)


@given(host=HOSTS)
def test_a_host_is_the_same_with_and_without_brackets(host: str) -> None:
    assert bare_host(host) == host
    if ":" in host:
        assert bare_host(f"[{host}]") == host


@pytest.mark.parametrize(
    "text",
    ["", "foo", ":1", "foo:", "foo:x", "foo:-1", "foo:65536", "::1", "::1:50051", "[::1]", "[foo]:1", "[]:1"]
    + ["[::1:1", "::1]:1", "a b:1", "http://foo:1", "foo:1/x", "foo:\u0661", "[127.0.0.1]:1", "[[::1]]:1"],
)
def test_what_is_no_endpoint_is_refused_with_both_ways_to_write_one(text: str) -> None:
    with pytest.raises(ValueError, match=r"127\.0\.0\.1:50051 or \[::1\]:50051") as refused:
        Endpoint.parse(text)

    assert repr(text) in str(refused.value)


@pytest.mark.parametrize("text", ["", "foo:1", "127.0.0.1:1", "[::1]:1", "[foo]", "[", "a/b", "a b", "::g"])
def test_what_is_no_host_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be a host name or an IP address"):
        bare_host(text)


@pytest.mark.parametrize(
    ("host", "reached"), [("0.0.0.0", "127.0.0.1:7"), ("::", "[::1]:7"), ("box", "box:7")]
)
def test_all_addresses_are_reached_by_the_loopback_from_the_same_machine(host: str, reached: str) -> None:
    assert str(Endpoint(host, 7).from_here()) == reached


@pytest.mark.parametrize(
    ("host", "loops"),
    [("127.0.0.1", True), ("127.8.8.8", True), ("::1", True), ("localhost", True), ("db.localhost", True)]
    + [("10.0.0.1", False), ("machine.example", False), ("localhost.example", False), ("::", False)],
)
def test_the_loopback_is_known(host: str, loops: bool) -> None:
    assert is_loopback(host) == loops
