"""Tests what a client of the Tinker API may send by mistake or on purpose. Each
request gets the right status, and the server continues to serve."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from tinker_daemon import TinkerDaemon
from tinker_sdk import SDK

JSON = {"Content-Type": "application/json"}
PROTOBUF = {"Content-Type": "application/x-protobuf"}
KEY = {"X-API-Key": "tml-any"}
ZSTD = {"Content-Encoding": "zstd"}
MAX_BYTES = 1 << 20
# A program that writes a zstd frame of 32 KiB, which expands to a gigabyte of zeros.
BOMB = "import zstandard,sys; sys.stdout.buffer.write(zstandard.compress(bytes(1<<30)))"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinkerDaemon]:
    """A server that accepts bodies of up to a mebibyte."""
    tinker = TinkerDaemon(
        tmp_path_factory.mktemp("hostile"),
        *("--max-message-bytes", str(MAX_BYTES)),
        *("--max-connections", "64"),
    )
    yield tinker
    tinker.stop()


def address(tinker: TinkerDaemon) -> tuple[str, int]:
    host, port = tinker.url.removeprefix("http://").split(":")
    return host, int(port)


def ask(
    tinker: TinkerDaemon,
    method: str,
    path: str,
    body: bytes = b"",
    headers: dict[str, str] = JSON,
    key: dict[str, str] = KEY,
) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(*address(tinker), timeout=20)
    try:
        connection.request(method, path, body, {**headers, **key})
        reply = connection.getresponse()
        text = reply.read()
        return reply.status, json.loads(text) if text else None
    finally:
        connection.close()


def is_alive(tinker: TinkerDaemon) -> bool:
    return ask(tinker, "GET", "/api/v1/healthz") == (200, {"status": "ok"})


@pytest.mark.parametrize(
    ("path", "body", "headers", "status"),
    [
        ("/api/v1/create_session", b"{", JSON, 400),
        (
            "/api/v1/create_session",
            b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
            JSON,
            400,
        ),
        ("/api/v1/create_model", b"{}", JSON, 400),
        ("/api/v1/create_model", b'{"session_id": 7}', JSON, 400),
        ("/api/v1/create_model", b'{"session_id": "x"}', JSON, 404),
        ("/api/v1/optim_step", b'{"model_id": "x", "seq_id": 1}', JSON, 404),
        ("/api/v1/optim_step", b'{"model_id": "x", "seq_id": 1e300}', JSON, 400),
        ("/api/v1/forward_backward", b"\xff" * 100, PROTOBUF, 400),
        ("/api/v1/forward_backward", b"{}", JSON, 400),
        ("/api/v1/forward_backward", b"no zstd", {**PROTOBUF, **ZSTD}, 400),
        ("/api/v1/retrieve_future", b'{"request_id": "none"}', JSON, 410),
        ("/api/v1/session_heartbeat", b'{"session_id": "none"}', JSON, 410),
        ("/api/v1/nothing", b"{}", JSON, 404),
        ("/api/v1/sessions/%zz/finish", b"{}", JSON, 400),
        ("/api/v2/create_session", b"{}", JSON, 404),
        ("/", b"", JSON, 404),
        (
            "/api/v1/weights_info",
            b'{"tinker_path": "tinker://a/weights/.."}',
            JSON,
            400,
        ),
    ],
)
def test_bad_requests_have_their_status(
    small: TinkerDaemon, path: str, body: bytes, headers: dict[str, str], status: int
) -> None:
    assert ask(small, "POST", path, body, headers)[0] == status
    assert is_alive(small)


def test_a_server_without_tokens_takes_any_key(small: TinkerDaemon) -> None:
    """Clients that patch the SDK send keys of other servers, and probes send none."""
    for key in ({}, {"X-API-Key": "sk-x"}, {"X-API-Key": "EMPTY_TOKEN"}):
        for path in ("healthz", "get_server_capabilities"):
            assert ask(small, "GET", f"/api/v1/{path}", key=key)[0] == 200


def test_the_path_of_openais_clients_says_who_serves_it(small: TinkerDaemon) -> None:
    status, reply = ask(small, "GET", "/oai/api/v1/models")
    assert status == 404 and "python -m weft openai --tinker" in reply["detail"]


@pytest.mark.parametrize(
    ("path", "key", "size", "status"),
    [
        ("asample", "tml-any", MAX_BYTES + 1, 413),
        ("create_session", "tml-any", (256 << 10) + 1, 413),
        ("nothing", "tml-any", MAX_BYTES, 404),
    ],
)
def test_a_header_is_refused_before_its_body_comes(
    small: TinkerDaemon, path: str, key: str, size: int, status: int
) -> None:
    header = (
        f"POST /api/v1/{path} HTTP/1.1\r\nHost: localhost\r\nX-API-Key: {key}\r\n"
        f"Content-Length: {size}\r\n\r\n"
    )
    with socket.create_connection(address(small), timeout=20) as peer:
        peer.sendall(header.encode())
        reply = peer.recv(4096)
        assert f" {status} ".encode() in reply and b"Connection: close" in reply
        # The server may have closed the connection, but the client sends its body.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            peer.sendall(bytes(size))
    assert is_alive(small)


def test_a_body_has_its_length(small: TinkerDaemon) -> None:
    with socket.create_connection(address(small), timeout=20) as peer:
        peer.sendall(
            b"POST /api/v1/asample HTTP/1.1\r\nHost: localhost\r\nX-API-Key: tml-a\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        assert b" 411 " in peer.recv(4096)


def test_methods_count(small: TinkerDaemon) -> None:
    assert ask(small, "GET", "/api/v1/create_session")[0] == 404


def test_urls_of_others_open_nothing(small: TinkerDaemon) -> None:
    for path in ("9999999999/a/b/adapter_config.json/00", "x/a/b/c/d", "1/../../c/d"):
        assert ask(small, "GET", f"/api/v1/files/{path}")[0] == 404


def test_a_small_body_does_not_become_a_large_one(small: TinkerDaemon) -> None:
    if not SDK.exists():
        pytest.skip("no zstandard: deploy/setup.sh --tests installs it")
    bomb = subprocess.run(
        [str(SDK), "-c", BOMB], check=True, capture_output=True
    ).stdout
    assert len(bomb) < MAX_BYTES
    before = small.server.peak_resident_bytes()
    headers = {**PROTOBUF, **ZSTD}
    assert ask(small, "POST", "/api/v1/forward_backward", bomb, headers)[0] == 413
    assert small.server.peak_resident_bytes() < before + (64 << 20)


def test_floods_of_headers_end_the_connection(small: TinkerDaemon) -> None:
    with socket.create_connection(address(small), timeout=20) as peer:
        peer.sendall(b"GET /api/v1/healthz HTTP/1.1\r\n")
        try:
            for number in range(20_000):
                peer.sendall(b"X-%d: y\r\n" % number)
        except (BrokenPipeError, ConnectionResetError):
            pass
        with contextlib.suppress(ConnectionResetError):
            assert b" 431 " in peer.recv(4096)
    assert is_alive(small)


@pytest.mark.parametrize(
    "text",
    [b"\x16\x03\x01\x02\x00", b"GET\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"],
)
def test_what_is_not_http_is_refused(small: TinkerDaemon, text: bytes) -> None:
    with socket.create_connection(address(small), timeout=20) as peer:
        peer.sendall(text + b"\r\n\r\n")
        try:
            reply = peer.recv(4096)
        except ConnectionResetError:
            reply = b""
    assert reply == b"" or b" 400 " in reply or b" 404 " in reply
    assert is_alive(small)


@pytest.mark.parametrize("sent", [b"", b"GET /api/v1/healthz HTTP/1.1\r\nHost: "])
def test_silent_clients_keep_nobody_out(small: TinkerDaemon, sent: bytes) -> None:
    held = []
    try:
        for _ in range(200):  # --max-connections is 64.
            held.append(socket.create_connection(address(small), timeout=20))
            held[-1].sendall(sent)
        assert is_alive(small)
    finally:
        for peer in held:
            peer.close()


@pytest.mark.parametrize(
    ("path", "key"),
    [
        ("/", {}),
        ("/console/v1/state", {}),
        ("/api/v1/checkpoints", KEY),
        ("/api/v1/healthz", KEY),
    ],
)
def test_pages_of_strangers_are_refused(
    small: TinkerDaemon, path: str, key: dict[str, str]
) -> None:
    """A stranger's name may resolve to this server, and a browser may send a
    request of a stranger's page to it."""
    evil = {"Host": "evil.example:8080"}
    assert ask(small, "GET", path, headers=evil, key=key)[0] == 421
    cross = {"Origin": "http://evil.example:8080"}
    assert ask(small, "GET", path, headers=cross, key=key)[0] == 403


def test_a_repeated_create_session_gets_the_same_session(small: TinkerDaemon) -> None:
    def session(key: str) -> Any:
        headers = {**JSON, "X-Idempotency-Key": key}
        return ask(small, "POST", "/api/v1/create_session", b"{}", headers)[1]

    assert session("one") == session("one") != session("two")


def test_a_client_that_hangs_up_harms_nobody(small: TinkerDaemon) -> None:
    with socket.create_connection(address(small), timeout=20) as peer:
        peer.sendall(
            b"POST /api/v1/create_session HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Length: 100\r\n\r\n{"
        )
    assert is_alive(small)
