"""Tests peft's adapters in which layers differ: what they compute, how they learn,
and how peft reads them afterwards."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tolerance
import torch
from batching import together
from conftest import model_folder
from reference import ALL_LINEAR, Adapted, AdapterShape, read_weights
from safetensors.numpy import load_file, save_file
from test_gradients import assert_gradients
from texts import next_token, random_tokens, sequences

import weft

STEPS = 2  # The second step depends on the first one's weights and moments.

VARIANTS: dict[str, AdapterShape] = {
    "rslora": AdapterShape(
        5, 10.0, ("q_proj", "up_proj"), True, {"rank_pattern": {"up_proj": 3}}
    ),
    "ranks": AdapterShape(
        4,
        8.0,
        ALL_LINEAR,
        options={
            "rank_pattern": {
                "model.layers.1.self_attn.q_proj": 2,
                "^model.layers.0.mlp.up_proj": 6,
                "^up_proj": 9,
                "2.mlp.up_proj": 3,
                # A dot in a key matches any character.
                "self.attn.v.proj": 7,
                "q_proj": 5,
                "attn.k_proj": 9,
            }
        },
    ),
    "alphas": AdapterShape(
        4,
        8.0,
        ("q_proj", "k_proj", "v_proj", "down_proj"),
        options={
            "alpha_pattern": {"v_proj": 2.5, "model.layers.1.mlp.down_proj": 20},
            "rank_pattern": {"k_proj": 2},
        },
    ),
    "layers": AdapterShape(
        4, 8.0, ("q_proj", "mlp.down_proj"), options={"layers_to_transform": [0, 2]}
    ),
    "one layer": AdapterShape(
        4,
        8.0,
        ("v_proj", "lm_head"),
        options={"layers_to_transform": 1, "layers_pattern": "layers"},
    ),
    "paths": AdapterShape(
        4, 8.0, ("model.layers.1.self_attn.o_proj", "2.mlp.gate_proj", "k_proj")
    ),
    "string": AdapterShape(4, 8.0, "model.layers.1.self_attn.q_proj"),
    "expression": AdapterShape(
        4,
        8.0,
        r".*\.(0|2)\.self_attn\.[qv]_proj|.*\.mlp\.(?:up|down)_proj|lm_head",
        options={
            "exclude_modules": r".*\.2\.mlp\..*",
            # The first key that matches counts. The keys are in the order in
            # which peft writes them.
            "rank_pattern": {r"(0|1)\.self_attn\.\w+": 2, r"(up|q)_proj": 6},
            "alpha_pattern": {r"layers\.\d\.mlp\..*": 5, "^lm_head$": 3},
        },
    ),
    "excluded": AdapterShape(
        4, 8.0, "all-linear", options={"exclude_modules": ["1.mlp.down_proj", "k_proj"]}
    ),
    "head": AdapterShape(
        4,
        8.0,
        ("v_proj", "lm_head"),
        options={"rank_pattern": {"lm_head": 3}, "alpha_pattern": {"lm_head": 5}},
    ),
}

EMBEDDING: dict[str, AdapterShape] = {
    "alone": AdapterShape(4, 6.0, ("embed_tokens",)),
    "and layers": AdapterShape(
        4,
        8.0,
        (*ALL_LINEAR, "embed_tokens"),
        options={
            "rank_pattern": {"embed_tokens": 3},
            "alpha_pattern": {"model.embed_tokens": 5.5},
        },
    ),
    "and head": AdapterShape(
        4, 8.0, ("model.embed_tokens", "down_proj", "lm_head"), rslora=True
    ),
}


def data_of(kind: str, vocab: int) -> list[Any]:
    """Returns three ragged sequences and a group of completions of one prompt.
    test_gradients has more lengths, which layers of their own do not change."""
    tokens = sequences(kind, model_folder(kind), vocab)[:3]
    prompt = random_tokens(vocab, 20, 1)
    tokens += [[*prompt, *random_tokens(vocab, 5 + i, i)] for i in range(3)]
    return [next_token(t) for t in tokens]


def assert_logprobs(adapted: Adapted, data: list[Any], results: Any) -> None:
    with torch.no_grad():
        expected = [adapted.logprobs(datum.tokens, datum.targets) for datum in data]
    assert_near(results, expected)


def assert_near(results: Any, expected: list[Any]) -> None:
    for result, logprobs in zip(results, expected, strict=True):
        tolerance.assert_near(result.logprobs, logprobs)


def train_reference(adapted: Adapted, data: list[Any]) -> None:
    """Makes STEPS steps. The gradients of the first one are there already."""
    optimizer = torch.optim.AdamW(
        adapted.parameters.values(),
        lr=1e-3,
        betas=(0.9, 0.95),
        eps=1e-6,
        weight_decay=0.0,
    )
    optimizer.step()
    for _ in range(1, STEPS):
        optimizer.zero_grad()
        adapted.cross_entropy_backward(data)
        optimizer.step()


def check(
    kind: str, shape: AdapterShape, both_for: Any, adapter_id: str, tmp_path: Path
) -> None:
    """Compares peft's adapter in the daemon and in peft: log-probabilities,
    gradients, weights after some steps, and the exported folder in peft."""
    import checkpoints

    reference, daemon = both_for(kind)
    folder = tmp_path / "start"
    data = data_of(kind, reference.vocab)
    with reference.new_adapter(folder, shape, seed=31) as adapted:
        scores = adapted.scored_backward(data)[1]
        expected_gradients = adapted.gradients()
        train_reference(adapted, data)
        expected = adapted.weights()
    with daemon.client() as client:
        adapter = client.import_adapter(adapter_id, folder)
        results = adapter.forward_backward(data).results
        gradients = checkpoints.gradients(daemon, adapter)
        for step in range(STEPS):
            if step > 0:
                adapter.forward_backward(data)
            adapter.optim_step(learning_rate=1e-3, eps=1e-6)
        trained_results = adapter.forward(data).results
        adapter.save("trained")
        adapter.export(tmp_path / "trained")
        copy = client.import_adapter(f"{adapter_id}-copy", tmp_path / "trained")
        copied_results = copy.forward(data).results
        copy.load("trained", source=adapter_id)
        copy.export(tmp_path / "loaded")
    for left, right in zip(trained_results, copied_results, strict=True):
        tolerance.assert_near(left.logprobs, right.logprobs)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "loaded" / name).read_bytes() == (
            tmp_path / "trained" / name
        ).read_bytes()
    assert_near(results, scores)
    assert_gradients(gradients, expected_gradients)
    trained = read_weights(tmp_path / "trained")
    tolerance.assert_tensors(trained, expected, tolerance.TRAINED_WEIGHTS)
    with reference.adapter(tmp_path / "trained") as adapted:
        assert set(adapted.weights()) == set(trained)
        assert_logprobs(adapted, data, trained_results)


@pytest.mark.parametrize("kind", ("llama-tied", "llama-untied"))
@pytest.mark.parametrize("variant", VARIANTS)
def test_layers_of_their_own(
    kind: str, variant: str, both_for: Any, unique: Any, tmp_path: Path
) -> None:
    shape = VARIANTS[variant]
    check(kind, shape, both_for, unique("variant"), tmp_path)


@pytest.mark.parametrize("kind", ("llama-tied", "llama-untied"))
def test_a_changed_copy_of_the_head_is_refused(
    kind: str, daemon_for: Any, reference_for: Any, unique: Any, tmp_path: Path
) -> None:
    """PEFT puts the copy in place of the base's head, which others share here."""
    folder = reference_for(kind).make_adapter(tmp_path, VARIANTS["head"], seed=31)
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    (name,) = (name for name in tensors if name.endswith("lm_head.base_layer.weight"))
    with daemon_for(kind).client() as client:
        client.import_adapter(unique("equal"), folder)
        tensors[name][7] *= 1.1
        save_file(tensors, path)
        with pytest.raises(weft.InvalidArgument, match=f"{name}.* first in row 7"):
            client.import_adapter(unique("changed"), folder)


