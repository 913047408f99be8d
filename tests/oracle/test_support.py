"""Compares training on a sampler's truncated distribution with autograd through peft in
f64, whose logits outside of the support are -inf. The samples' supports are compared
with the filters of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import checkpoints
import daemon as daemon_module
import numpy as np
import pytest
import tolerance
import torch
from daemon import DTYPE
from models import tiny_model
from parallel import SIZES, need_devices
from reference import Adapted, mixed_shapes
from test_gradients import assert_gradients
from test_sampling import prompts_of
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

import weft

# The last one caps logits.
KINDS = ("llama-tied", "gemma2")
FILTERS: tuple[dict[str, Any], ...] = ({"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.05})
# At temperature 1 the tiny models are so flat that min_p keeps nearly all tokens.
TEMPERATURE = 0.6
DRAWN: dict[str, Any] = {
    "max_tokens": 24,
    "temperature": TEMPERATURE,
    "seed": 7,
    "ignore_eos": True,
    "truncated_logprobs": True,
    "return_support": True,
}


def sampled(sampler: Any, prompt: list[int], **options: Any) -> weft.Sample:
    """Returns a sample with its supports and logprobs of the truncated
    distribution."""
    result: weft.SampleResult = sampler.sample(prompt, **DRAWN, **options)
    return result.samples[0]


def warped(scores: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    """Returns scores [S, V] with -inf at what the filter leaves out."""
    (name,) = options
    warper: Any = {
        "top_p": TopPLogitsWarper,
        "top_k": TopKLogitsWarper,
        "min_p": MinPLogitsWarper,
    }[name]
    return warper(options[name])(None, scores)


def masked_logprobs(adapted: Adapted, datum: weft.Datum) -> torch.Tensor:
    """Returns the target's log-probability among its support, [N], differentiable."""
    assert datum.support is not None
    scores = adapted.all_logits(datum.tokens.tolist()) / TEMPERATURE
    left_out = torch.zeros(scores.shape, dtype=torch.bool)
    for row, ids in zip(left_out, datum.support, strict=True):
        if len(ids):
            row[:] = True
            row[torch.tensor(ids.astype(np.int64))] = False
    targets = torch.tensor(datum.targets.astype(np.int64))
    return (
        scores.masked_fill(left_out, -torch.inf)
        .log_softmax(-1)
        .gather(1, targets[:, None])[:, 0]
    )


def without_support(datum: weft.Datum) -> weft.Datum:
    return weft.Datum(
        datum.tokens, datum.targets, datum.weights, datum.logprobs, datum.advantages
    )


def importance_loss(logprobs: torch.Tensor, datum: weft.Datum) -> torch.Tensor:
    old, advantages, weights = (
        torch.tensor(np.asarray(values, np.float64))
        for values in (datum.logprobs, datum.advantages, datum.weights)
    )
    return -(weights * torch.exp(logprobs - old) * advantages).sum()


def check_scores(
    adapted: Adapted,
    options: dict[str, Any],
    sample: weft.Sample,
    replayed: weft.DatumResult,
    full: weft.DatumResult,
) -> None:
    """Checks the scores of a sample: with its supports, and with the full
    distribution."""
    first = len(sample.prompt) - 1
    drawn = replayed.logprobs[first:]
    tolerance.assert_near(drawn, sample.logprobs, tolerance.SAMPLER_VERSUS_TRAINER)
    tokens = [*sample.prompt, *sample.tokens]
    with torch.no_grad():
        scores = adapted.all_logits(tokens[:-1])[first:] / TEMPERATURE
    expected = warped(scores, options)
    assert sample.support is not None and replayed.entropies is not None
    for row, ids in zip(expected, sample.support, strict=True):
        assert row.isfinite().nonzero().flatten().tolist() == ids.tolist()
    entropies = torch.distributions.Categorical(logits=expected).entropy()
    tolerance.assert_near(replayed.entropies[first:], entropies)
    # Without the supports, the difference is the probability that they keep.
    kept = (scores.softmax(-1) * expected.isfinite()).sum(-1)
    assert -float(kept.log().min()) > 100 * tolerance.LOGPROBS
    tolerance.assert_near(drawn + kept.log().numpy(), full.logprobs[first:])


