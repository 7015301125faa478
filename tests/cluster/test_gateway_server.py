"""The port itself: binding, TLS, health, reflection, keep-alive."""

from __future__ import annotations

import socket
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
import trustme
from gateway_kit import Served, serving
from google.protobuf.descriptor import MethodDescriptor
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from waiting import eventually, until

from kvtier.cli.client import ClientError, TLSFiles, completion, connect
from kvtier.cluster.config.deployment import GrpcConfig, TLSConfig
from kvtier.cluster.gateway.server import GatewayError
from kvtier.proto import cache_pb2, inference_pb2

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


# ---- binding ---------------------------------------------------------------------------------------------------------


def test_port_0_takes_a_free_port_and_names_it() -> None:
    with serving() as served:
        host, port = served.endpoint.split(":")

        assert host == "127.0.0.1"
        assert int(port) > 0
        with connect(served.endpoint) as client:
            assert client.status()["endpoint"] == served.endpoint


@pytest.mark.parametrize(
    ("host", "reached"),
    [
        ("[::1]", "[::1]"),
        ("::1", "[::1]"),
        ("::", "[::1]"),
        ("localhost", "localhost"),
        ("0.0.0.0", "127.0.0.1"),
    ],
)
def test_a_host_is_listened_at_and_called_however_it_is_written(host: str, reached: str) -> None:
    with serving(config=GrpcConfig(host=host, port=0)) as served:
        assert served.endpoint.rpartition(":")[0] == reached
        with connect(served.endpoint) as client:
            assert client.status()["in_flight"] == 0


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "localhost"])
def test_a_proxy_of_the_environment_is_not_asked_for_what_is_on_this_machine(
    monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)

    with serving(config=GrpcConfig(host=host, port=0)) as served, connect(served.endpoint) as client:
        assert client.status()["in_flight"] == 0


def test_a_call_of_another_machine_that_fails_names_the_proxy_it_went_through(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    for name in ("https_proxy", "grpc_proxy"):
        monkeypatch.delenv(name, raising=False)

    with pytest.raises(
        ClientError, match=r"through http_proxy=http://127\.0\.0\.1:9; no_proxy=203\.0\.113\.7"
    ):
        connect("203.0.113.7:50051", timeout_s=1.0)


@pytest.mark.parametrize("endpoint", ["foo", "::1:50051", "http://h:1", "h:99999"])
def test_an_endpoint_that_is_none_is_refused_before_anything_is_called(endpoint: str) -> None:
    with pytest.raises(ClientError, match="must be HOST:PORT") as refused:
        connect(endpoint)

    assert refused.value.exit_code == 2


def test_a_port_in_use_is_an_error_that_names_it_and_the_way_out() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]

        with (
            pytest.raises(GatewayError, match=f"127.0.0.1:{port}: Address already in use; set grpc.port"),
            serving(config=GrpcConfig(port=port)),
        ):
            pass


def test_a_stream_that_is_cut_off_by_a_stop_says_what_to_do_next() -> None:
    with serving(is_manual=True) as served, connect(served.endpoint) as client:
        chunks = client.generate([5, 6, 7], max_tokens=20)
        cut = ThreadPoolExecutor(1).submit(list, chunks)
        until(lambda: served.core.in_flight == 1, "the request to be in flight", 30.0)

        served.call(served.server.stop, 0.0)

        with pytest.raises(
            ClientError, match=r"stopped before the answer was whole: send .* again .*kvtier up"
        ) as told:
            cut.result(30)
    assert (told.value.status, told.value.exit_code) == ("UNAVAILABLE", 3)


def test_a_stop_waits_for_answers_that_end_in_time() -> None:
    with serving() as served, connect(served.endpoint) as client:
        whole = ThreadPoolExecutor(1).submit(lambda: completion(client.generate([5, 6, 7], max_tokens=20)))
        until(lambda: served.workers[0].submitted, "the request to be at the worker", 30.0)

        served.call(served.server.stop, 20.0)

        assert len(whole.result(30)["token_ids"]) == 20


def test_two_gateways_never_share_a_port() -> None:
    with serving() as served:
        port = int(served.endpoint.split(":")[1])

        with (
            pytest.raises(GatewayError, match="Address already in use"),
            serving(config=GrpcConfig(port=port)),
        ):
            pass


def test_a_wildcard_host_is_reached_over_loopback() -> None:
    with serving(config=GrpcConfig(host="0.0.0.0", port=0)) as served:
        assert served.endpoint.startswith("127.0.0.1:")
        with connect(served.endpoint) as client:
            assert completion(client.generate([1], max_tokens=1))["token_ids"] == [1]


# ---- TLS -------------------------------------------------------------------------------------------------------------


class Files:
    """A certificate authority and what it signed, as PEM files."""

    def __init__(self, folder: Path) -> None:
        authority = trustme.CA()
        self.ca = folder / "ca.pem"
        authority.cert_pem.write_to_path(self.ca)
        self.cert, self.key = self._issue(authority, folder, "127.0.0.1")
        self.client_cert, self.client_key = self._issue(authority, folder, "client.test")

    @staticmethod
    def _issue(authority: trustme.CA, folder: Path, name: str) -> tuple[Path, Path]:
        issued = authority.issue_cert(name)
        cert, key = folder / f"{name}.pem", folder / f"{name}.key"
        issued.private_key_pem.write_to_path(key)
        for number, pem in enumerate(issued.cert_chain_pems):
            pem.write_to_path(cert, append=number > 0)
        return cert, key


