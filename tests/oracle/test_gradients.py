"""Compares every LoRA gradient, by name, with autograd through peft, and the adapters'
log-probabilities."""

from __future__ import annotations

from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import checkpoints
import numpy as np
import pytest
import tolerance
import torch
from batching import together
from conftest import SHORT_SMOLLM2, SMOLLM2, FirstSteps, model_folder
from daemon import DTYPE
from experts import need_equal_choices, need_small_rounding
from models import OTHER_HEADS, TINY
from reference import MIXED, Adapted, AdapterShape, mixed_shapes
from texts import next_token, random_tokens, sequences


def assert_gradients(
    actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]
) -> None:
    tolerance.assert_tensors(actual, expected, tolerance.gradients(DTYPE))


@pytest.mark.bf16
@pytest.mark.parametrize("kind", (SMOLLM2, *TINY))
def test_three_ranks_in_one_mixed_batch(
    kind: str, both_for: Any, first_steps: FirstSteps, unique: Any, tmp_path: Path
) -> None:
    _compare_three_ranks(kind, both_for, first_steps, unique, tmp_path)


@pytest.mark.parametrize("kind", OTHER_HEADS)
def test_the_other_kind_of_head(
    kind: str, both_for: Any, unique: Any, tmp_path: Path
) -> None:
    _compare_three_ranks(kind, both_for, {}, unique, tmp_path)


def mixed_data(tokens: list[list[int]]) -> list[list[Any]]:
    """Returns the data of three adapters, with weights."""
    return [
        [next_token(t, weights=_weights(len(t) - 1, i)) for t in tokens[i::2]]
        for i in range(3)
    ]


def _compare_three_ranks(
    kind: str, both_for: Any, first_steps: FirstSteps, unique: Any, folder: Path
) -> None:
    """Compares log-probabilities of forward passes, and losses and gradients of
    weighted tokens."""
    reference, daemon = both_for(kind)
    need_equal_choices(reference.config)
    need_small_rounding(reference.config)
    tokens = sequences(kind, model_folder(kind), reference.vocab)
    data = mixed_data(tokens)
    folders, expected = [], []
    for i, shape in enumerate(mixed_shapes(kind)):
        folders.append(folder / str(i))
        with reference.new_adapter(folders[i], shape, seed=50 + i) as adapted:
            step = first_steps[kind, i] = adapted.step(data[i])
            with torch.no_grad():
                others = [adapted.logprobs(t[:-1], t[1:]) for t in tokens[i + 1 :: 2]]
        # In the order of tokens[i:].
        pairs = zip_longest(step.logprobs, others)
        expected.append(
            (step, [one for pair in pairs for one in pair if one is not None])
        )

    def score_and_train(index: int, adapter: Any) -> tuple[Any, Any]:
        scored = adapter.submit.forward([next_token(t) for t in tokens[index:]])
        trained = adapter.submit.forward_backward(data[index])
        return scored.result().results, trained.result().metrics["loss:sum"]

    with daemon.client() as client:
        adapters = [client.import_adapter(unique("grad"), f) for f in folders]
        calls = [partial(score_and_train, i, a) for i, a in enumerate(adapters)]
        replies = together(client, calls)
        measured = [checkpoints.gradients(daemon, adapter) for adapter in adapters]
    for i, (step, logprobs) in enumerate(expected):
        scored, trained = replies[i]
        for result, wanted in zip(scored, logprobs, strict=True):
            tolerance.assert_near(
                result.logprobs, wanted, tolerance.logprobs(DTYPE, wanted), i
            )
        assert trained == pytest.approx(step.loss, rel=tolerance.gradients(DTYPE))
        assert_gradients(measured[i], step.gradients)
    if kind not in OTHER_HEADS:  # Some of these change less.
        base = reference.logprobs(tokens[0][:-1], tokens[0][1:])
        assert tolerance.max_difference(replies[0][0][0].logprobs, base) > 1e-2