@pytest.mark.parametrize(
    "kind", ("llama-tied", "llama-untied", "qwen3", "gemma2", "gemma3")
)
@pytest.mark.parametrize("variant", EMBEDDING)
def test_the_embedding(
    kind: str, variant: str, both_for: Any, unique: Any, tmp_path: Path
) -> None:
    shape = EMBEDDING[variant]
    check(kind, shape, both_for, unique("embedding"), tmp_path)


def test_the_embedding_in_a_mixed_batch(
    daemon_for: Any, reference_for: Any, unique: Any, tmp_path: Path
) -> None:
    """Adapters in one batch each have their own embedding."""
    import checkpoints

    kind = "gemma3"
    reference, daemon = reference_for(kind), daemon_for(kind)
    data = data_of(kind, reference.vocab)
    shapes = [*EMBEDDING.values(), VARIANTS["ranks"]]
    folders = [tmp_path / str(i) for i in range(len(shapes))]
    expected = []
    for index, (folder, shape) in enumerate(zip(folders, shapes, strict=True)):
        with reference.new_adapter(folder, shape, seed=70 + index) as adapted:
            adapted.cross_entropy_backward(data[index:])
            expected.append(adapted.gradients())
    with daemon.client() as client:
        adapters = [client.import_adapter(unique("mixed"), f) for f in folders]
        calls = [partial(a.forward_backward, data[i:]) for i, a in enumerate(adapters)]
        together(client, calls)
        measured = [checkpoints.gradients(daemon, a) for a in adapters]
    for actual, gradients in zip(measured, expected, strict=True):
        assert_gradients(actual, gradients)