@pytest.fixture(scope="module")
def pem(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Fresh certificates."""
    return Files(tmp_path_factory.mktemp("pem"))


def test_with_tls_only_clients_that_trust_the_server_are_served(pem: Files) -> None:
    tls = TLSConfig(cert=str(pem.cert), key=str(pem.key))
    with serving(config=GrpcConfig(port=0, tls=tls)) as served:
        with connect(served.endpoint, TLSFiles(ca=pem.ca)) as client:
            assert completion(client.generate([1], max_tokens=1))["token_ids"] == [1]

        for wrong in (None, TLSFiles()):
            with pytest.raises(ClientError, match="same TLS settings") as refused:
                connect(served.endpoint, wrong, timeout_s=5.0)
            assert refused.value.exit_code == 3


def test_with_a_client_authority_only_clients_it_signed_are_served(pem: Files) -> None:
    tls = TLSConfig(cert=str(pem.cert), key=str(pem.key), client_ca=str(pem.ca))
    with serving(config=GrpcConfig(port=0, tls=tls)) as served:
        ours = TLSFiles(ca=pem.ca, cert=pem.client_cert, key=pem.client_key)
        with connect(served.endpoint, ours) as client:
            assert completion(client.generate([1], max_tokens=1))["token_ids"] == [1]

        with pytest.raises(ClientError, match="nothing answers"):
            connect(served.endpoint, TLSFiles(ca=pem.ca), timeout_s=5.0)


def test_pem_files_that_do_not_fit_are_named_at_start(pem: Files, tmp_path: Path) -> None:
    missing = tmp_path / "none.pem"
    for cert, key, named in (
        (missing, pem.key, f"grpc.tls.cert: can't read {missing}"),
        (pem.cert, pem.client_key, "are no certificate and its key"),
    ):
        config = GrpcConfig(port=0, tls=TLSConfig(cert=str(cert), key=str(key)))
        with pytest.raises(GatewayError, match=named), serving(config=config):
            pass


# ---- health and reflection -------------------------------------------------------------------------------------------


def _health(served: Served, channel: grpc.Channel, service: str) -> int:
    stub = health_pb2_grpc.HealthStub(channel)
    reply = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=120)
    return int(reply.status)


def test_health_follows_the_workers_and_watchers_are_told() -> None:
    with serving(workers=2) as served, grpc.insecure_channel(served.endpoint) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(service="kvtier.v1.Inference")
        )

        assert next(watch).status == SERVING
        served.call(served.core.lose_worker, "w0", "gone")
        assert _health(served, channel, "") == SERVING
        served.call(served.core.lose_worker, "w1", "gone")
        assert next(watch).status == NOT_SERVING
        for service in ("", "kvtier.v1.Inference", "kvtier.v1.Cache"):
            assert eventually(lambda service=service: _health(served, channel, service) == NOT_SERVING)
        watch.cancel()


def test_health_of_an_unknown_service_is_not_found() -> None:
    with serving() as served, grpc.insecure_channel(served.endpoint) as channel:
        with pytest.raises(grpc.RpcError) as refused:
            _health(served, channel, "no.such.Service")

        assert refused.value.code() is grpc.StatusCode.NOT_FOUND


def test_reflection_lists_the_services() -> None:
    with serving() as served, grpc.insecure_channel(served.endpoint) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")

        [reply] = stub.ServerReflectionInfo(iter([request]), timeout=120)

        names = {service.name for service in reply.list_services_response.service}
        assert {"kvtier.v1.Inference", "kvtier.v1.Cache", "grpc.health.v1.Health"} <= names


# ---- messages --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method",
    [
        method
        for module in (inference_pb2, cache_pb2)
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    ],
    ids=lambda method: method.full_name,
)
def test_bytes_that_are_no_message_of_the_method_are_the_clients_error(method: MethodDescriptor) -> None:
    with serving() as served, grpc.insecure_channel(served.endpoint) as channel:
        kind = channel.unary_stream if method.server_streaming else channel.unary_unary
        path = f"/{method.containing_service.full_name}/{method.name}"

        with pytest.raises(grpc.RpcError) as refused:
            list(kind(path)(b"\xff\xff\xff no message of ours", timeout=120))

        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert refused.value.details() == f"the message is no request of {method.name}"
        with connect(served.endpoint) as client:
            assert completion(client.generate([1], max_tokens=1))["token_ids"] == [1]


# ---- keep-alive ------------------------------------------------------------------------------------------------------

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_SETTINGS, _PING, _GOAWAY, _ACK = 4, 6, 7, 1


def _frame(kind: int, payload: bytes = b"", flags: int = 0) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", 0) + payload


def _read_frame(connection: socket.socket) -> tuple[int, int]:
    """Type and flags of the next HTTP/2 frame."""
    head = connection.recv(9, socket.MSG_WAITALL)
    length = int.from_bytes(head[:3], "big")
    if length:
        connection.recv(length, socket.MSG_WAITALL)
    return head[3], head[4]


def test_a_client_may_ping_as_often_as_it_likes() -> None:
    """By default gRPC answers the third ping of a silent connection with GOAWAY, which would end long decodes."""
    with serving() as served:
        host, port = served.endpoint.split(":")
        with socket.create_connection((host, int(port)), timeout=120) as connection:
            connection.sendall(_PREFACE + _frame(_SETTINGS))

            answered = 0
            for _ in range(20):
                connection.sendall(_frame(_PING, b"12345678"))
                while True:
                    kind, flags = _read_frame(connection)
                    assert kind != _GOAWAY
                    if kind == _PING and flags & _ACK:
                        answered += 1
                        break

        assert answered == 20