@pytest.mark.parametrize("kind", KINDS)
def test_the_trainer_takes_the_samplers_distribution(
    kind: str, daemon_for: Any, reference_for: Any, unique: Any, tmp_path: Path
) -> None:
    """One policy samples and is scored. Another one, which stands for the policy after
    updates, trains on the same supports."""
    reference, daemon = reference_for(kind), daemon_for(kind)
    shape = mixed_shapes(kind)[1]  # It trains lm_head.
    folders = [
        reference.make_adapter(tmp_path / str(i), shape, seed=60 + i) for i in range(2)
    ]
    prompt = prompts_of(kind, reference.vocab)[3]
    with daemon.client() as client:
        policy, later = (client.import_adapter(unique("mask"), f) for f in folders)
        samples = [sampled(policy, prompt, **options) for options in FILTERS]
        data = [
            weft.Datum.from_sample(s, advantage=np.linspace(-1, 1, len(s.tokens)))
            for s in samples
        ]
        own = policy.forward(data, temperature=TEMPERATURE, return_entropy=True)
        full = policy.forward(
            [without_support(datum) for datum in data], temperature=TEMPERATURE
        )
        reply = later.forward_backward(
            data, "importance_sampling", temperature=TEMPERATURE
        )
        measured = checkpoints.gradients(daemon, later)
    with reference.adapter(folders[0]) as adapted:
        for options, sample, replayed, other in zip(
            FILTERS, samples, own.results, full.results, strict=True
        ):
            check_scores(adapted, options, sample, replayed, other)
    first = len(prompt) - 1
    with reference.adapter(folders[1]) as adapted:
        total = 0.0
        for datum, result in zip(data, reply.results, strict=True):
            logprobs = masked_logprobs(adapted, datum)
            loss = importance_loss(logprobs, datum)
            loss.backward()
            total += float(loss.detach())
            expected = logprobs.detach()[first:]
            tolerance.assert_near(
                result.logprobs[first:], expected, tolerance.logprobs(DTYPE, expected)
            )
        assert_gradients(measured, adapted.gradients())
    assert reply.metrics["loss:sum"] == pytest.approx(total, rel=tolerance.LOGPROBS)


def test_two_ranks_share_a_support(
    reference_for: Any, unique: Any, tmp_path: Path
) -> None:
    """Each rank has half of the vocabulary, and so a part of each support."""
    need_devices(SIZES["tensor 2"])
    kind = "llama-tied"
    reference = reference_for(kind)
    folder = reference.make_adapter(tmp_path / "a", mixed_shapes(kind)[1], seed=62)
    prompt = prompts_of(kind, reference.vocab)[3]
    with (
        daemon_module.running(
            tiny_model(kind), tmp_path / "two", *SIZES["tensor 2"]
        ) as daemon,
        daemon.client() as client,
    ):
        policy = client.import_adapter(unique("ranks"), folder)
        sample = sampled(policy, prompt, top_p=0.9)
        datum = weft.Datum.from_sample(sample, advantage=1.0)
        result = policy.forward_backward(
            [datum], "importance_sampling", temperature=TEMPERATURE
        ).results[0]
        measured = checkpoints.gradients(daemon, policy)
    drawn = len(sample.tokens)
    tolerance.assert_near(
        result.logprobs[-drawn:], sample.logprobs, tolerance.SAMPLER_VERSUS_TRAINER
    )
    with reference.adapter(folder) as adapted:
        importance_loss(masked_logprobs(adapted, datum), datum).backward()
        assert_gradients(measured, adapted.gradients())


def test_a_stream_has_the_supports_too(daemon_for: Any, reference_for: Any) -> None:
    kind = "llama-tied"
    prompt = prompts_of(kind, reference_for(kind).vocab)[3]
    with daemon_for(kind).client() as client:
        sample = sampled(client, prompt, top_k=5)
        *_, before, last = client.sample_stream(prompt, **DRAWN, top_k=5)
    assert before.support is None and sample.support is not None
    assert [ids.tolist() for ids in last.support] == [
        ids.tolist() for ids in sample.support
    ]
    assert all(len(ids) == 5 for ids in sample.support)


def test_supports_survive_the_end_of_the_server(
    reference_for: Any, unique: Any, tmp_path: Path
) -> None:
    """A start runs the logged step again, with its supports."""
    kind = "llama-tied"
    prompt = prompts_of(kind, reference_for(kind).vocab)[3]
    name = unique("durable")
    daemon = daemon_module.Daemon(
        tiny_model(kind), tmp_path / "d", "--state-dir", str(tmp_path / "state")
    )
    with daemon:
        with daemon.client() as client:
            adapter = client.create_adapter(name, rank=4, durability="step")
            sample = sampled(adapter, prompt, top_p=0.9)
            datum = weft.Datum.from_sample(sample, advantage=1.0)
            adapter.forward_backward(
                [datum], "importance_sampling", temperature=TEMPERATURE
            )
            adapter.optim_step(learning_rate=1e-2)
            expected = adapter.compute_logprobs(prompt)
        daemon.kill()
        daemon.start()
        with daemon.client() as client:
            restored = client.adapter(name).compute_logprobs(prompt)
    np.testing.assert_array_equal(restored, expected)