@pytest.mark.parametrize("kind", ("llama-tied", "gemma3"))
def test_sampling_with_the_embedding(
    kind: str, daemon_for: Any, reference_for: Any, unique: Any, tmp_path: Path
) -> None:
    """Samples with the adapter and with the base model in the same batches."""
    reference = reference_for(kind)
    prompts = [random_tokens(reference.vocab, 12, seed) for seed in range(4)]
    folder = reference.make_adapter(tmp_path / "a", EMBEDDING["and head"], seed=5)
    with daemon_for(kind).client() as client:
        adapter = client.import_adapter(unique("sampled"), folder)
        calls = [
            partial(s.sample, p, max_tokens=24, temperature=0.0, ignore_eos=True)
            for p in prompts
            for s in (adapter, client)
        ]
        samples = [reply.samples[0] for reply in together(client, calls)]
    with reference.adapter(folder) as adapted:
        for prompt, sample in zip(prompts, samples[::2], strict=True):
            tokens = [*prompt, *(int(token) for token in sample.tokens)]
            expected = adapted.logprobs(tokens[:-1], tokens[1:]).detach().numpy()
            assert len(sample.tokens) == 24
            tolerance.assert_near(sample.logprobs, expected[len(prompt) - 1 :])
    assert [list(s.tokens) for s in samples[::2]] != [
        list(s.tokens) for s in samples[1::2]
    ]


def test_a_new_embedding_adapter_starts_as_pefts_do(
    daemon_for: Any, reference_for: Any, unique: Any, tmp_path: Path
) -> None:
    """The embedding's A starts at zero, and its B has a normal distribution. The
    adapter learns, and peft reads what it has learnt."""
    kind = "llama-tied"
    reference = reference_for(kind)
    data = data_of(kind, reference.vocab)
    with daemon_for(kind).client() as client:
        adapter = client.create_adapter(
            unique("new"), rank=8, target_modules=["q_proj", "embed_tokens"]
        )
        assert adapter.info().config.target_modules == ["q_proj", "embed_tokens"]
        adapter.export(tmp_path / "new")
        adapter.forward_backward(data)
        adapter.optim_step(learning_rate=1e-2)
        results = adapter.forward(data).results
        adapter.export(tmp_path / "trained")
    new = read_weights(tmp_path / "new")
    assert not new["model.embed_tokens.lora_embedding_A"].any()
    # There are 8 x 64 draws.
    assert new["model.embed_tokens.lora_embedding_B"].std() == pytest.approx(1, rel=0.1)
    with reference.adapter(tmp_path / "trained") as adapted:
        assert adapted.weights()["model.embed_tokens.lora_embedding_A"].any()
        assert_logprobs(adapted, data, results)
