"""Tests that requests which one tenant never ends do not end calls of another."""

from __future__ import annotations

import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import daemon as daemon_module
import pytest
from models import tiny_model
from raw import Raw
from token_file import Tokens

sys.path.append(str(Path(__file__).resolve().parents[1] / "edge"))

from frames import DATA, END_HEADERS, HEADERS, WINDOW, Stranger, block, frame

LARGEST = 1 << 20  # Bytes of a message. gRPC keeps 32 of these for all clients.
STREAMS = 90


class Unfinished(Stranger):
    """Sends all of many requests but the last bytes, as fast as the server lets it."""

    def __init__(self, address: str, path: str, token: str) -> None:
        host, port = address.rsplit(":", 1)
        super().__init__(socket.create_connection((host, int(port)), timeout=10))
        self.windows = {0: 65535}
        self.left: dict[int, bytes] = {}
        head = b"\0" + LARGEST.to_bytes(4, "big")
        for stream in range(1, 2 * STREAMS, 2):
            self.send(frame(HEADERS, END_HEADERS, stream, block(path, token)))
            self.windows[stream] = 65535
            self.left[stream] = head + bytes(LARGEST - 100)

    def push(self, seconds: float) -> int:
        """Returns how many bytes the server has taken."""
        taken, limit = 0, time.monotonic() + seconds
        while time.monotonic() < limit:
            for stream, left in self.left.items():
                room = min(self.windows[0], self.windows[stream], 16384, len(left))
                if room > 0:
                    self.send(frame(DATA, 0, stream, left[:room]))
                    self.left[stream] = left[room:]
                    self.windows[0] -= room
                    self.windows[stream] -= room
                    taken += room
            for kind, stream, payload in self.frames(0.01):
                if kind == WINDOW and stream in self.windows:
                    self.windows[stream] += int.from_bytes(payload, "big")
        return taken


@pytest.mark.parametrize(
    "path", ["/weft.v1.TrainingService/ForwardBackward", "/grpc.health.v1.Health/Check"]
)
def test_requests_without_an_end_do_not_end_calls_of_others(
    tmp_path: Path, path: str
) -> None:
    tokens = Tokens(tmp_path / "tokens")
    alice = tokens.add("alice", "alice", "train")
    bob = tokens.add("bob", "bob", "train")
    flags = ["--auth-tokens-file", str(tokens.path)]
    flags += ["--max-message-bytes", str(LARGEST)]
    with (
        daemon_module.running(tiny_model("llama-tied"), tmp_path, *flags) as daemon,
        Raw(daemon.address, bob) as raw,
        ThreadPoolExecutor(1) as pool,
    ):
        assert raw.create("a", rank=4).code == "OK"
        waiting = pool.submit(raw.optim_step, "a", step=2)
        daemon.wait_for_metric("weft_queue_depth", 'kind="optim"', 1)
        unfinished = Unfinished(daemon.address, path, alice)
        with unfinished:
            taken = unfinished.push(seconds=4)
            assert taken < 16 * LARGEST
            assert not waiting.done()
            assert raw.optim_step("a", step=1).code == "OK"
            assert waiting.result(60).code == "OK"
