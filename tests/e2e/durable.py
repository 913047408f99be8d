"""A daemon that tests kill and restart on the same state folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import daemon as daemon_module
import exported
import models
import pytest
import raw
from texts import next_token, random_tokens

from weft import methods
from weft._proto import adapters_pb2, training_pb2

VOCAB = 320
KIND = "llama-tied"
FAILPOINTS = daemon_module.BUILD_DIR / "tests" / "support" / "libweft_failpoints.so"


class Durable:
    """A daemon whose restarts use the same state folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.flags: tuple[str, ...] = ()
        self.daemon: Any = None

    def launch(self, *flags: str, failpoints: str = "") -> Any:
        """Starts the process. Without `flags`, the flags of the last start apply."""
        self.flags = flags or self.flags
        self.daemon = daemon_module.Daemon(
            models.tiny_model(KIND),
            self.folder / "run",
            *("--state-dir", str(self.folder / "state")),
            *self.flags,
        )
        with pytest.MonkeyPatch.context() as patch:
            if failpoints:
                patch.setenv("LD_PRELOAD", str(FAILPOINTS))
                patch.setenv("WEFT_FAILPOINTS", failpoints)
            self.daemon.launch()
        return self.daemon

    def start(self, *flags: str, failpoints: str = "") -> Any:
        daemon = self.launch(*flags, failpoints=failpoints)
        daemon.wait_until_serving()
        daemon.wait_until_restored()
        return daemon

    def restart(self, *flags: str) -> Any:
        self.daemon.kill()
        return self.start(*flags)

    def call(self, method: Any, request: Any) -> raw.Outcome:
        with raw.Raw(self.daemon.address) as channel:
            return channel.call(method, request)

    @property
    def images(self) -> list[Path]:
        return sorted((self.folder / "state" / "images").iterdir())

    @property
    def segments(self) -> list[Path]:
        return sorted((self.folder / "state" / "log").iterdir())

    def tear(self) -> None:
        """Makes the log's last record incomplete, as after a loss of power."""
        segment = self.segments[-1]
        with segment.open("r+b") as file:
            file.truncate(segment.stat().st_size - 1)


def batch(seed: int, count: int = 3) -> list[Any]:
    return [
        next_token(random_tokens(VOCAB, 20 + 7 * i, 100 * seed + i))
        for i in range(count)
    ]


def train(client: Any, adapter_id: str, seed: int) -> None:
    adapter = client.adapter(adapter_id)
    adapter.forward_backward(batch(seed))
    adapter.optim_step(learning_rate=1e-2)


def image(server: Durable, adapter_id: str) -> dict[str, bytes]:
    """Returns weights, accumulator and moments as bytes."""
    with server.daemon.client() as client:
        return exported.saved(server.daemon, client.adapter(adapter_id), "image")


def facts(server: Durable, adapter_id: str) -> Any:
    request = adapters_pb2.GetAdapterRequest(adapter_id=adapter_id)
    adapter = server.call(methods.GET_ADAPTER, request).reply.adapter
    # The place of the tensors and the time of use may differ.
    adapter.ClearField("resident_bytes")
    adapter.ClearField("location")
    adapter.ClearField("last_used_at")
    return adapter


def raw_batch(seed: int, weight: float = 1.0) -> list[training_pb2.Datum]:
    tokens = random_tokens(VOCAB, 24, seed)
    datum = training_pb2.Datum(
        tokens=tokens[:-1], targets=tokens[1:], weights=[weight] * 23
    )
    return [datum]
