"""Kills the server (kill -9) under load and during recovery. Everything that was
answered is there exactly once, and the adapters end with the bits of a run without
kills.

About half of the processes end at a random file operation (support/failpoints.h),
the others at a random moment. The test makes at least WEFT_CRASHES kills, at least a
quarter of that number during recovery. It fails after MOST_KILLS kills, or if a call
is not answered within CALL_SECONDS, so it always ends.
"""

from __future__ import annotations

import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import checkpoints
import daemon as daemon_module
import models
import pytest
import raw
from texts import random_tokens

from weft import methods
from weft._proto import adapters_pb2, training_pb2

VOCAB = 320
CLIENTS = 8
CRASHES = int(os.environ.get("WEFT_CRASHES", "20"))
MOST_KILLS = 4 * CRASHES + 20
# A call is repeated for this long, because kills may interrupt it several times.
CALL_SECONDS = 120.0
FAILPOINTS = daemon_module.BUILD_DIR / "tests" / "support" / "libweft_failpoints.so"
# Small batches, so that kills fall between the batches of a request.
FLAGS = ("--max-batch-tokens", "32", "--snapshot-log-bytes", "30000")


class Server:
    """A daemon whose port stays the same over its restarts."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.address = f"127.0.0.1:{daemon_module.free_port()}"
        self.folder = folder
        self.flags = ("--listen", self.address, *FLAGS, *flags)
        self.kills = 0
        self.deaths = {"failpoint": 0, "recovery": 0, "moment": 0}
        self.daemon: Any = None
        self.log_start = 0

    def launch(self, **environment: str) -> None:
        model = models.tiny_model("llama-tied")
        self.daemon = daemon_module.Daemon(model, self.folder, *self.flags)
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            log = self.daemon.log_path
            self.log_start = log.stat().st_size if log.exists() else 0
            self.daemon.launch()

    def has_logged(self, message: str) -> bool:
        """Returns whether the latest process has logged the message."""
        text = self.daemon.log_path.read_bytes()[self.log_start :]
        return f'"{message}"'.encode() in text

    def wait_for_recovery(self) -> None:
        limit = time.monotonic() + 30
        while not self.has_logged("model loaded"):
            assert time.monotonic() < limit, self.daemon.log_tail()
            time.sleep(0.005)

    def start(self) -> None:
        self.launch()
        self.daemon.wait_until_serving()

    def live_and_die(self, rng: random.Random) -> None:
        """Runs one process until it is killed."""
        choice = rng.random()
        how = "moment"
        if choice < 0.55:
            self.launch(
                LD_PRELOAD=str(FAILPOINTS),
                WEFT_FAILPOINTS=f"*=kill@{rng.choice((0.002, 0.01, 0.05))}",
                WEFT_FAILPOINTS_SEED=str(rng.randrange(1 << 30)),
            )
            if self.daemon.ends_within(rng.uniform(0.5, 3)):
                how = "failpoint"
        elif choice < 0.65 or 4 * self.deaths["recovery"] < self.kills:
            # Slow reads make recovery so long that the kill comes within it.
            self.launch(
                LD_PRELOAD=str(FAILPOINTS), WEFT_FAILPOINTS="files.read=sleep(2)"
            )
            self.wait_for_recovery()
            time.sleep(rng.uniform(0, 0.2))
        else:
            self.start()
            # Waits for the end of the replay, because the log is cut only after it.
            self.daemon.wait_until_restored()
            time.sleep(rng.uniform(0.05, 0.5))
        self.daemon.kill()
        if self.has_logged("model loaded") and not self.has_logged("state recovered"):
            how = "recovery"
        self.deaths[how] += 1
        self.kills += 1

    @property
    def has_died_enough(self) -> bool:
        return self.kills >= CRASHES and self.deaths["recovery"] >= CRASHES // 4


class Client:
    """Trains one adapter by numbered steps, and repeats each until it is answered."""

    def __init__(self, address: str, index: int) -> None:
        self.address = address
        self.index = index
        self.adapter = f"a{index}"
        self.step = 0
        self.replies: list[Any] = []

    def call(self, method: Any, request: Any) -> Any:
        limit = time.monotonic() + CALL_SECONDS
        while True:
            with raw.Raw(self.address) as channel:
                outcome = channel.call(method, request, timeout=30)
            if outcome.code == "OK":
                return outcome.reply
            assert outcome.code in ("UNAVAILABLE", "CANCELLED"), outcome
            assert time.monotonic() < limit, outcome
            time.sleep(0.05)

    def create(self) -> None:
        config = adapters_pb2.LoraConfig(rank=2 + self.index, seed=self.index)
        request = adapters_pb2.CreateAdapterRequest(
            adapter_id=self.adapter, config=config
        )
        self.call(methods.CREATE_ADAPTER, request)

    def round(self) -> None:
        """Sends two gradients and an optimizer step."""
        for part in range(2):
            self.step += 1
            seed = 1000 * self.index + 10 * self.step + part
            tokens = random_tokens(VOCAB, 9 + self.index % 3, seed)
            request = training_pb2.ForwardBackwardRequest(
                adapter_id=self.adapter,
                step=self.step,
                data=[training_pb2.Datum(tokens=tokens[:-1], targets=tokens[1:])],
                loss={"function": 1},
            )
            self.replies.append(self.call(methods.FORWARD_BACKWARD, request))
        self.step += 1
        optim = training_pb2.OptimStepRequest(
            adapter_id=self.adapter, step=self.step, adamw={"learning_rate": 1e-2}
        )
        self.replies.append(self.call(methods.OPTIM_STEP, optim))


def end_state(server: Any, client: Client) -> tuple[Any, dict[str, bytes]]:
    get = adapters_pb2.GetAdapterRequest(adapter_id=client.adapter)
    adapter = client.call(methods.GET_ADAPTER, get).adapter
    counts = (adapter.last_step, adapter.optim_steps, adapter.version)
    save = adapters_pb2.SaveCheckpointRequest(adapter_id=client.adapter, name="end")
    client.call(methods.SAVE_CHECKPOINT, save)
    folder = checkpoints.folder(server, client.adapter, "end")
    return counts, {
        p.name: p.read_bytes() for p in sorted(folder.glob("*.safetensors"))
    }


def test_nothing_acknowledged_is_lost_or_done_twice(tmp_path: Path) -> None:
    assert FAILPOINTS.exists()  # The loader ignores a library that is missing.
    rng = random.Random(7)
    server = Server(tmp_path / "crashing", "--state-dir", str(tmp_path / "state"))
    clients = [Client(server.address, i) for i in range(CLIENTS)]
    done = threading.Event()
    rounds = [0] * CLIENTS

    def run(client: Client) -> None:
        client.create()
        while not done.is_set():
            client.round()
            rounds[client.index] += 1

    try:
        with ThreadPoolExecutor(CLIENTS) as pool:
            futures = [pool.submit(run, client) for client in clients]
            try:
                while not (server.has_died_enough or any(f.done() for f in futures)):
                    assert server.kills < MOST_KILLS, server.deaths
                    server.live_and_die(rng)
                server.start()
            finally:
                done.set()
            for future in futures:
                future.result(120)
        ends = [end_state(server.daemon, client) for client in clients]
    finally:
        server.daemon.kill()
    print(f"{server.kills} kills: {server.deaths}; rounds of each client: {rounds}")
    assert min(rounds) > 0

    calm = Server(tmp_path / "calm")
    calm.start()
    with calm.daemon:
        for client, (counts, files), count in zip(clients, ends, rounds, strict=True):
            assert counts[:2] == (3 * count, count)
            alone = Client(calm.address, client.index)
            alone.create()
            for _ in range(count):
                alone.round()
            assert [str(r) for r in alone.replies] == [str(r) for r in client.replies]
            assert end_state(calm.daemon, alone) == (counts, files)
