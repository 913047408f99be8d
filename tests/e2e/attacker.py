"""A tenant that attacks weftd: its connections, and what it holds open."""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import random
import socket
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("tests/edge", "tests/oracle", "client/python")
sys.path[:0] = [str(ROOT / folder) for folder in FOLDERS]

import frames  # noqa: E402
import grpc  # noqa: E402
from frames import SETTINGS, Stranger  # noqa: E402
from raw import Outcome, Raw, datum  # noqa: E402

VOCAB = 40_000
HELD = 24  # Calls, streams and connections that a thread leaves half done.
THREADS = 2
NUM_THREADS = 3 * THREADS  # Of all attackers.
# These codes would show a defect of the server.
DEFECTS = ("INTERNAL", "UNKNOWN", "DATA_LOSS")


@dataclass(frozen=True)
class Target:
    """The servers, the attacker's token, and the seed."""

    grpc: str
    tinker: str
    openai: str
    metrics: str
    model_name: str
    token: str
    seed: int


class Attacker:
    """One thread of a tenant. What it holds open is closed when it holds too much."""

    def __init__(self, target: Target, thread: int) -> None:
        self.target = target
        self.number = THREADS * target.seed + thread
        self.rng = random.Random(1000 * target.seed + thread)
        self.raw = Raw(target.grpc, target.token)
        self.adapter = f"evil-{thread}"
        self.counts: Counter[str] = Counter()
        self.defects: list[str] = []
        self._held: deque[Callable[[], Any]] = deque()
        self._most_held = HELD
        self.metadata = [("authorization", f"Bearer {target.token}")]
        self._channel = grpc.insecure_channel(target.grpc)

    def run_or_tell(self, stop: threading.Event) -> None:
        """Like run, but makes an error of the attacker itself a defect."""
        try:
            self.run(stop)
        except Exception as error:
            self.defects.append(f"the attacker ends: {error!r}")

    def run(self, stop: threading.Event) -> None:
        """Draws all kinds in a random order, again and again. The first order is the
        same for all, but each begins elsewhere, and stops only after its part, so that
        together they have all kinds."""
        order = random.Random(0).sample(KINDS, len(KINDS))
        begin = len(KINDS) * self.number // NUM_THREADS
        order = order[begin:] + order[:begin]
        while True:
            self.check(self.raw.create(self.adapter, rank=1))
            for attack in order:
                if stop.is_set() and self.has_done_its_part:
                    return
                # The server may refuse a call, or end its connection.
                with contextlib.suppress(OSError, http.client.HTTPException):
                    attack(self)
                self.counts[attack.__name__] += 1
            order = self.rng.sample(KINDS, len(KINDS))

    @property
    def has_done_its_part(self) -> bool:
        return self.counts.total() >= math.ceil(len(KINDS) / NUM_THREADS)

    def check(self, *outcomes: Outcome) -> None:
        for outcome in outcomes:
            if outcome.code in DEFECTS and "Stream removed" not in outcome.message:
                self.defects.append(f"{outcome.code}: {outcome.message}")

    def hold(self, close: Callable[[], Any]) -> None:
        self._held.append(close)
        self._close_all_but(self._most_held)

    def release(self) -> None:
        """Holds nothing from now on. A tenant's requests wait for those that it has
        sent in part, so what one thread holds would slow the last kinds of another.
        Threads: any."""
        self._most_held = 0
        self._close_all_but(0)

    def _close_all_but(self, number: int) -> None:
        while len(self._held) > number:
            with contextlib.suppress(IndexError):  # Another thread closed the last.
                self._held.popleft()()

    def tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(3, VOCAB) for _ in range(count)]

    def data(self, sequences: int, length: int) -> list[Any]:
        return [datum(self.tokens(length)) for _ in range(sequences)]

    def bytes_of(self, path: str, body: bytes, timeout: float = 3.0) -> None:
        """Sends a request that is already serialized."""
        bound: Any = self._channel.unary_unary(path)
        try:
            bound(body, timeout=timeout, metadata=self.metadata)
        except grpc.RpcError as error:
            self.check(Outcome(error.code().name, error.details() or ""))

    def stream(self, method: Any, request: Any, timeout: float | None = None) -> Any:
        bound = method.bind(self._channel)
        return bound(request, timeout=timeout, metadata=self.metadata)

    def leave(self, method: Any, request: Any, timeout: float) -> None:
        """Begins a call that nobody waits for."""
        bound = method.bind(self._channel)
        call = bound.future(request, timeout=timeout, metadata=self.metadata)
        self.hold(call.cancel)

    def connect(self, address: str) -> socket.socket:
        host, port = address.rsplit(":", 1)
        return socket.create_connection((host, int(port)), timeout=5)

    def silent(self, address: str, text: bytes) -> None:
        """Leaves a connection open after a piece of a request."""
        sock = self.connect(address)
        self.hold(sock.close)
        sock.sendall(text)

    def stranger(self, *settings: tuple[int, int]) -> Stranger:
        stranger = Stranger(self.connect(self.target.grpc))
        pairs = [k.to_bytes(2, "big") + v.to_bytes(4, "big") for k, v in settings]
        stranger.send(frames.frame(SETTINGS, 0, 0, b"".join(pairs)))
        return stranger

    def ask(
        self,
        path: str,
        body: Any = b"",
        method: str = "POST",
        address: str = "",
        timeout: float = 5.0,
        **headers: str,
    ) -> tuple[int, Any]:
        """Sends a request over HTTP, to the Tinker port if there is no address."""
        host = address or self.target.tinker
        text = body if isinstance(body, bytes) else json.dumps(body).encode()
        key = "tml-" + self.target.token
        given = {"Content-Type": "application/json", "X-API-Key": key}
        given |= {name.replace("_", "-"): value for name, value in headers.items()}
        connection = http.client.HTTPConnection(host, timeout=timeout)
        with contextlib.closing(connection):
            connection.request(method, path, text if body else None, given)
            reply = connection.getresponse()
            read = reply.read()
            if reply.status == 500:
                self.defects.append(f"{path}: {read[:200]!r}")
            with contextlib.suppress(ValueError):
                return reply.status, json.loads(read)
            return reply.status, read


KINDS: list[Callable[[Attacker], None]] = []


def kind(attack: Callable[[Attacker], None]) -> Callable[[Attacker], None]:
    KINDS.append(attack)
    return attack
