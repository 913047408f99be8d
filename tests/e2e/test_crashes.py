"""kill -9 at random moments, under load and during recovery: what was answered is
there exactly once, and the adapters end with the bits of a run without kills.

WEFT_CRASHES is the number of kills; a fifth of them hit a server that recovers.
"""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import checkpoints
import daemon as daemon_module
import fixtures
import raw
from texts import random_tokens
from weft import methods
from weft._proto import adapters_pb2, training_pb2

VOCAB = 320
CLIENTS = 8
CRASHES = int(os.environ.get("WEFT_CRASHES", "20"))
# Products of so few rows have the same bits in every batch (src/ops/matmul.h):
# who shares a batch with whom, which differs from run to run, changes nothing.
FLAGS = ("--max-batch-tokens", "32", "--snapshot-log-bytes", "30000")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Server:
    """A daemon on a port that stays the same over its lives."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self.folder = folder
        self.flags = ("--listen", self.address, *FLAGS, *flags)

    def make(self) -> Any:
        model = fixtures.model_folder("llama-tied")
        return daemon_module.Daemon(model, self.folder, *self.flags)


class Client:
    """One adapter: numbered steps, each repeated until it is answered."""

    def __init__(self, address: str, index: int) -> None:
        self.address = address
        self.index = index
        self.adapter = f"a{index}"
        self.step = 0
        self.replies: list[Any] = []

    def call(self, method: Any, request: Any) -> Any:
        while True:
            with raw.Raw(self.address) as channel:
                outcome = channel.call(method, request, timeout=30)
            if outcome.code == "OK":
                return outcome.reply
            assert outcome.code in ("UNAVAILABLE", "CANCELLED"), outcome
            time.sleep(0.05)

    def create(self) -> None:
        config = adapters_pb2.LoraConfig(rank=2 + self.index, seed=self.index)
        request = adapters_pb2.CreateAdapterRequest(
            adapter_id=self.adapter, config=config
        )
        self.call(methods.CREATE_ADAPTER, request)

    def round(self) -> None:
        """Two gradients and a step of the optimizer."""
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
    return counts, {p.name: p.read_bytes() for p in sorted(folder.glob("*.safetensors"))}


def crash_and_restart(server: Server, living: Any, rng: random.Random) -> Any:
    """Kills it, and now and then the next one, too, while that one recovers."""
    living.kill()
    kills = 1
    while rng.random() < 0.2:
        starting = server.make()
        starting.launch()
        time.sleep(rng.uniform(0, 0.15))
        starting.kill()
        kills += 1
    living = server.make()
    living.start()
    return living, kills


def test_nothing_acknowledged_is_lost_or_done_twice(tmp_path: Path) -> None:
    rng = random.Random(7)
    server = Server(tmp_path / "crashing", "--state-dir", str(tmp_path / "state"))
    living = server.make()
    living.start()
    clients = [Client(server.address, i) for i in range(CLIENTS)]
    done = threading.Event()
    rounds = [0] * CLIENTS

    def run(client: Client) -> None:
        client.create()
        while not done.is_set():
            client.round()
            rounds[client.index] += 1

    kills = 0
    try:
        with ThreadPoolExecutor(CLIENTS) as pool:
            futures = [pool.submit(run, client) for client in clients]
            try:
                while kills < CRASHES and not any(f.done() for f in futures):
                    time.sleep(rng.uniform(0.05, 0.5))
                    living, more = crash_and_restart(server, living, rng)
                    kills += more
            finally:
                done.set()
            for future in futures:
                future.result(120)
        ends = [end_state(living, client) for client in clients]
    finally:
        living.kill()
    assert kills >= CRASHES and min(rounds) > 0

    calm = Server(tmp_path / "calm")
    living = calm.make()
    living.start()
    try:
        for client, (counts, files), count in zip(clients, ends, rounds, strict=True):
            assert counts[:2] == (3 * count, count)
            alone = Client(calm.address, client.index)
            alone.create()
            for _ in range(count):
                alone.round()
            assert [str(r) for r in alone.replies] == [str(r) for r in client.replies]
            assert end_state(living, alone) == (counts, files)
    finally:
        living.kill()
