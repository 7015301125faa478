"""TLS between nodes, from the configuration to the wire: who has no certificate of the deployment's gets no page."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trustme
from peer_stub import exchange, stub

from kvtier.cluster.config.deployment import ConfigError, load_config
from kvtier.cluster.config.nodes import TransferTls
from kvtier.cluster.machines.homes import Home
from kvtier.cluster.machines.node_probe import NodeInfo, tls_refusal
from kvtier.cluster.supervisor.actors import Actors
from kvtier.cluster.supervisor.launch import Launched, LaunchError
from kvtier.cluster.transfer import actor as exchange_module
from kvtier.cluster.transfer.wire import TlsFiles


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def files_of(folder: Path, authority: trustme.CA, signer: trustme.CA | None = None) -> dict[str, str]:
    """A node's own certificate, and the authority that it trusts; as `signer` signed it, if not that one."""
    folder.mkdir()
    cert = (signer or authority).issue_cert("127.0.0.1")
    named = {name: folder / f"{name}.pem" for name in ("cert", "key", "ca")}
    cert.cert_chain_pems[0].write_to_path(named["cert"])
    cert.private_key_pem.write_to_path(named["key"])
    authority.cert_pem.write_to_path(named["ca"])
    return {name: str(path) for name, path in named.items()}


def test_the_files_of_the_configuration_reach_the_exchanges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: dict[str, Any] = {}
    maker = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=made.update))
    monkeypatch.setattr(exchange_module, "PageExchange", maker)
    config = load_config(None, ("transfer.tls={cert: a.pem, key: b.pem, ca: c.pem}",))
    parts: Any = SimpleNamespace(on=lambda _: None)
    place: Any = SimpleNamespace(node_id="node-0", machine=SimpleNamespace(address="10.0.0.1"))

    Actors(config, tmp_path, parts, parts, 1, tmp_path, tmp_path).exchange(
        Home(place, NodeInfo(tmp_path, tmp_path, 1))
    )

    assert made["tls"] == TlsFiles("a.pem", "b.pem", "c.pem")
    assert load_config(None).transfer.tls is None


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ("{cert: a.pem, key: b.pem}", "transfer.tls.ca"),
        ("{cert: a.pem, key: '', ca: c.pem}", "transfer.tls.key"),
        ("{cert: a.pem, key: b.pem, client_ca: c.pem, ca: c.pem}", "transfer.tls.client_ca: no such key"),
        ("a.pem", "transfer.tls"),
    ],
)
def test_files_that_are_missing_or_unknown_are_named(value: str, named: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(None, (f"transfer.tls={value}",))

    assert named in str(refused.value)


def test_files_that_do_not_fit_are_named_before_anything_starts(tmp_path: Path) -> None:
    one, other = (files_of(tmp_path / name, trustme.CA()) for name in ("one", "other"))
    text = tmp_path / "text"
    text.write_text("no certificate")
    missing = str(tmp_path / "none.pem")

    assert tls_refusal(None) == tls_refusal(TransferTls(**one)) == ""
    assert tls_refusal(TransferTls(**one | {"cert": missing})).startswith(
        f"transfer.tls.cert: can't read {missing}"
    )
    assert "are no certificate and its key" in tls_refusal(TransferTls(**one | {"key": other["key"]}))
    assert tls_refusal(TransferTls(**one | {"ca": str(text)})).startswith("transfer.tls.ca")

    config = load_config(None, (f"transfer.tls={{cert: {missing}, key: b.pem, ca: c.pem}}",))
    with pytest.raises(LaunchError, match=r"transfer\.tls\.cert: can't read"):
        Launched(config, tmp_path, tmp_path, tmp_path).start(lambda *_: None, lambda: None)


def test_each_node_may_have_a_certificate_of_its_own(stack: ExitStack, tmp_path: Path) -> None:
    authority = trustme.CA()
    home, away = (stack.enter_context(stub(tmp_path, name)) for name in ("home", "away"))
    files = [TlsFiles(**files_of(tmp_path / f"{name}-files", authority)) for name in ("home", "away")]
    stack.enter_context(exchange("home", home.path, same_host="off", tls=files[0]))
    there = stack.enter_context(exchange("away", away.path, same_host="off", tls=files[1]))
    away.put(*range(4))

    fetch = home.order("away", there.info()["address"], range(4))

    assert home.ended(fetch).failed == []
    assert home.stored(fetch) == set(range(4))


@pytest.mark.parametrize("is_the_stranger_asking", [True, False])
def test_who_has_a_certificate_of_others_gets_and_gives_no_page(
    stack: ExitStack, tmp_path: Path, is_the_stranger_asking: bool
) -> None:
    """It knows the deployment's secret and trusts its authority; another one signed for it."""
    authority, others = trustme.CA(), trustme.CA()
    ours = TlsFiles(**files_of(tmp_path / "ours", authority))
    strange = TlsFiles(**files_of(tmp_path / "strange", authority, signer=others))
    home, away = (stack.enter_context(stub(tmp_path, name)) for name in ("home", "away"))
    asks, gives = (strange, ours) if is_the_stranger_asking else (ours, strange)
    stack.enter_context(exchange("home", home.path, same_host="off", tls=asks))
    there = stack.enter_context(exchange("away", away.path, same_host="off", tls=gives))
    away.put(*range(4))

    fetch = home.order("away", there.info()["address"], range(4))

    assert home.ended(fetch).reason == "load_failed"
    assert home.stored(fetch) == set()
    assert there.stats()["served"] == {}
