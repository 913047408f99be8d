"""Tests what a client says while it waits, and how soon it gives up a server that it
never reached."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path

import grpc
import pytest
from certificates import make_authority, make_identity
from conftest import CLIENT, Logs, closed_port
from fake_weftd import FakeWeftd
from small_server import SmallServer

import weft
from weft.contact import Contact

Code = grpc.StatusCode
SECONDS = 3.0  # Within which a client gives up.


def answer_as_nginx(edge: socket.socket) -> None:
    """Answers plaintext as nginx's TLS port does, until the socket is closed."""
    with contextlib.suppress(OSError):
        while True:
            connection, _ = edge.accept()
            with connection:
                connection.recv(1)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


def refusal(target: str, security: weft.Security | None = None) -> str:
    """Returns the message with which the first call fails, in time."""
    begin = time.monotonic()
    with (
        weft.Client(target, security=security) as client,
        pytest.raises(weft.Unavailable) as caught,
    ):
        client.info()
    assert time.monotonic() - begin < SECONDS
    return str(caught.value)


def test_a_server_that_is_not_there_is_given_up_soon(caplog: Logs) -> None:
    with closed_port() as target:
        assert f"no connection to {target}: is weftd running there?" in refusal(target)
    (line,) = caplog.messages
    assert line.startswith(f"GetInfo waits for the server {target} since 0 s (UNAVAIL")
    assert line.endswith("and goes on for 3 s at most")


def test_so_does_an_asyncio_client() -> None:
    async def run(target: str) -> None:
        begin = time.monotonic()
        async with weft.AsyncClient(target) as client:
            with pytest.raises(weft.Unavailable, match="is weftd running there"):
                await client.get_or_create("a")
        assert time.monotonic() - begin < SECONDS

    with closed_port() as target:
        asyncio.run(run(target))


def test_a_host_that_accepts_and_is_silent_is_given_up_soon() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        target = f"127.0.0.1:{silent.getsockname()[1]}"
        assert "is weftd running there?" in refusal(target)


def test_errors_of_tls_are_told_at_once(tmp_path: Path) -> None:
    ca, other = (make_authority(tmp_path, name) for name in ("ca", "other"))
    pair = make_identity(tmp_path, "server", ca)
    key, chain = pair.key.read_bytes(), pair.certificate.read_bytes()
    trusted, wrong = (one.certificate.read_bytes() for one in (ca, other))
    with (
        SmallServer(credentials=grpc.ssl_server_credentials([(key, chain)])) as tls,
        SmallServer() as plain,
    ):
        begin = time.monotonic()
        for target, security, words in (
            (tls.target, weft.Security(root_certificates=wrong), "give its authority"),
            (tls.target, weft.Security(tls=True), "root_certificates, WEFT_CA"),
            (
                tls.target,
                weft.Security(root_certificates=trusted, server_name="elsewhere"),
                "give one of its names",
            ),
            (plain.target, weft.Security(tls=True), "the server speaks no TLS"),
        ):
            assert words in refusal(target, security)
        assert time.monotonic() - begin < 1.0
        assert "If it speaks TLS, so must the client" in refusal(tls.target)
    with socket.create_server(("127.0.0.1", 0)) as edge:
        target = f"127.0.0.1:{edge.getsockname()[1]}"
        threading.Thread(target=answer_as_nginx, args=(edge,), daemon=True).start()
        assert "so must the client (WEFT_TLS=1, WEFT_CA)" in refusal(target)
    with pytest.raises(weft.InvalidArgument, match="no certificate in PEM"):
        weft.Client(tls.target, security=weft.Security(root_certificates=b"ca.pem"))


def test_a_server_that_was_there_is_waited_for(server: FakeWeftd, caplog: Logs) -> None:
    with weft.Client(server.target) as client:
        adapter = client.create_adapter("a", rank=2)
        for _ in range(2):
            server.lose_reply("OptimStep")
            adapter.optim_step()
    # The second wait comes within 10 seconds of the first line.
    (line,) = caplog.messages
    assert line.startswith("OptimStep waits for the server")
    assert "the reply was lost" in line


def test_a_full_server_is_worth_a_line_only_after_long(caplog: Logs) -> None:
    contact = Contact("host:1")
    contact.made()
    full, now = weft.ResourceExhausted("queue full"), time.monotonic()
    contact.say("Sample", full, now - 9.0, 100.0)
    assert not caplog.messages
    contact.say("Sample", full, now - 11.0, 100.0)
    assert caplog.messages == [
        "Sample waits for the server host:1 since 11 s (RESOURCE_EXHAUSTED: queue "
        "full), and goes on for 100 s at most"
    ]
    assert caplog.records[0].levelno == logging.WARNING


def test_an_errors_traceback_is_short(server: FakeWeftd) -> None:
    with weft.Client(server.target) as client:
        adapter = client.create_adapter("a", rank=2)
        with pytest.raises(weft.InvalidArgument) as caught:
            adapter.sample([500])
        frames = [f.name for f in traceback.extract_tb(caught.value.__traceback__)]
        assert frames == ["test_an_errors_traceback_is_short", "sample", "run"]

    async def run() -> None:
        async with weft.AsyncClient(server.target) as client:
            await client.sample([500])

    with pytest.raises(weft.InvalidArgument) as caught:
        asyncio.run(run())
    frames = [f.name for f in traceback.extract_tb(caught.value.__traceback__)]
    assert frames[-4:] == ["run", "sample", "run", "_drive"]


def test_a_program_ends_that_did_not_close_its_client() -> None:
    """gRPC would wait forever for a thread that watches the channel."""
    with closed_port() as target:
        program = f"import weft; weft.Client({target!r}).info()"
        done = subprocess.run(
            [sys.executable, "-c", program],
            cwd=CLIENT,
            capture_output=True,
            text=True,
            timeout=30,
        )
    assert done.returncode == 1
    assert "GetInfo waits for the server" in done.stderr
    assert done.stderr.rstrip().splitlines()[-1].startswith("weft.errors.Unavailable")
