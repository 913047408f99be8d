"""Compares the daemon with transformers when the daemon chooses each token's experts,
and when the request gives them. Also compares sampling with training where rounding
would change the experts."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import checkpoints
import daemon as daemon_module
import forms
import numpy as np
import pytest
import routed
import tolerance
import torch
from conftest import model_folder
from daemon import DTYPE
from experts import need_small_rounding
from models import tiny_model
from parallel import SIZES, need_devices
from reference import MIXED_SHARED, Reference, mixed_shapes
from safetensors.torch import save_file
from test_gradients import assert_gradients
from texts import next_token, random_tokens, sequences
from transformers import AutoConfig, AutoModelForCausalLM

import weft

KINDS = (
    "qwen3-moe",
    "qwen2-moe",
    "mixtral",
    "gpt-oss",
    "glm4-moe",
    "minimax-m2",
    "qwen3-5-moe",
    "qwen3-next",
    "qwen3-vl-moe",
)


def shape_of(client: Any) -> tuple[int, int]:
    """Returns the number of layers with experts and of experts per token."""
    model = client.info().model
    return model.expert_layers, model.experts_per_token


@pytest.mark.parametrize("kind", KINDS)
def test_the_experts_are_the_reference_s(
    kind: str, daemon_for: Any, reference_for: Any
) -> None:
    reference, daemon = reference_for(kind), daemon_for(kind)
    data = sequences(kind, model_folder(kind), reference.vocab)
    with daemon.client() as client:
        layers, per_token = shape_of(client)
        results = client.forward(
            [next_token(tokens) for tokens in data], return_routing=True
        ).results
    for tokens, result in zip(data, results, strict=True):
        measured = result.routing.reshape(len(tokens) - 1, layers, per_token)
        expected = routed.chosen(reference, tokens[:-1])
        if routed.takes_sigmoids(reference.config):
            measured, expected = np.sort(measured, -1), np.sort(expected, -1)
        np.testing.assert_array_equal(measured, expected)


def random_routing(length: int, layers: int, per_token: int, count: int) -> np.ndarray:
    generator = np.random.default_rng(length)
    picks = [generator.permutation(count)[:per_token] for _ in range(length * layers)]
    return np.stack(picks).reshape(length, layers, per_token).astype(np.uint16)


@pytest.mark.bf16
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_go_to_the_experts_that_are_given(
    kind: str, daemon_for: Any, reference_for: Any, unique: Any, tmp_path: Path
) -> None:
    """All four data have the same prompt. Two of them also have the same experts for
    it. The last datum has no routing."""
    reference = reference_for(kind)
    need_small_rounding(reference.config)
    daemon = daemon_for(kind)
    shapes = mixed_shapes(kind)
    shape = shapes[2] if shapes is MIXED_SHARED else shapes[1]
    folder = reference.make_adapter(tmp_path / "a", shape, seed=4)
    prompt = random_tokens(reference.vocab, 40, 1)
    texts = [prompt + random_tokens(reference.vocab, 9, 2 + i) for i in range(4)]
    with daemon.client() as client:
        layers, per_token = shape_of(client)
        count = client.info().model.num_experts
        routings = [random_routing(48, layers, per_token, count) for _ in texts]
        routings[1][40:] = routings[1][40:][:, :, ::-1]
        routings[2] = (routings[2] + 1) % count
        data = [
            next_token(tokens, routing=routing)
            for tokens, routing in zip(texts[:3], routings, strict=False)
        ] + [next_token(texts[3])]
        adapter = client.import_adapter(unique("routed"), folder)
        reply = adapter.forward_backward(data, return_routing=True)
        measured = checkpoints.gradients(daemon, adapter)
    total = 0.0
    with reference.adapter(folder) as adapted:
        for i, datum in enumerate(data):
            routing = routings[i] if i < 3 else routed.chosen(reference, texts[i][:-1])
            result = reply.results[i]
            if i < 3:
                np.testing.assert_array_equal(
                    result.routing, routing.reshape(len(routing), -1)
                )
            else:
                routing = result.routing.reshape(routing.shape)
            with routed.given(adapted.model, routing):
                loss, (logprobs,) = adapted.scored_backward([datum])
            total += loss
            tolerance.assert_near(
                result.logprobs, logprobs, tolerance.logprobs(DTYPE, logprobs)
            )
        assert_gradients(measured, adapted.gradients())
    assert reply.metrics["loss:sum"] == pytest.approx(
        total, rel=tolerance.gradients(DTYPE)
    )


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a model with one expert per token, whose experts come in pairs. The
    router gives both experts of a pair equal logits, up to rounding."""
    folder = tmp_path_factory.mktemp("twins") / "model"
    shutil.copytree(tiny_model("mixtral"), folder)
    tensors = forms.read(folder)
    generator = torch.Generator().manual_seed(3)
    for name, tensor in tensors.items():
        if name.endswith("block_sparse_moe.gate.weight"):
            noise = torch.randn(tensor[::2].shape, generator=generator)
            tensor[1::2] = tensor[::2] * (1 + 1e-6 * noise)
    forms.remove_weights(folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_training_repeats_the_experts_of_sampling(twins: Path, tmp_path: Path) -> None:
    """Two ranks sample and one trains, so that their roundings differ."""
    need_devices(SIZES["tensor 2"])
    prompt = random_tokens(320, 60, 5)
    with (
        daemon_module.running(twins, tmp_path / "two", *SIZES["tensor 2"]) as daemon,
        daemon.client() as client,
    ):
        samples = client.sample(
            prompt, num_samples=4, max_tokens=100, seed=1, return_routing=True
        ).samples
    data = [weft.Datum.from_sample(sample) for sample in samples]
    plain = [weft.Datum(d.tokens, d.targets, d.weights) for d in data]
    with (
        daemon_module.running(twins, tmp_path / "one") as daemon,
        daemon.client() as client,
    ):
        repeated = client.forward(data, return_routing=True).results
        free = client.forward(plain, return_routing=True).results
    worst = 0.0
    for sample, same, other in zip(samples, repeated, free, strict=True):
        np.testing.assert_array_equal(same.routing, sample.routing)
        drawn = len(sample.tokens)
        tolerance.assert_near(
            same.logprobs[-drawn:], sample.logprobs, tolerance.SAMPLER_VERSUS_TRAINER
        )
        worst = max(
            worst, tolerance.max_difference(other.logprobs[-drawn:], sample.logprobs)
        )
    flips = sum(
        int((other.routing != sample.routing).sum())
        for sample, other in zip(samples, free, strict=True)
    )
    assert flips > 0, "the model has no near ties: the test shows nothing"
    assert worst > tolerance.SAMPLER_VERSUS_TRAINER


def page_bytes(folder: Path) -> int:
    """Returns the bytes of 16 tokens' keys and values in f32."""
    config = json.loads((folder / "config.json").read_text("utf-8"))
    heads = config["num_attention_heads"]
    width = config["num_key_value_heads"] * (
        config.get("head_dim") or config["hidden_size"] // heads
    )
    return int(16 * 2 * 4 * config["num_hidden_layers"] * width)


def test_preempted_samples_keep_their_experts(twins: Path, tmp_path: Path) -> None:
    """Prefill computes a preempted sample again. Its roundings differ from those of the
    decode iterations that drew the sample's tokens."""
    prompts = [random_tokens(320, n, n) for n in (17, 40, 64)]
    options = {"max_tokens": 90, "seed": 4, "return_routing": True}
    with (
        daemon_module.running(
            twins, tmp_path / "weftd", "--kv-cache-bytes", str(14 * page_bytes(twins))
        ) as daemon,
        daemon.client() as client,
    ):
        layers, _ = shape_of(client)
        with ThreadPoolExecutor(len(prompts)) as pool:
            calls = [pool.submit(client.sample, p, **options) for p in prompts]
            samples = [call.result(120).samples[0] for call in calls]
        assert metric(daemon, "weft_sample_preemptions_total") > 0
        data = [weft.Datum.from_sample(sample) for sample in samples]
        repeated = client.forward(data).results
    for sample, result, prompt in zip(samples, repeated, prompts, strict=True):
        drawn = len(sample.tokens)
        assert sample.routing.shape == (len(prompt) + drawn - 1, layers)
        tolerance.assert_near(
            result.logprobs[-drawn:], sample.logprobs, tolerance.SAMPLER_VERSUS_TRAINER
        )


def test_streams_and_cached_prefixes_have_the_routing_too(daemon_for: Any) -> None:
    options = {"max_tokens": 20, "seed": 3, "return_routing": True}
    prompt = random_tokens(320, 150, 8)
    daemon = daemon_for("qwen3-moe")
    with daemon.client() as client:
        hits = metric(daemon, "weft_prefix_cache_hit_tokens_total")
        sample = client.sample(prompt, **options).samples[0]
        *_, before, last = client.sample_stream(prompt, **options)
        assert metric(daemon, "weft_prefix_cache_hit_tokens_total") > hits
    assert before.routing is None
    np.testing.assert_array_equal(last.routing, sample.routing.ravel())


def metric(daemon: Any, name: str) -> float:
    (line,) = (x for x in daemon.scrape().splitlines() if x.startswith(name + " "))
    return float(line.split()[1])


def test_the_balance_of_experts_is_a_metric(daemon_for: Any) -> None:
    daemon = daemon_for("mixtral")
    with daemon.client() as client:
        before = metric(daemon, "weft_expert_load_ratio_count")
        layers, _ = shape_of(client)
        count = client.info().model.num_experts
        tokens = random_tokens(320, 65, 1)
        datum = next_token(tokens, routing=np.zeros((64, layers, 1), np.uint16))
        client.forward([datum])
        # All tokens are on the same expert of each layer.
        assert metric(daemon, "weft_expert_imbalance") == count
        after = metric(daemon, "weft_expert_load_ratio_count")
    assert after - before == layers * count


def test_a_mixture_may_have_no_layer_of_experts(tmp_path: Path) -> None:
    """Two replicas share the data."""
    need_devices(SIZES["data 2"])
    config = AutoConfig.from_pretrained(tiny_model("qwen3-moe"))
    config.mlp_only_layers = list(range(config.num_hidden_layers))
    torch.manual_seed(2)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path / "model")
    reference = Reference(tmp_path / "model")
    texts = [random_tokens(320, 20 + i, i) for i in range(4)]
    with (
        daemon_module.running(
            tmp_path / "model", tmp_path / "weftd", *SIZES["data 2"]
        ) as daemon,
        daemon.client() as client,
    ):
        data = [next_token(tokens) for tokens in texts]
        results = client.forward(data).results
        with pytest.raises(weft.InvalidArgument, match="the model has no experts"):
            client.forward(data, return_routing=True)
        with pytest.raises(weft.InvalidArgument, match="the model has no experts"):
            client.sample(texts[0], return_routing=True)
        assert client.sample(texts[0], max_tokens=3).samples[0].routing is None
    for datum, result in zip(data, results, strict=True):
        expected = reference.logprobs(datum.tokens, datum.targets)
        tolerance.assert_near(
            result.logprobs, expected, tolerance.logprobs(DTYPE, expected)
        )


def test_routing_of_a_dense_model_is_refused(daemon_for: Any) -> None:
    with daemon_for("llama-tied").client() as client:
        tokens = random_tokens(320, 5, 1)
        with pytest.raises(weft.InvalidArgument, match="return_routing is set, but"):
            client.forward([next_token(tokens)], return_routing=True)
        datum = next_token(tokens, routing=np.zeros((4, 2), np.uint16))
        with pytest.raises(weft.InvalidArgument, match=r"data\[0\].routing_le is set"):
            client.forward([datum])
        with pytest.raises(weft.InvalidArgument, match="return_routing is set, but"):
            client.sample(tokens, return_routing=True)
