"""Tests training on samples: Forward gives the log-probabilities that Sample gave, and
every loss learns from the samples."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import tolerance
from texts import next_token

import weft

KIND = "llama-tied"
PROMPTS = [[3, 4, 5, 6], [9], [7, 8, 9, 10, 11, 12]]
LOSSES = [
    *("cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo"),
    "stable_reinforce",
]


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
        tolerance.assert_near(drawn, sample.logprobs)
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


@pytest.mark.parametrize("loss", LOSSES[1:])
def test_a_stale_token_does_not_end_the_learning(
    daemon_for: Any, unique: Any, loss: str
) -> None:
    """A sampler's log-probability of -90 gives a ratio near e^90. Its square would
    fill AdamW's second moments with infinity, and no later step would learn."""
    datum = next_token(
        [3, 4, 5, 6, 7], logprobs=[-90, -1, -1, -1], advantages=[1, 0, 0, 0]
    )
    plain = weft.Datum.next_token([3, 4, 5, 6, 7])
    config = {"clip_high": 1e30} if loss == "ppo" else {}
    with daemon_for(KIND).client() as client:
        adapter = client.create_adapter(unique("stale"), rank=4, seed=1)
        result = adapter.forward_backward([datum], loss, **config)
        # The means of gspo and stable_reinforce are below 20 here, and dro has no
        # ratio.
        if loss in ("importance_sampling", "ppo", "cispo"):
            assert result.metrics["bounded_tokens:sum"] == 1
        assert np.isfinite(adapter.optim_step(learning_rate=1e-2).grad_norm)
        before = adapter.forward([plain]).metrics["loss:sum"]
        for _ in range(20):
            adapter.forward_backward([plain])
            adapter.optim_step(learning_rate=1e-2)
        assert adapter.forward([plain]).metrics["loss:sum"] < before - 1


def refused_steps(daemon: Any) -> float:
    counter = re.search(r"^weft_nonfinite_total (\S+)$", daemon.scrape(), re.MULTILINE)
    assert counter is not None
    return float(counter[1])


def test_a_gradient_whose_square_overflows_is_refused(
    daemon_for: Any, unique: Any
) -> None:
    daemon = daemon_for(KIND)
    huge = next_token([3, 4, 5, 6, 7], weights=[1e25] * 4)
    plain = weft.Datum.next_token([3, 4, 5, 6, 7])
    with daemon.client() as client:
        adapter = client.create_adapter(unique("huge"), rank=4, seed=1)
        adapter.forward_backward([huge])
        before = refused_steps(daemon)
        with pytest.raises(weft.FailedPrecondition, match="when it is squared in f32"):
            adapter.optim_step()
        assert refused_steps(daemon) == before + 1
        adapter.forward_backward([huge])
        assert adapter.optim_step(max_grad_norm=1).grad_norm > 1.9e19
        # The refused gradient was cleared.
        other = client.create_adapter(unique("usual"), rank=4, seed=1)
        other.forward_backward([huge])
        other.optim_step(max_grad_norm=1)
        results = []
        for trained in (adapter, other):
            trained.forward_backward([plain])
            trained.optim_step(learning_rate=1e-2)
            results.append(trained.forward([plain]).results[0].logprobs)
        np.testing.assert_array_equal(*results)


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
        tolerance.assert_near(later, pinned)
        base = client.forward([weft.Datum.next_token(tokens)]).results[0].logprobs
        tolerance.assert_near(client.compute_logprobs(tokens)[1:], base)
