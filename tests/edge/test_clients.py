"""Weft's own clients through the edge."""

from __future__ import annotations

import asyncio
import subprocess
import threading
import time
from pathlib import Path

import grpc
import numpy as np
import pytest
from callers import step
from edge_server import WEFTCTL, Edge, wait_until

import weft
from weft import methods

# 4 bytes each, and twice: a message a bit below 64 MiB.
LARGE_TOKENS = 8_000_000
# No other timeout of nginx.conf ends a call. The test of a long call scales them.
SCALE = 30


def weftctl(edge: Edge, token: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(WEFTCTL), *words],
        env=edge.environment(token),
        text=True,
        capture_output=True,
        timeout=60,
    )


def use(client: weft.Client, adapter_id: str, folder: Path) -> None:
    """Makes calls of every kind: single, streamed replies, streamed requests."""
    adapter = client.create_adapter(adapter_id, rank=2)
    adapter.forward_backward([weft.Datum.next_token([5, 6, 7])])
    adapter.optim_step(learning_rate=1e-3)
    assert list(adapter.sample_stream([5], max_tokens=3, ignore_eos=True))
    adapter.export(folder / adapter_id)
    client.import_adapter(f"{adapter_id}-copy", folder / adapter_id)
    for name in (adapter_id, f"{adapter_id}-copy"):
        client.adapter(name).delete()


def test_the_clients_of_weft_do_their_work(edge: Edge, tmp_path: Path) -> None:
    with edge.client(edge.alice) as client:
        use(client, "sync", tmp_path)

    async def work() -> int:
        security = edge.security(edge.alice)
        async with weft.AsyncClient(edge.target, security=security) as client:
            adapter = await client.create_adapter("async", rank=2)
            done = await adapter.forward_backward([weft.Datum.next_token([5, 6, 7])])
            await adapter.delete()
            return len(done.results)

    assert asyncio.run(work()) == 1
    # weftctl makes these calls with the C++ client.
    made = weftctl(edge, edge.alice, "adapters", "create", "cc", "--rank", "2")
    assert made.returncode == 0, made.stderr
    listed = weftctl(edge, edge.alice, "adapters", "list")
    assert listed.returncode == 0 and "cc" in listed.stdout, listed.stderr
    assert weftctl(edge, edge.alice, "adapters", "delete", "cc").returncode == 0


def test_who_has_no_valid_token_is_told_so(edge: Edge) -> None:
    for token in (None, "weft_wrong"):
        with edge.client(token) as client, pytest.raises(weft.Unauthenticated) as told:
            client.info()
        assert "a valid token is required" in str(told.value)
    refused = weftctl(edge, "weft_wrong", "info")
    assert refused.returncode != 0 and "a valid token is required" in refused.stderr
    # A stream learns it too.
    with edge.client(None) as client, pytest.raises(weft.Unauthenticated):
        list(client.sample_stream([5], max_tokens=3))


def test_an_unknown_method_is_unimplemented(edge: Edge) -> None:
    security = edge.security(edge.alice)
    credentials = grpc.ssl_channel_credentials(security.root_certificates)
    with grpc.secure_channel(edge.target, credentials) as channel:
        for path in ("/weft.v1.NoService/No", "/other.Service/No"):
            call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(path)
            with pytest.raises(grpc.RpcError) as told:
                call(b"", metadata=security.metadata(), timeout=10)
            assert told.value.code() == grpc.StatusCode.UNIMPLEMENTED


def test_the_log_of_weftd_has_the_callers_address(edge: Edge) -> None:
    """A client's own x-real-ip is replaced."""
    with grpc.secure_channel(
        edge.target, grpc.ssl_channel_credentials(edge.ca.read_bytes())
    ) as channel:
        metadata = (("authorization", f"Bearer {edge.alice}"), ("x-real-ip", "6.6.6.6"))
        call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(
            "/weft.v1.ServerService/Drain"
        )
        with pytest.raises(grpc.RpcError) as told:
            call(b"", metadata=metadata, timeout=10)
    assert told.value.code() == grpc.StatusCode.PERMISSION_DENIED
    lines: list[str] = []

    def is_logged() -> bool:  # A thread of weftd writes the log.
        lines[:] = [x for x in edge.daemon.log_tail().splitlines() if "Drain" in x]
        return bool(lines)

    wait_until(is_logged, edge.daemon.log_tail)
    assert "127.0.0.1" in lines[-1] and "6.6.6.6" not in lines[-1], lines