def test_ragged_soft_targets(
    daemon_for: Any, reference_for: Any, unique: Any, tmp_path: Path
) -> None:
    """Tokens have 0 to 3 targets. The reference sums over the whole vocabulary."""
    import torch

    import weft

    kind = "llama-tied"
    reference, daemon = reference_for(kind), daemon_for(kind)
    generator = np.random.default_rng(8)
    tokens = sequences(kind, model_folder(kind), reference.vocab)[2]
    counts = [i % 4 for i in range(len(tokens))]
    targets = [generator.permutation(reference.vocab)[:n] for n in counts]
    weights = [generator.normal(size=n).astype(np.float32) for n in counts]
    folder = tmp_path / "a"
    with reference.new_adapter(folder, MIXED[1], seed=9) as adapted:
        wanted = torch.zeros(len(tokens), reference.vocab, dtype=torch.float64)
        for row, ids, values in zip(wanted, targets, weights, strict=True):
            row[torch.tensor(ids)] = torch.tensor(values, dtype=torch.float64)
        scores = adapted.all_logprobs(tokens)
        loss = -(wanted * scores).sum()
        loss.backward()
        gradients = adapted.gradients()
    with daemon.client() as client:
        adapter = client.import_adapter(unique("ragged"), folder)
        datum = weft.Datum(tokens, targets, weights)
        reply = adapter.forward_backward([datum])
        assert_gradients(checkpoints.gradients(daemon, adapter), gradients)
    assert reply.metrics["loss:sum"] == pytest.approx(float(loss.detach()), rel=1e-4)
    for row, ids, logprobs, losses, values in zip(
        scores.detach().numpy(),
        targets,
        datum.per_token(reply.results[0].logprobs),
        datum.per_token(reply.results[0].losses),
        weights,
        strict=True,
    ):
        assert logprobs.shape == losses.shape == ids.shape
        tolerance.assert_near(logprobs, row[ids])
        bound = tolerance.summed("f32", 1)
        np.testing.assert_allclose(losses, -values * logprobs, rtol=bound)


def test_gradients_add_up_over_requests(
    daemon_for: Any, reference_for: Any, unique: Any, tmp_path: Path
) -> None:
    kind = "llama-tied"
    reference, daemon = reference_for(kind), daemon_for(kind)
    tokens = sequences(kind, model_folder(kind), reference.vocab)
    folder = tmp_path / "a"
    data = [next_token(t) for t in tokens]
    with reference.new_adapter(folder, MIXED[2], seed=3) as adapted:
        adapted.cross_entropy_backward(data)
        gradients = adapted.gradients()
    with daemon.client() as client:
        adapter = client.import_adapter(unique("sum"), folder)
        adapter.forward_backward(data[:3])
        adapter.forward(data[:2])
        adapter.forward_backward(data[3:])
        assert_gradients(checkpoints.gradients(daemon, adapter), gradients)


@pytest.mark.bf16
@pytest.mark.parametrize("kind", ("qwen3", "mistral", "qwen2", "gemma2", "gemma3"))
def test_shared_prompts_count_once_per_datum(
    kind: str, daemon_for: Any, reference_for: Any, unique: Any, tmp_path: Path
) -> None:
    """The daemon may pack completions of one prompt with a single copy of the prompt.
    Windows end inside the prompt."""
    reference, daemon = reference_for(kind), daemon_for(kind)
    prompt = random_tokens(reference.vocab, 40, 1)
    tokens = [[*prompt, *random_tokens(reference.vocab, 7 + i, i)] for i in range(4)]
    data = [
        next_token(
            t, weights=(np.arange(len(t) - 1) >= len(prompt) - 1).astype(np.float32)
        )
        for t in tokens
    ]
    folder = tmp_path / "a"
    with reference.new_adapter(folder, MIXED[1], seed=4) as adapted:
        adapted.cross_entropy_backward(data)
        gradients = adapted.gradients()
    with daemon.client() as client:
        adapter = client.import_adapter(unique("group"), folder)
        adapter.forward_backward(data)
        assert_gradients(checkpoints.gradients(daemon, adapter), gradients)


LOSSES: tuple[tuple[str, dict[str, float]], ...] = (
    ("importance_sampling", {}),
    ("ppo", {}),
    ("ppo", {"clip_low": 0.7, "clip_high": 1.05}),
    ("cispo", {"clip_low": 0.9, "clip_high": 1.1}),
    ("dro", {"beta": 0.3}),
    ("gspo", {}),
    ("gspo", {"clip_low": 0.98, "clip_high": 1.02}),
    ("stable_reinforce", {}),
    ("stable_reinforce", {"clip_high": 0.99, "beta": 0.3}),
    ("importance_sampling", {"temperature": 0.8}),
)


