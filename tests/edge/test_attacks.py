"""Strangers at the edge: none of them reaches weftd, and the calls of others go on."""

from __future__ import annotations

import http.client
import socket
import time
from collections.abc import Iterator

import frames
import pytest
from callers import open_calls
from edge_server import Edge
from frames import ATTACKS, CHECK, DATA, END_HEADERS, GOAWAY, HEADERS, RESET, Stranger

SCALE = 20  # Timeouts are this many times shorter in test_slow_*.


def resident_bytes(pid: int) -> int:
    with open(f"/proc/{pid}/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096


def stranger(edge: Edge) -> Stranger:
    return Stranger(edge.connect("h2"))


@pytest.mark.parametrize("known", ["a stranger", "a caller with a token"])
def test_headers_that_end_gRPC_end_nothing(edge: Edge, known: str) -> None:
    token = edge.alice if known == "a caller with a token" else None
    checks = edge.handled("Check", "OK")
    with (
        edge.client(edge.bob) as bob,
        open_calls(bob, edge.target, edge.security(edge.bob)) as ended,
    ):
        for shape, more in ATTACKS.items():
            for path in (CHECK, "/weft.v1.TrainingService/ForwardBackward"):
                for piece in (16000, 700):
                    with stranger(edge) as other:
                        other.request(1, frames.block(path, token, more), piece)
                        other.frames(0.1)
            assert not ended(), shape
            assert bob.info().model.name, shape
    if token is None:
        assert edge.handled("Check", "OK") == checks


def test_messages_of_a_stranger_that_never_end_reach_nobody(edge: Edge) -> None:
    """45 streams send what they can to the health service, and never end."""
    before = resident_bytes(edge.daemon.pid)
    counted = edge.daemon.scrape()
    with (
        edge.client(edge.bob) as bob,
        open_calls(bob, edge.target, edge.security(edge.bob)),
    ):
        others = [stranger(edge) for _ in range(5)]
        message = b"\0" + (60 << 20).to_bytes(4, "big")
        for other in others:
            for stream in range(1, 19, 2):
                headers = frames.block(CHECK, None)
                other.send(frames.frame(HEADERS, END_HEADERS, stream, headers))
                other.send(frames.frame(DATA, 0, stream, message))
        piece = frames.frame(DATA, 0, 1, bytes(16000))
        limit = time.monotonic() + 1.5
        for other in others:
            other.sock.settimeout(0.3)
            while time.monotonic() < limit and other.send(piece):
                pass
        assert bob.info().model.name
        for other in others:
            other.sock.close()
    assert resident_bytes(edge.daemon.pid) - before < 64 << 20
    line = 'grpc_method="Check"'
    assert [x for x in counted.splitlines() if line in x] == [
        x for x in edge.daemon.scrape().splitlines() if line in x
    ]


@pytest.mark.parametrize("known", ["a stranger", "a caller with a token"])
def test_streams_that_are_reset_at_once_delay_nobody(edge: Edge, known: str) -> None:
    token = edge.alice if known == "a caller with a token" else None
    headers = frames.block("/weft.v1.ServerService/GetInfo", token)
    before = resident_bytes(edge.daemon.pid)
    with (
        edge.client(edge.bob) as bob,
        open_calls(bob, edge.target, edge.security(edge.bob)),
        stranger(edge) as other,
    ):
        other.reset_streams(headers, seconds=1)
        start = time.monotonic()
        assert bob.info().model.name
        assert time.monotonic() - start < 5
    assert resident_bytes(edge.daemon.pid) - before < 128 << 20


@pytest.mark.parametrize("method", ["ExportAdapter", "DownloadCheckpoint"])
def test_downloads_that_nobody_reads_cost_little(edge: Edge, method: str) -> None:
    """A caller with a token begins a hundred downloads and takes no byte. weftd holds
    at most a piece of a mebibyte and a connection of each, but not the files."""
    message = b"\x0a\x04held" + (b"\x12\x01c" if method.startswith("D") else b"")
    body = b"\0" + len(message).to_bytes(4, "big") + message
    path = f"/weft.v1.AdapterService/{method}"
    with (
        edge.client(edge.alice) as alice,
        edge.client(edge.bob) as bob,
        open_calls(bob, edge.target, edge.security(edge.bob)),
        stranger(edge) as other,
    ):
        adapter = alice.create_adapter("held", rank=128)
        assert 100 * adapter.save("c").size_bytes > 400 << 20
        before = resident_bytes(edge.daemon.pid)
        no_window = (4).to_bytes(2, "big") + bytes(4)
        other.send(frames.frame(frames.SETTINGS, 0, 0, no_window))
        for stream in range(1, 201, 2):
            other.request(stream, frames.block(path, edge.alice), body=body)
        other.frames(2)
        assert bob.info().model.name
        assert resident_bytes(edge.daemon.pid) - before < 200 << 20
        alice.delete_checkpoint("held", "c")
        adapter.delete()


def exchange(edge: Edge, text: str, seconds: float = 2.0) -> bytes:
    """Returns all that comes back for these bytes over HTTP/1.1."""
    with edge.connect("http/1.1") as sock:
        sock.sendall(text.replace("\n", "\r\n").encode())
        sock.settimeout(seconds)
        answer = b""
        try:
            while piece := sock.recv(1 << 16):
                answer += piece
        except TimeoutError:
            pass
        return answer


HIDDEN = "GET /console/v1/state HTTP/1.1\nHost: localhost\n\n"
POST = "POST /api/v1/telemetry HTTP/1.1\nHost: localhost\n"


@pytest.mark.parametrize(
    "headers",
    [
        "Transfer-Encoding: identity",
        "Transfer-Encoding: gzip",
        "Transfer-Encoding: xchunked",
        "Transfer-Encoding: chunked, identity",
        "Transfer-Encoding: chunked\nContent-Length: 3",
        "Transfer-Encoding: chunked\nTransfer-Encoding: chunked",
        "Content-Length: 3\nContent-Length: 4",
        "Content-Length: +3",
        "Content-Length: 0x3",
        "Transfer-Encoding : chunked",
    ],
)
def test_no_second_request_is_hidden_in_a_body(edge: Edge, headers: str) -> None:
    answer = exchange(edge, f"{POST}{headers}\n\n{HIDDEN}")
    assert answer.count(b"HTTP/1.1 ") == 1, answer
    assert answer.startswith((b"HTTP/1.1 400", b"HTTP/1.1 501", b"HTTP/1.1 401")), (
        answer
    )


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("localhost:8443", 200),
        ("127.0.0.1", 200),
        ("[::1]:8443", 200),
        ("evil.example", 421),
        ("evil.example:8443", 421),
        ("localhost.evil.example", 421),
        ("127.0.0.1.evil.example", 421),
    ],
)
def test_a_name_must_be_that_of_the_certificate(
    edge: Edge, host: str, status: int
) -> None:
    answer = exchange(edge, f"GET / HTTP/1.1\nHost: {host}\nConnection: close\n\n")
    assert answer.startswith(f"HTTP/1.1 {status} ".encode()), answer[:80]