def test_a_message_of_almost_64_MiB_passes(edge: Edge) -> None:
    tokens = np.full(LARGE_TOKENS, 3)
    with edge.client(edge.alice) as client:
        adapter = client.create_adapter("large", rank=1)
        with pytest.raises(weft.InvalidArgument, match="token"):
            adapter.forward_backward([weft.Datum(tokens, tokens)])
        # A larger one is refused by weftd, in gRPC's words.
        with pytest.raises(weft.WeftError, match="larger than max"):
            adapter.forward_backward([weft.Datum(tokens, tokens)] * 2)
        adapter.delete()


def waiting(edge: Edge) -> float:
    for line in edge.daemon.scrape().splitlines():
        if line.startswith("weft_requests_inflight "):
            return float(line.split()[1])
    raise AssertionError("no weft_requests_inflight")


def test_a_cancelled_call_is_cancelled_in_weftd(edge: Edge) -> None:
    security = edge.security(edge.alice)
    with (
        edge.client(edge.alice) as client,
        grpc.secure_channel(
            edge.target, grpc.ssl_channel_credentials(security.root_certificates)
        ) as channel,
    ):
        client.create_adapter("open", rank=1)
        call = methods.FORWARD_BACKWARD.bind(channel).future(
            step(2), timeout=60, metadata=security.metadata()
        )
        wait_until(lambda: waiting(edge) == 1, edge.daemon.log_tail, 10)
        call.cancel()
        wait_until(lambda: waiting(edge) == 0, edge.daemon.log_tail, 10)
        client.adapter("open").delete()


def test_a_call_outlives_every_timeout_between_two_pieces(tmp_path: Path) -> None:
    """With timeouts that are 30 times shorter a call waits longer than each of them,
    and a stream of many pieces passes."""
    with Edge(tmp_path, scale=SCALE).running() as hasty, hasty.client(hasty.bob) as bob:
        adapter = bob.create_adapter("open", rank=1)
        security = hasty.security(hasty.bob)
        credentials = grpc.ssl_channel_credentials(security.root_certificates)
        with grpc.secure_channel(hasty.target, credentials) as channel:
            forward = methods.FORWARD_BACKWARD.bind(channel)
            call = forward.future(step(2), timeout=60, metadata=security.metadata())
            time.sleep(60 / SCALE + 1)
            assert not call.done()
            forward(step(1), timeout=60, metadata=security.metadata())
            assert call.result()
        stream = adapter.sample_stream([5], max_tokens=64, ignore_eos=True)
        assert len(list(stream)) > 1


def test_a_drain_lets_accepted_calls_end(tmp_path: Path) -> None:
    with Edge(tmp_path).running() as edge, edge.client(edge.bob) as bob:
        adapter = bob.create_adapter("open", rank=1)
        got: list[int] = []

        def sample() -> None:
            stream = adapter.sample_stream([5], max_tokens=400, ignore_eos=True)
            got.extend(len(piece.tokens) for piece in stream)

        worker = threading.Thread(target=sample)
        worker.start()
        wait_until(lambda: bool(got), edge.log, 20)
        edge.daemon.terminate()
        worker.join(60)
        assert sum(got) >= 400
        assert edge.daemon.wait() == 0
        with pytest.raises(weft.Unavailable, match="weftd does not answer"):
            bob.info()


def test_a_client_shows_a_certificate_under_mutual_tls(tmp_path: Path) -> None:
    edge = Edge(tmp_path, mtls=True)
    edge.make_certificate("localhost", "127.0.0.1")
    edge.make_certificate("--client", "laptop")
    with edge.running():
        pair = {
            "certificate": (tmp_path / "clients" / "laptop.crt").read_bytes(),
            "private_key": (tmp_path / "clients" / "laptop.key").read_bytes(),
        }
        shown = edge.security(edge.alice, **pair)
        with weft.Client(edge.target, security=shown) as client:
            assert client.info().model.name
        with (
            edge.client(edge.alice, timeout=5) as client,
            pytest.raises(weft.WeftError),
        ):
            client.info()
    assert '"client":"CN=laptop"' in edge.log()
