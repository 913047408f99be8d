"""Tests that adapters move between the daemon and peft without changing what they
compute."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tolerance
import torch
from conftest import SHORT_SMOLLM2, model_folder
from models import TINY
from reference import ALL_LINEAR, AdapterShape, read_weights
from texts import next_token, sequences


@pytest.mark.parametrize("kind", (SHORT_SMOLLM2, *TINY))
def test_exported_adapter_gives_our_logprobs_in_peft(
    kind: str, daemon_for: Any, reference_for: Any, unique: Any, tmp_path: Path
) -> None:
    reference = reference_for(kind)
    tokens = sequences(kind, model_folder(kind), reference.vocab)
    data = [next_token(t) for t in tokens]
    with daemon_for(kind).client() as client:
        adapter = client.create_adapter(
            unique("export"),
            rank=6,
            alpha=9.0,
            target_modules=[*ALL_LINEAR, "lm_head"],
            seed=11,
        )
        for _ in range(2):
            adapter.forward_backward(data)
            adapter.optim_step(learning_rate=5e-3)
        results = adapter.forward(data).results
        adapter.export(tmp_path / "exported")
        again = client.import_adapter(unique("again"), tmp_path / "exported")
        for one, other in zip(again.forward(data).results, results, strict=True):
            np.testing.assert_array_equal(one.logprobs, other.logprobs)
    with reference.adapter(tmp_path / "exported") as adapted:
        # peft warns of no tensor that has no place in the model.
        assert len(adapted.parameters) == len(read_weights(tmp_path / "exported"))
        for sequence, result in zip(tokens, results, strict=True):
            expected = adapted.logprobs(sequence[:-1], sequence[1:]).detach().numpy()
            tolerance.assert_near(result.logprobs, expected)
    base = reference.logprobs(tokens[0][:-1], tokens[0][1:])
    assert tolerance.max_difference(results[0].logprobs, base) > 1e-2


def test_an_export_loads_by_itself(
    daemon_for: Any, unique: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model card's lines load base model, adapter and tokenizer."""
    model_dir = model_folder(SHORT_SMOLLM2)
    text = "Rain is water that falls from clouds."
    with daemon_for(SHORT_SMOLLM2).client() as client:
        adapter = client.create_adapter(unique("alone"), rank=4, seed=3)
        from weft.data import ModelTokenizer

        tokens = ModelTokenizer.from_folder(model_dir).encode(text)
        data = [next_token(tokens)]
        for _ in range(2):
            adapter.forward_backward(data)
            adapter.optim_step(learning_rate=5e-3)
        expected = adapter.forward(data).results[0].logprobs
        adapter.export(
            tmp_path / "alone", base_model=str(model_dir), model_dir=model_dir
        )
    card = (tmp_path / "alone/README.md").read_text("utf-8")
    names: dict[str, Any] = {}
    monkeypatch.chdir(tmp_path)
    exec(card.split("```python\n")[1].split("```")[0], names)
    assert names["tokenizer"].encode(text) == tokens
    with torch.no_grad():
        logits = names["model"](torch.tensor([tokens[:-1]])).logits[0].float()
    scores = logits.log_softmax(-1)[range(len(tokens) - 1), tokens[1:]].numpy()
    tolerance.assert_near(expected, scores)


@pytest.mark.parametrize(
    "kind", (SHORT_SMOLLM2, "qwen3", "llama-bias", "phi3", "glm4", "qwen3-vl")
)
@pytest.mark.parametrize("rslora", (False, True), ids=("plain", "rslora"))
def test_adapter_trained_by_peft_gives_its_logprobs_here(
    kind: str, rslora: bool, both_for: Any, unique: Any, tmp_path: Path
) -> None:
    reference, daemon = both_for(kind)
    tokens = sequences(kind, model_folder(kind), reference.vocab)
    data = [next_token(t) for t in tokens]
    # The parts of qkv_proj share A.
    targets = r".*layers.*\.(q_proj|k_proj|up_proj|qkv_proj|gate_up_proj)"
    shape = AdapterShape(5, 10.0, targets, rslora)
    folder = reference.make_adapter(tmp_path / "start", shape, seed=8)
    with reference.adapter(folder) as adapted:
        optimizer = torch.optim.AdamW(adapted.parameters.values(), lr=1e-3)
        adapted.cross_entropy_backward(data[:2])
        optimizer.step()
        adapted.save(tmp_path / "trained")
        expected = [adapted.logprobs(t[:-1], t[1:]).detach().numpy() for t in tokens]
    with daemon.client() as client:
        adapter = client.import_adapter(unique("import"), tmp_path / "trained")
        results = adapter.forward(data).results
    for result, logprobs in zip(results, expected, strict=True):
        tolerance.assert_near(result.logprobs, logprobs)


