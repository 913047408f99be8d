"""Tests training on samples: Forward gives the log-probabilities that Sample gave, and
every loss learns from the samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tolerance

import weft

KIND = "llama-tied"
PROMPTS = [[3, 4, 5, 6], [9], [7, 8, 9, 10, 11, 12]]
LOSSES = ["cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo"]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_forward_gives_the_samples_logprobs(
    daemon_for: Any, unique: Any, temperature: float
) -> None:
    with daemon_for(KIND).client() as client:
        adapter = client.create_adapter(unique("scores"), rank=4, seed=1)
        # Without this training the adapter would equal the base model.
        train(adapter, draw(adapter, 1.0), "cross_entropy")
        samples = draw(adapter, temperature)
        data = [weft.Datum.from_sample(sample) for sample in samples]
        scored = adapter.forward(data, temperature=temperature)
    for sample, datum, result in zip(samples, data, scored.results, strict=True):
        drawn = result.logprobs[len(sample.prompt) - 1 :]
        assert drawn.shape == sample.logprobs.shape
        difference = tolerance.max_difference(drawn, sample.logprobs)
        assert difference <= tolerance.LOGPROBS
        assert not result.logprobs[: len(sample.prompt) - 1].any()
        assert datum.targets[-1] == sample.tokens[-1]


def draw(adapter: weft.Adapter, temperature: float) -> list[weft.Sample]:
    results = adapter.sample_many(
        PROMPTS,
        num_samples=3,
        max_tokens=9,
        temperature=temperature,
        seed=5,
        ignore_eos=True,
    )
    return [sample for result in results for sample in result.samples]


def train(
    adapter: weft.Adapter, samples: list[weft.Sample], loss: str, rate: float = 1e-2
) -> weft.TrainResult:
    data = [
        weft.Datum.from_sample(sample, advantage=1.0 if i % 3 == 0 else -0.5)
        for i, sample in enumerate(samples)
    ]
    result = adapter.forward_backward(data, loss)
    assert adapter.optim_step(learning_rate=rate).grad_norm > 0
    return result


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_trains_on_samples(daemon_for: Any, unique: Any, loss: str) -> None:
    """Samples with a positive advantage gain more probability than the others."""
    with daemon_for(KIND).client() as client:
        adapter = client.create_adapter(unique(loss), rank=4, seed=1)
        samples = draw(adapter, 1.0)
        result = train(adapter, samples, loss)
        if loss != "cross_entropy":
            # The policy that trains also drew the samples, so the ratio is 1.
            assert abs(result.metrics["kl_sample_train_v1:mean"]) < 1e-5
        again = adapter.forward([weft.Datum.from_sample(s) for s in samples])
    gains = [
        float((after.logprobs - before.logprobs).sum())
        for before, after in zip(result.results, again.results, strict=True)
    ]
    good, rest = np.mean(gains[::3]), np.mean([*gains[1::3], *gains[2::3]])
    assert good > 0 if loss == "cross_entropy" else good > rest


def test_computed_logprobs_are_those_of_forward(daemon_for: Any, unique: Any) -> None:
    tokens = [3, 4, 5, 6, 7, 8]
    with daemon_for(KIND).client() as client:
        adapter = client.create_adapter(unique("scores"), rank=4, seed=1)
        train(adapter, draw(adapter, 1.0), "cross_entropy")
        adapter.snapshot("pinned")
        pinned = adapter.compute_logprobs(tokens)
        scored = adapter.forward([weft.Datum.next_token(tokens)]).results[0].logprobs
        difference = tolerance.max_difference(pinned[1:], scored)
        assert difference <= tolerance.LOGPROBS
        train(adapter, draw(adapter, 1.0), "cross_entropy", rate=0.1)
        assert not np.array_equal(adapter.compute_logprobs(tokens), pinned)
        later = adapter.compute_logprobs(tokens, snapshot="pinned")
        assert tolerance.max_difference(later, pinned) <= tolerance.LOGPROBS
        base = client.forward([weft.Datum.next_token(tokens)]).results[0].logprobs
        difference = tolerance.max_difference(client.compute_logprobs(tokens)[1:], base)
        assert difference <= tolerance.LOGPROBS
