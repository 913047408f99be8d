"""Tests that checkpoints move between servers as files, and that servers refuse files
that are not checkpoints."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import checkpoints
import exported
import pytest
from daemon import Daemon
from models import tiny_model
from raw import Raw

import weft
from weft import methods
from weft._proto import adapters_pb2

STATE = "trainer_state.json"
OPTIMIZER = "optimizer.safetensors"


def server(folder: Path, *flags: str, kind: str = "llama-tied") -> Daemon:
    return Daemon(tiny_model(kind), folder, *flags)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    one = server(tmp_path / "one", "--max-import-bytes", "900000")
    one.start()
    yield one
    one.kill()


def train(adapter: Any) -> None:
    adapter.forward_backward([weft.Datum.next_token(list(range(1, 9)))])


@pytest.mark.parametrize("kind", ["train", "sampler"])
def test_a_checkpoint_goes_on_at_another_server(
    kind: str, daemon: Daemon, tmp_path: Path
) -> None:
    folder = tmp_path / "files"
    with daemon.client() as client:
        adapter = client.create_adapter("a", rank=4, seed=3)
        train(adapter)
        adapter.optim_step(learning_rate=1e-2)
        train(adapter)  # A train checkpoint includes this gradient.
        saved = adapter.save("c", kind=kind, metadata={"run": "7"}, ttl_seconds=900)
        client.download_checkpoint("a", "c", folder)
    names = {path.name for path in folder.iterdir()}
    assert (OPTIMIZER in names) == (kind == "train")
    other = server(tmp_path / "other")
    with other, other.client() as client:
        there = client.upload_checkpoint("b", "d", folder)
        assert (there.adapter_id, there.name) == ("b", "d")
        assert there.expires_at is None and there.created_at >= saved.created_at
        for field in ("kind", "metadata", "last_step", "optim_steps", "config"):
            assert getattr(there, field) == getattr(saved, field)
        assert client.checkpoints("b") == [there]
        with pytest.raises(weft.AlreadyExists):
            client.upload_checkpoint("b", "d", folder)
        client.upload_checkpoint("b", "d", folder, overwrite=True)
        mine = checkpoints.folder(daemon, "a", "c").glob("*.safetensors")
        for path in mine:
            copy = checkpoints.folder(other, "b", "d") / path.name
            assert copy.read_bytes() == path.read_bytes()
        request = adapters_pb2.LoadCheckpointRequest(
            adapter_id="b", name="d", weights_only=kind == "sampler"
        )
        with Raw(other.address) as raw:
            assert raw.call(methods.LOAD_CHECKPOINT, request).code == "OK"
        if kind == "train":
            loaded = client.adapter("b")
            assert loaded.info().last_step == saved.last_step
            loaded.optim_step(learning_rate=1e-2)
            after = exported.saved(other, loaded, "after")
    if kind == "train":
        with daemon.client() as client:
            adapter = client.adapter("a")
            adapter.optim_step(learning_rate=1e-2)
            assert exported.saved(daemon, adapter, "after") == after


def test_what_is_written_leaves_the_reserve_of_the_disk(
    daemon: Daemon, tmp_path: Path
) -> None:
    with daemon.client() as client:
        client.create_adapter("a", rank=4).save("c")
        client.download_checkpoint("a", "c", tmp_path / "files")
    full = server(tmp_path / "full", "--disk-reserve-bytes", str(1 << 50))
    with full, full.client() as client:
        adapter = client.create_adapter("a", rank=4)
        refused = pytest.raises(weft.ResourceExhausted, match="checkpoints is full")
        with refused:
            adapter.save("c")
        with refused:
            client.upload_checkpoint("a", "c", tmp_path / "files")
        assert client.checkpoints("a") == []


def test_downloads_of_what_is_not_there(daemon: Daemon, tmp_path: Path) -> None:
    with daemon.client() as client:
        client.create_adapter("a", rank=4).save("c")
        with pytest.raises(weft.NotFound, match="checkpoints 'c'"):
            client.download_checkpoint("a", "d", tmp_path / "d")
        with pytest.raises(weft.InvalidArgument, match="name"):
            client.download_checkpoint("a", "../c", tmp_path / "d")
        model = checkpoints.folder(daemon, "a", "c") / "adapter_model.safetensors"
        model.write_bytes(model.read_bytes()[:-1])
        with pytest.raises(weft.DataLoss):
            client.download_checkpoint("a", "c", tmp_path / "d")
    assert not (tmp_path / "d").exists()


def bend(state: dict[str, Any], **values: Any) -> bytes:
    return json.dumps({**state, **values}).encode()


def test_files_that_are_no_checkpoint_are_refused(
    daemon: Daemon, tmp_path: Path
) -> None:
    with daemon.client() as client:
        adapter = client.create_adapter("a", rank=4, seed=3)
        train(adapter)
        adapter.save("c")
        client.download_checkpoint("a", "c", tmp_path / "files")
        client.create_adapter("wide", rank=8).save("c")
        client.download_checkpoint("wide", "c", tmp_path / "wide")
    files = {path.name: path.read_bytes() for path in (tmp_path / "files").iterdir()}
    wide = (tmp_path / "wide" / OPTIMIZER).read_bytes()
    state = json.loads(files[STATE])
    cases: dict[str, tuple[dict[str, bytes | None], str, str]] = {
        "no state": ({STATE: None}, "INVALID_ARGUMENT", STATE),
        "no json": ({STATE: b"{"}, "INVALID_ARGUMENT", STATE),
        "deep json": ({STATE: b'{"a":' * 999}, "INVALID_ARGUMENT", STATE),
        "a kind": ({STATE: bend(state, kind="x")}, "INVALID_ARGUMENT", STATE),
        "a step": ({STATE: bend(state, last_step=-1)}, "INVALID_ARGUMENT", STATE),
        "a rank": (
            {STATE: bend(state, config={**state["config"], "rank": 5})},
            "INVALID_ARGUMENT",
            "differ",
        ),
        "a model": (
            {STATE: bend(state, base_fingerprint="0" * 64)},
            "FAILED_PRECONDITION",
            "fingerprint",
        ),
        "no optimizer": ({OPTIMIZER: None}, "INVALID_ARGUMENT", OPTIMIZER),
        "another optimizer": ({OPTIMIZER: wide}, "INVALID_ARGUMENT", ""),
        "a sampler's optimizer": (
            {STATE: bend(state, kind="sampler")},
            "INVALID_ARGUMENT",
            OPTIMIZER,
        ),
        "half a model": (
            {"adapter_model.safetensors": files["adapter_model.safetensors"][:99]},
            "INVALID_ARGUMENT",
            "",
        ),
        "a stranger": ({"evil.sh": b"#!"}, "INVALID_ARGUMENT", "evil.sh"),
        "too much": ({"pad": b"x" * 1_000_000}, "RESOURCE_EXHAUSTED", "900000"),
    }
    with Raw(daemon.address) as raw:

        def upload(changed: dict[str, bytes | None], **options: Any) -> Any:
            parts = {**files, **changed}
            messages = [
                adapters_pb2.UploadCheckpointRequest(
                    options={"adapter_id": "b", "name": "d", **options}
                )
            ]
            for name, data in parts.items():
                if data is not None:
                    messages.append(
                        adapters_pb2.UploadCheckpointRequest(
                            chunk={"name": name, "data": data}
                        )
                    )
            return raw.call(methods.UPLOAD_CHECKPOINT, iter(messages))

        for what, (changed, code, word) in cases.items():
            outcome = upload(changed)
            assert outcome.code == code and word in outcome.message, (what, outcome)
        for options in ({"name": "../d"}, {"adapter_id": ""}, {"name": ""}):
            assert upload({}, **options).code == "INVALID_ARGUMENT", options
        with daemon.client() as client:
            assert client.checkpoints("b") == []
            assert exported.saved(daemon, client.adapter("a"), "again")
        assert upload({}).code == "OK"