def test_round_trip_keeps_every_bit(
    daemon_for: Any, reference_for: Any, unique: Any, tmp_path: Path
) -> None:
    reference = reference_for("llama-tied")
    folder = reference.make_adapter(tmp_path / "a", AdapterShape(3, 7.0), seed=9)
    with daemon_for("llama-tied").client() as client:
        client.import_adapter(unique("trip"), folder).export(tmp_path / "b")
        client.import_adapter(unique("trip"), tmp_path / "b").export(tmp_path / "c")
    before, after = read_weights(folder), read_weights(tmp_path / "b")
    assert set(before) == set(after)
    assert all(np.array_equal(before[name], after[name]) for name in before)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "b" / name).read_bytes() == (
            tmp_path / "c" / name
        ).read_bytes()


def test_new_adapter_starts_as_pefts_do(
    daemon_for: Any, reference_for: Any, unique: Any, tmp_path: Path
) -> None:
    """A is uniform within 1/sqrt(in) and B is zero. The same seed gives the same A."""
    with daemon_for("llama-tied").client() as client:
        for name, seed in (("one", 5), ("same", 5), ("other", 6)):
            adapter = client.create_adapter(unique(name), rank=8, seed=seed)
            adapter.export(tmp_path / name)
    one, same, other = (read_weights(tmp_path / n) for n in ("one", "same", "other"))
    model = reference_for("llama-tied").model
    for name, weights in one.items():
        assert np.array_equal(weights, same[name])
        if "lora_B" in name:
            assert not weights.any()
            continue
        assert not np.array_equal(weights, other[name])
        module = model.get_submodule(name.removesuffix(".lora_A.weight"))
        bound = module.in_features**-0.5
        assert np.abs(weights).max() <= bound
        # Compares with the standard deviation of the uniform distribution. The
        # sample of 768 draws is usually within 3 % of it.
        assert weights.std() == pytest.approx(bound / 3**0.5, rel=0.1)


@pytest.mark.parametrize(
    ("field", "value"),
    (
        ("use_dora", True),
        ("bias", "all"),
        ("rank_pattern", {"(?!q)._proj": 2}),
        ("alpha_pattern", {"(q|v_proj": 2}),
        ("modules_to_save", ["lm_head"]),
        ("fan_in_fan_out", True),
        ("layers_to_transform", [3]),
        ("target_modules", ".*(q|norm)"),
        ("peft_type", "IA3"),
        ("r", 0),
        ("r", "four"),
        ("lora_alpha", -1),
        ("target_modules", ["q_proj", "router"]),
        ("a_field_of_the_future", True),
    ),
)
def test_import_refuses_what_it_cannot_honour(
    field: str, value: Any, both_for: Any, unique: Any, tmp_path: Path
) -> None:
    import weft

    shape = AdapterShape(4, 8.0, ("q_proj", "v_proj"))
    reference, daemon = both_for("llama-tied")
    folder = reference.make_adapter(tmp_path / "a", shape, seed=1)
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text("utf-8"))
    path.write_text(json.dumps({**config, field: value}), "utf-8")
    with daemon.client() as client:
        before = client.info().num_adapters
        with pytest.raises((weft.InvalidArgument, weft.Unimplemented)) as refusal:
            client.import_adapter(unique("refused"), folder)
        assert field in str(refusal.value) or str(value) in str(refusal.value)
        assert client.info().num_adapters == before


@pytest.mark.parametrize("kind", ("llama-tied", "gemma2", "olmo2", "ministral3"))
def test_the_embedding_of_the_padding_token_learns_as_in_peft(
    kind: str, both_for: Any, unique: Any, tmp_path: Path
) -> None:
    """llama has no such token, and the others have it as a default."""
    reference, daemon = both_for(kind)
    padding = reference.config.pad_token_id
    tokens = [5, 0, 1, 11, 7, 0, 1, 11, 30, 2]
    data = [next_token(tokens)]
    shape = AdapterShape(4, 8.0, ("embed_tokens", "q_proj"))
    folder = reference.make_adapter(tmp_path / "start", shape, seed=8)
    with reference.adapter(folder) as adapted:
        adapted.cross_entropy_backward(data)
        (gradient,) = (
            parameter.grad
            for name, parameter in adapted.parameters.items()
            if "lora_embedding_A" in name
        )
    learnt = set(gradient.any(0).nonzero().flatten().tolist())
    assert learnt == set(tokens[:-1]) - {padding}
    assert (padding is None) == (kind == "llama-tied")
    with daemon.client() as client:
        adapter = client.import_adapter(unique("padding"), folder)
        adapter.forward_backward(data)
        adapter.optim_step(learning_rate=1e-2, weight_decay=0.0)
        adapter.export(tmp_path / "trained")
    before, after = (
        next(v for n, v in read_weights(path).items() if "lora_embedding_A" in n)
        for path in (folder, tmp_path / "trained")
    )
    assert set(np.flatnonzero((before != after).any(0))) == learnt