@pytest.mark.parametrize("kind", (SHORT_SMOLLM2, "llama-bias"))
def test_policy_losses_in_one_mixed_batch(
    kind: str, daemon_for: Any, reference_for: Any, unique: Any, tmp_path: Path
) -> None:
    reference, daemon = reference_for(kind), daemon_for(kind)
    shape = AdapterShape(4, 8.0, ("q_proj", "o_proj", "up_proj", "lm_head"))
    folder = tmp_path / "a"
    tokens = sequences(kind, model_folder(kind), reference.vocab)
    length = 14 if kind == SHORT_SMOLLM2 else 34
    tokens = [t[:length] for t in tokens[:4]]
    expected = []
    with reference.new_adapter(folder, shape, seed=6) as adapted:
        data = [_policy_datum(adapted, t, i) for i, t in enumerate(tokens)]
        # The losses share their forward passes, one per temperature.
        learners = {
            t: [adapted.logprobs(d.tokens, d.targets, t) for d in data]
            for t in {config.get("temperature", 1.0) for _, config in LOSSES}
        }
        for name, config in LOSSES:
            losses = [
                _policy_loss(logprobs, datum, name, config)
                for logprobs, datum in zip(
                    learners[config.get("temperature", 1.0)], data, strict=True
                )
            ]
            adapted.model.zero_grad()
            for loss in losses:
                loss.sum().backward(retain_graph=True)
            expected.append((losses, adapted.gradients()))
    with daemon.client() as client:
        adapters = [client.import_adapter(unique("loss"), folder) for _ in LOSSES]
        calls = [
            partial(a.forward_backward, data, name, **config)
            for a, (name, config) in zip(adapters, LOSSES, strict=True)
        ]
        replies = together(client, calls)
        measured = [checkpoints.gradients(daemon, adapter) for adapter in adapters]
    for (name, _), reply, found, (losses, gradients) in zip(
        LOSSES, replies, measured, expected, strict=True
    ):
        assert_gradients(found, gradients)
        for loss, result in zip(losses, reply.results, strict=True):
            wanted = loss.detach().numpy()
            # A loss is exp(log-ratio) times a factor of a few units. So its error is a
            # multiple of the log-probability's error.
            bound = 10.0 * tolerance.LOGPROBS
            tolerance.assert_near(result.losses, wanted, bound, name)


def _weights(count: int, seed: int) -> np.ndarray:
    """Returns signed weights, some of them zero."""
    generator = np.random.default_rng(seed)
    weights = generator.normal(1.0, 0.7, count).astype(np.float32)
    weights[generator.random(count) < 0.2] = 0.0
    return weights


def _policy_datum(adapted: Adapted, tokens: list[int], seed: int) -> Any:
    """Returns sampler logprobs near the learner's, so that some ratios are clipped.
    With seed 3, one scored token is stale: its log ratio is above the bound of 20. Its
    advantage keeps its loss comparable to the others in f32."""
    generator = np.random.default_rng(seed)
    learner = adapted.logprobs(tokens[:-1], tokens[1:]).detach().numpy()
    shift = generator.normal(0.0, 0.3, learner.shape)
    weights = _weights(len(learner), seed)
    logprobs = np.minimum(learner + shift, 0.0).astype(np.float32)
    advantages = generator.normal(0.0, 1.0, learner.shape).astype(np.float32)
    if seed == 3:
        stale = int(np.flatnonzero(weights)[0])
        logprobs[stale], advantages[stale] = -90.0, 1e-9
    return next_token(tokens, weights=weights, logprobs=logprobs, advantages=advantages)


def _policy_loss(learner: Any, datum: Any, name: str, config: Any) -> Any:
    """Returns losses [N] by the formulas of proto/weft/v1/training.proto, with
    autograd. `learner` are the adapter's log-probabilities."""
    import torch

    sampler = torch.tensor(np.asarray(datum.logprobs))
    advantages = torch.tensor(np.asarray(datum.advantages))
    weights = torch.tensor(np.asarray(datum.weights))
    ratio = torch.exp((learner - sampler).clamp(-20, 20))
    clipped = ratio.clamp(config.get("clip_low", 0.8), config.get("clip_high", 1.2))
    if name == "importance_sampling":
        objective = ratio * advantages
    elif name == "ppo":
        objective = torch.minimum(ratio * advantages, clipped * advantages)
    elif name == "gspo":
        scored = weights != 0
        mean = (learner - sampler)[scored].mean().detach()
        # GSPO-token takes the value of the sequence's ratio, and the gradient
        # through each token's log-probability.
        ratio = torch.exp((mean + learner - learner.detach()).clamp(-20, 20))
        clipped = ratio.clamp(config.get("clip_low", 0.8), config.get("clip_high", 1.2))
        objective = torch.minimum(ratio * advantages, clipped * advantages)
    elif name == "cispo":
        objective = clipped.detach() * learner * advantages
    else:
        penalty = 0.5 * config.get("beta", 0.05) * (learner - sampler) ** 2
        factor = 1.0
        if name == "stable_reinforce":
            mean = (learner - sampler)[weights != 0].mean().clamp(-20, 20)
            factor = mean.exp().detach().clamp(max=config.get("clip_high", 1.2))
        else:
            assert name == "dro"
        objective = factor * learner * advantages - penalty
    return -weights * objective
