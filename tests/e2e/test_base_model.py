"""Tests which changes of the base model's folder keep state and checkpoints, and which
are refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import daemon as daemon_module
import numpy as np
import pytest
from models import tiny_model
from safetensors.numpy import load_file, save_file

import weft

ACCEPT = "--accept-base-model-change"
DATA = [weft.Datum.next_token(list(range(1, 9)))]


def edit(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def repair_eos(folder: Path) -> None:
    edit(folder, eos_token_id=[2, 7])


def break_a_line(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(path.read_text() + "\n")


def leave_a_file(folder: Path) -> None:
    (folder / "training_args.bin").write_bytes(b"not a tensor")


def lengthen(folder: Path) -> None:
    positions = json.loads((folder / "config.json").read_text())
    edit(folder, max_position_embeddings=2 * positions["max_position_embeddings"])


def store_the_head(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    save_file(tensors, path, metadata={"format": "pt"})


class Server:
    """Starts daemons over one model folder and one state folder."""

    def __init__(self, folder: Path) -> None:
        self.model = folder / "model"
        shutil.copytree(tiny_model("llama-tied"), self.model)
        self._folder = folder

    def launch(self, *flags: str) -> daemon_module.Daemon:
        state = ("--state-dir", str(self._folder / "state"))
        server = daemon_module.Daemon(self.model, self._folder / "run", *state, *flags)
        server.launch()
        return server

    def refusal(self, *flags: str) -> str:
        """Returns the log of a start that fails."""
        server = self.launch(*flags)
        assert server.ends_within(60)
        return server.log_tail()

    def run(self, work: Callable[[weft.Client], None], *flags: str) -> None:
        with self.launch(*flags) as server:
            server.wait_until_serving()
            server.wait_until_restored()
            with server.client() as client:
                work(client)
            assert server.stop() == 0


@pytest.fixture
def server(tmp_path: Path) -> Server:
    made = Server(tmp_path)

    def train(client: weft.Client) -> None:
        adapter = client.create_adapter("a", rank=4, seed=1)
        adapter.forward_backward(DATA)
        adapter.optim_step(learning_rate=1e-2)
        adapter.save("c")

    made.run(train)
    return made


def goes_on(client: weft.Client) -> None:
    assert client.adapter("a").info().optim_steps == 1
    client.adapter("a").load("c")


@pytest.mark.parametrize(
    "change", [repair_eos, break_a_line, leave_a_file, lengthen, store_the_head]
)
def test_a_change_that_the_decoder_does_not_see_keeps_everything(
    server: Server, change: Callable[[Path], None]
) -> None:
    change(server.model)
    server.run(goes_on)


def test_a_changed_tensor_is_named_and_can_be_accepted(server: Server) -> None:
    path = server.model / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.1.mlp.up_proj.weight"
    noise = np.random.default_rng(1).normal(0.0, 0.05, tensors[name].shape)
    tensors[name] += noise.astype(np.float32)
    save_file(tensors, path, metadata={"format": "pt"})
    log = server.refusal()
    assert "model.layers.*.mlp.up_proj.weight is " in log and "layer.1 is " in log
    assert ACCEPT in log
    server.run(goes_on, ACCEPT)

    def only_the_state(client: weft.Client) -> None:
        assert client.adapter("a").info().optim_steps == 1
        with pytest.raises(weft.FailedPrecondition, match=r"layer\.1 is .*" + ACCEPT):
            client.adapter("a").load("c")

    server.run(only_the_state)


def test_a_changed_field_is_named(server: Server) -> None:
    edit(server.model, rms_norm_eps=3e-5)
    assert "rms_norm_eps is 1.0000000000000001e-05, here " in server.refusal()


def test_a_state_folder_of_an_older_server_needs_the_flag_once(
    server: Server, tmp_path: Path
) -> None:
    path = tmp_path / "state" / "FORMAT"
    text = json.loads(path.read_text())
    text["model"] = "64ed5db9" * 8
    path.write_text(json.dumps(text))
    log = server.refusal()
    assert "fingerprint of an older server" in log and ACCEPT in log
    server.run(goes_on, ACCEPT)
    server.run(goes_on)


def test_a_context_above_the_models_is_refused(server: Server) -> None:
    log = server.refusal("--max-context", "4096")
    assert "--max-context=4096 is above the model's limit of " in log
