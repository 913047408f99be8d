"""Tests the properties of checkpoints: kind, metadata, expiry, base model, number."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import checkpoints
import exported
import numpy as np
import pytest
from daemon import Daemon, wait_until
from models import tiny_model
from raw import Raw

import weft
from weft import methods
from weft._proto import adapters_pb2


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    server = Daemon(tiny_model("llama-tied"), tmp_path / "run")
    server.start()
    yield server
    server.kill()


def train_once(adapter: Any) -> None:
    adapter.forward_backward([weft.Datum.next_token(list(range(1, 9)))])
    adapter.optim_step(learning_rate=1e-2)


def durable_step(daemon: Daemon) -> int:
    request = adapters_pb2.GetAdapterRequest(adapter_id="a")
    with Raw(daemon.address) as raw:
        return int(raw.call(methods.GET_ADAPTER, request).reply.adapter.durable_step)


def test_a_sampler_checkpoint_gives_the_weights_and_no_more(
    daemon: Daemon, tmp_path: Path
) -> None:
    with daemon.client() as client:
        adapter = client.create_adapter("a", rank=4, seed=1)
        train_once(adapter)
        saved = adapter.save("small", kind="sampler", metadata={"loss": "0.5"})
        assert durable_step(daemon) == 0  # A sampler checkpoint restores no steps.
        whole = adapter.save("whole")
        assert durable_step(daemon) == whole.last_step == 4
        assert saved.size_bytes < whole.size_bytes / 2
        found = {info.name: info for info in client.checkpoints("a")}
        assert found["small"].kind == "sampler"
        assert found["small"].metadata == {"loss": "0.5"}
        assert found["small"].base_fingerprint == found["whole"].base_fingerprint
        assert len(found["whole"].base_fingerprint) == 64

        copy = client.create_adapter("copy", rank=4, seed=2)
        with pytest.raises(weft.FailedPrecondition, match="has kind sampler"):
            copy.load("small", source="a")
        copy.load("small", source="a", weights_only=True)
        assert copy.info().optim_steps == 0
        expected = exported.weights(adapter, tmp_path / "expected")
        for name, value in exported.weights(copy, tmp_path / "loaded").items():
            np.testing.assert_array_equal(value, expected[name], err_msg=name)


def test_the_daemon_deletes_what_has_expired(daemon: Daemon) -> None:
    with daemon.client() as client:
        adapter = client.create_adapter("a", rank=4)
        adapter.save("kept")
        saved = adapter.save("brief", ttl_seconds=1)
        assert saved.expires_at == pytest.approx(saved.created_at + 1, abs=1e-5)
        folder = checkpoints.folder(daemon, "a", "brief")
        wait_until(lambda: not folder.exists(), "the expired checkpoint stays")
        assert [info.name for info in client.checkpoints("a")] == ["kept"]
        with pytest.raises(weft.NotFound, match="kept"):
            adapter.load("brief")


def test_a_save_keeps_the_newest(daemon: Daemon) -> None:
    with daemon.client() as client:
        adapter = client.create_adapter("a", rank=4)
        for number in range(4):
            adapter.save(f"c{number}", keep_newest=2)
        assert [info.name for info in client.checkpoints("a")] == ["c3", "c2"]


def test_another_base_model_of_the_same_shape_is_refused(
    daemon: Daemon, tmp_path: Path
) -> None:
    with daemon.client() as client:
        client.create_adapter("a", rank=4).save("c")
    assert daemon.stop() == 0
    other = tmp_path / "other-weights"
    shutil.copytree(tiny_model("llama-tied"), other)
    weights = other / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    server = Daemon(other, tmp_path / "run")
    with server, server.client() as client:
        adapter = client.create_adapter("a", rank=4)
        with pytest.raises(weft.FailedPrecondition) as refused:
            adapter.load("c")
        assert "'other-weights' (fingerprint" in str(refused.value)
        assert tiny_model("llama-tied").name in str(refused.value)
        assert [info.name for info in client.checkpoints("a")] == ["c"]
