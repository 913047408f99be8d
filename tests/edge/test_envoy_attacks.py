"""Callers behind the Envoy of deploy/k8s/components/replicas: none of them ends weftd
or the calls of others."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import daemon as daemon_module
import frames
import numpy as np
import pytest
from callers import open_calls
from frames import ATTACKS, CHECK, Stranger
from models import tiny_model
from test_envoy import Proxied

import weft

LARGE_TOKENS = 7_500_000  # 4 bytes each, and twice: a message a bit below 64 MiB.


@pytest.fixture(scope="module")
def proxied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxied]:
    folder = tmp_path_factory.mktemp("envoy")
    with daemon_module.running(tiny_model("llama-tied"), folder / "weftd") as weftd:
        proxy = Proxied(folder, [weftd.address] * 2)
        with proxy.running():
            yield proxy


def attack(proxied: Proxied, headers: bytes, seconds: float = 0.1) -> None:
    host, _, port = proxied.target.rpartition(":")
    with Stranger(socket.create_connection((host, int(port)), timeout=20)) as other:
        other.request(1, headers)
        other.frames(seconds)


def test_headers_that_end_gRPC_end_nothing(proxied: Proxied) -> None:
    with (
        weft.Client(proxied.target, retry=weft.NO_RETRY) as bob,
        open_calls(bob, proxied.target, weft.Security()) as ended,
    ):
        for shape, more in ATTACKS.items():
            for path in (CHECK, "/weft.v1.TrainingService/ForwardBackward"):
                for _ in range(3):
                    attack(proxied, frames.block(path, None, more))
            assert not ended(), shape
            assert bob.info().model.name, shape


def test_headers_of_binary_values_are_removed(proxied: Proxied) -> None:
    """weftd answers such a call, so the value that is no base64 did not reach it."""
    headers = frames.block(CHECK, None, [("x-evil-bin", "!!!")])
    host, _, port = proxied.target.rpartition(":")
    with Stranger(socket.create_connection((host, int(port)), timeout=20)) as other:
        other.request(1, headers)
        bodies = [body for kind, _, body in other.frames(1) if kind == frames.DATA]
    assert bodies and bodies[0].endswith(b"\x08\x01")  # SERVING


def test_streams_that_are_reset_at_once_delay_nobody(proxied: Proxied) -> None:
    headers = frames.block("/weft.v1.ServerService/GetInfo", None)
    host, _, port = proxied.target.rpartition(":")
    with (
        weft.Client(proxied.target, retry=weft.NO_RETRY) as bob,
        open_calls(bob, proxied.target, weft.Security()),
        Stranger(socket.create_connection((host, int(port)))) as other,
    ):
        other.reset_streams(headers, seconds=1)
        start = time.monotonic()
        assert bob.info().model.name
        assert time.monotonic() - start < 5


def test_a_message_of_almost_64_MiB_passes(proxied: Proxied) -> None:
    """Flow-control windows of 256 KiB and 1 MiB carry it in seconds."""
    with weft.Client(proxied.target, retry=weft.NO_RETRY, timeout=60) as client:
        adapter = client.create_adapter("large", rank=1)
        tokens = np.full(LARGE_TOKENS, 3)
        start = time.monotonic()
        with pytest.raises(weft.InvalidArgument, match="token"):
            adapter.forward_backward([weft.Datum(tokens, tokens)])
        assert time.monotonic() - start < 30
        adapter.delete()
