"""Tests steps of Muon: apart from those of AdamW, over checkpoints, and over kills."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from durable import Durable, batch, facts, image

import weft
from weft._proto import adapters_pb2


def train(adapter: Any, seed: int, **options: Any) -> None:
    adapter.forward_backward(batch(seed))
    adapter.optim_step(optimizer="muon", learning_rate=1e-2, **options)


def test_an_adapters_first_step_chooses_its_optimizer(
    daemon_for: Any, unique: Any
) -> None:
    with daemon_for("llama-tied").client() as client:
        for first, other in (("muon", "adamw"), ("adamw", "muon")):
            adapter = client.create_adapter(unique(first), rank=4, seed=1)
            assert adapter.info().optimizer == ""
            adapter.forward_backward(batch(1))
            version = adapter.optim_step(optimizer=first).version
            adapter.forward_backward(batch(2))
            with pytest.raises(weft.FailedPrecondition) as refused:
                adapter.optim_step(optimizer=other)
            expected = f"{other}: adapter '{adapter.id}' has the state of {first} "
            assert f"{expected}(optim_steps is 1), which" in str(refused.value)
            assert "load the checkpoint with weights_only" in str(refused.value)
            # The refusal changed nothing, so the gradient is still there.
            info = adapter.info()
            assert (info.optim_steps, info.version) == (1, version)
            assert info.optimizer == first
            assert adapter.optim_step(optimizer=first).grad_norm > 0
            saved = adapter.save("c")
            assert (saved.optim_steps, saved.optimizer) == (2, first)
            adapter.load("c", weights_only=True)
            assert adapter.info().optimizer == ""
            adapter.optim_step(optimizer=other)
            assert adapter.info().optimizer == other
            # The load of the whole checkpoint brings its optimizer back.
            adapter.load("c")
            assert adapter.info().optimizer == first
            with pytest.raises(weft.FailedPrecondition):
                adapter.optim_step(optimizer=other)


def test_training_goes_on_from_a_checkpoint_bit_for_bit(
    daemon_for: Any, unique: Any, tmp_path: Path
) -> None:
    """Also from a copy that was downloaded and uploaded, but not from exported
    weights, which have no momentum."""
    with daemon_for("llama-tied").client() as client:
        adapter = client.create_adapter(unique("muon"), rank=4, seed=1)
        for seed in range(3):
            train(adapter, seed)
        adapter.save("c")
        adapter.export(tmp_path / "exported")
        client.download_checkpoint(adapter.id, "c", tmp_path / "files")
        uploaded = client.upload_checkpoint(unique("muon"), "u", tmp_path / "files")
        assert uploaded.optimizer == "muon"
        loaded = client.create_adapter(unique("muon"), rank=4, seed=2)
        loaded.load("u", source=uploaded.adapter_id)
        imported = client.import_adapter(unique("muon"), tmp_path / "exported")
        weights = []
        for place, one in enumerate((adapter, loaded, imported)):
            train(one, 7)
            one.export(tmp_path / str(place))
            file = tmp_path / str(place) / "adapter_model.safetensors"
            weights.append(file.read_bytes())
        assert weights[0] == weights[1] != weights[2]


def test_steps_are_replayed_bit_for_bit(durable: Durable) -> None:
    """The log has steps, a refused step, a load that replaces the optimizer, and then
    a snapshot from which a second start goes on."""
    with durable.start().client() as client:
        adapter = client.create_adapter("a", rank=4, seed=1)
        train(adapter, 1, momentum=0.5, nesterov=False, ns_steps=3)
        adapter.save("muon")
        adapter.load("muon", weights_only=True)
        adapter.forward_backward(batch(2))
        adapter.optim_step(learning_rate=1e-2)
        adapter.forward_backward(batch(3))
        with pytest.raises(weft.FailedPrecondition):
            adapter.optim_step(optimizer="muon")
        adapter.load("muon")
        train(adapter, 4, weight_decay=0.1, max_grad_norm=0.5)
    before = image(durable, "a")
    for flags in ((), ("--snapshot-log-bytes", "1")):
        durable.restart(*flags)
        assert image(durable, "a") == before
        assert facts(durable, "a").optimizer == adapters_pb2.OPTIMIZER_MUON
        with (
            durable.daemon.client() as client,
            pytest.raises(weft.FailedPrecondition, match="the state of muon"),
        ):
            client.adapter("a").optim_step()


def test_the_second_moment_is_not_touched(durable: Durable) -> None:
    from safetensors.numpy import load

    with durable.start().client() as client:
        train(client.create_adapter("a", rank=4, seed=1), 1)
    tensors = load(image(durable, "a")["optimizer.safetensors"])
    squares = [t for name, t in tensors.items() if name.startswith("exp_avg_sq")]
    means = [t for name, t in tensors.items() if not name.startswith("exp_avg_sq")]
    assert squares and not any(np.any(t) for t in squares)
    assert any(np.any(t) for t in means)