@pytest.mark.parametrize(
    "path",
    [
        "/metrics",
        "/health",
        "/authorize",
        "/readyz",
        "/livez",
        "/api",
        "/api/v2/x",
        "/nginx.conf",
    ],
)
def test_no_other_path_leads_inside(edge: Edge, path: str) -> None:
    for route in (path, f"/console/..{path}", f"/v1/%2e%2e{path}"):
        answer = exchange(
            edge, f"GET {route} HTTP/1.1\nHost: localhost\nConnection: close\n\n"
        )
        assert answer.startswith((b"HTTP/1.1 404", b"HTTP/1.1 400")), (
            route,
            answer[:80],
        )


def test_gRPC_is_only_what_gRPCs_clients_send(edge: Edge) -> None:
    for request in (
        "GET /weft.v1.ServerService/GetInfo HTTP/1.1\nHost: localhost\n\n",
        "POST /weft.v1.ServerService/GetInfo HTTP/1.1\nHost: localhost\n"
        f"Authorization: Bearer {edge.alice}\nContent-Type: application/grpc\n"
        "Content-Length: 5\n\n\0\0\0\0\0",
    ):
        assert exchange(edge, request).startswith(b"HTTP/1.1 415")


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Edge]:
    """An edge whose timeouts are much shorter."""
    with Edge(tmp_path_factory.mktemp("hasty"), scale=SCALE).running() as running:
        yield running


def seconds_until_closed(sock: socket.socket) -> float:
    start = time.monotonic()
    sock.settimeout(15)
    try:
        while sock.recv(1 << 16):
            pass
    except TimeoutError:
        raise AssertionError("the connection is still open") from None
    except OSError:
        pass
    return time.monotonic() - start


def test_slow_headers_and_bodies_are_cut_off(hasty: Edge) -> None:
    """client_header_timeout is 10 s and client_body_timeout 60 s in the shipped
    configuration."""
    half = socket.create_connection(("127.0.0.1", hasty.port))
    assert seconds_until_closed(half) < 3, "a handshake that never comes"
    with hasty.connect("http/1.1") as sock:
        sock.sendall(b"GET / HTTP/1.1\r\nHost: localh")
        assert seconds_until_closed(sock) < 3, "half a header of HTTP/1.1"
    with hasty.connect("http/1.1") as sock:
        sock.sendall(
            POST.replace("\n", "\r\n").encode() + b"Content-Length: 9\r\n\r\n{"
        )
        assert seconds_until_closed(sock) < 5, "half a body of HTTP/1.1"
    with stranger(hasty) as other:
        headers = frames.block("/weft.v1.ServerService/GetInfo", hasty.alice)
        other.request(1, headers, body=None)
        found = other.frames(6)
        assert any(kind in (HEADERS, RESET, GOAWAY) for kind, *_ in found), found


def test_idle_strangers_keep_nobody_out(hasty: Edge) -> None:
    """nginx 1.22 does not close a connection with half a header of HTTP/2."""
    idle = [socket.create_connection(("127.0.0.1", hasty.port)) for _ in range(500)]
    half = frames.frame(HEADERS, 0, 1, frames.block(CHECK, None))
    for _ in range(100):
        other = stranger(hasty)
        other.send(half)
        idle.append(other.sock)
    try:
        with hasty.client(hasty.bob) as bob:
            assert bob.info().model.name
        connection = http.client.HTTPSConnection(
            "localhost", hasty.port, context=hasty.context(), timeout=10
        )
        connection.request("GET", "/healthz")
        assert connection.getresponse().status == 200
        connection.close()
    finally:
        for sock in idle:
            sock.close()
