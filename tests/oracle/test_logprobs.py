"""Compares log-probabilities of ragged packed sequences with transformers."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import tolerance
from batching import together
from conftest import SHORT_SMOLLM2, SMOLLM2, model_folder
from daemon import DTYPE
from experts import need_equal_choices
from models import TINY
from texts import next_token, sequences

import weft


@pytest.mark.bf16
@pytest.mark.parametrize("kind", (SMOLLM2, *TINY))
def test_base_logprobs_of_every_position(
    kind: str, daemon_for: Any, reference_for: Any
) -> None:
    reference = reference_for(kind)
    need_equal_choices(reference.config)
    tokens = sequences(kind, model_folder(kind), reference.vocab)
    with daemon_for(kind).client() as client:
        results = client.forward([next_token(t) for t in tokens]).results
    for sequence, result in zip(tokens, results, strict=True):
        expected = reference.logprobs(sequence[:-1], sequence[1:])
        tolerance.assert_near(
            result.logprobs,
            expected,
            tolerance.logprobs(DTYPE, expected),
            f"length {len(sequence)}",
        )
        assert tolerance.max_difference(result.losses, -result.logprobs) == 0.0


def test_given_tokens_at_the_positions_of_a_prompt(
    daemon_for: Any, reference_for: Any
) -> None:
    kind = "llama-tied"
    reference = reference_for(kind)
    tokens = [int(t) for t in sequences(kind, model_folder(kind), reference.vocab)[0]]
    others = [(t + 1 + 7 * i) % reference.vocab for i, t in enumerate(tokens[1:])]
    rows = [list(pair) for pair in zip(tokens[1:], others, strict=True)]
    with daemon_for(kind).client() as client:
        scores = client.sample(
            tokens, max_tokens=1, prompt_targets=rows
        ).prompt_target_logprobs
    assert scores is not None
    for column, targets in enumerate((tokens[1:], others)):
        expected = reference.logprobs(tokens[:-1], targets)
        tolerance.assert_near(
            scores[column::2], expected, tolerance.logprobs(DTYPE, expected)
        )


def test_score_all_returns_what_weights_hide(
    daemon_for: Any, reference_for: Any, unique: Any
) -> None:
    """With score_all, tokens of weight 0 also get the reference's log-probabilities,
    but do not count in the loss."""
    kind = "llama-tied"
    reference = reference_for(kind)
    tokens = sequences(kind, model_folder(kind), reference.vocab)[0]
    whole = next_token(tokens)
    weights = np.zeros(len(tokens) - 1, np.float32)
    weights[len(weights) // 2 :] = 0.5
    hidden = weft.Datum(whole.tokens, whole.targets, weights=weights)
    with daemon_for(kind).client() as client:
        replies, norms = [], []
        for score_all in (False, True):
            adapter = client.create_adapter(unique("all"), rank=4, seed=3)
            options = {"score_all": score_all, "return_entropy": True}
            replies.append(adapter.forward_backward([hidden], **options))
            norms.append(adapter.optim_step().grad_norm)
    few, all_ = (reply.results[0] for reply in replies)
    expected = reference.logprobs(tokens[:-1], tokens[1:])
    tolerance.assert_near(all_.logprobs, expected)
    assert np.all(few.logprobs[weights == 0] == 0) and np.all(all_.entropies > 0)
    assert np.all(all_.losses[weights == 0] == 0)
    tolerance.assert_near(all_.losses, few.losses)
    assert replies[0].metrics.keys() == replies[1].metrics.keys()
    assert replies[1].metrics["tokens:sum"] == np.count_nonzero(weights)
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)


def test_scores_beside_the_steps(daemon_for: Any, unique: Any) -> None:
    """Scores with a snapshot's weights and with the latest weights. Scoring does not
    use up a step number."""
    kind = "llama-tied"
    rows = [next_token(list(range(3 + i, 30 + 2 * i))) for i in range(3)]
    with daemon_for(kind).client() as client:
        adapter = client.create_adapter(unique("beside"), rank=4, seed=3)

        def train() -> list[Any]:
            adapter.forward_backward(rows)
            adapter.optim_step(learning_rate=0.1)
            return [r.logprobs for r in adapter.forward(rows).results]

        then = train()
        adapter.snapshot("then")
        now = train()
        last_step = adapter.next_step
        tasks = [
            partial(adapter.score, rows, snapshot="then"),
            partial(adapter.score, rows),
            partial(client.forward, rows),
        ]
        old, new, base = together(client, tasks)
        with pytest.raises(weft.NotFound, match="snapshot"):
            adapter.score(rows, snapshot="never")
        assert adapter.next_step == last_step
        assert adapter.info().last_step == last_step - 1
    assert old.step == new.step == 0
    for reply, expected in ((old, then), (new, now)):
        for result, row in zip(reply.results, expected, strict=True):
            bound = tolerance.logprobs(DTYPE, row)
            tolerance.assert_near(result.logprobs, row, bound)
    moved = [
        tolerance.max_difference(now[0], other)
        for other in (then[0], base.results[0].logprobs)
    ]
    assert min(moved) > 1e-3


@pytest.mark.parametrize("kind", (SHORT_SMOLLM2, "llama-untied"))
def test_temperature_divides_the_logits(
    kind: str, daemon_for: Any, reference_for: Any
) -> None:
    reference = reference_for(kind)
    sequence = sequences(kind, model_folder(kind), reference.vocab)[0]
    with daemon_for(kind).client() as client:
        reply = client.forward(
            [next_token(sequence)], temperature=0.7, return_entropy=True
        )
    expected = reference.logprobs(sequence[:-1], sequence[1:], temperature=0.7)
    result = reply.results[0]
    tolerance.assert_near(result.logprobs, expected)
    scores = reference.logits(sequence[:-1]).astype(np.float64) / 0.7
    scores -= scores.max(axis=1, keepdims=True)
    logprobs = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
    entropies = -(np.exp(logprobs) * logprobs).sum(axis=1)
    tolerance.assert_near(result.entropies, entropies, tolerance.LOGITS)


def test_soft_targets(daemon_for: Any, reference_for: Any) -> None:
    kind = "llama-tied"
    reference = reference_for(kind)
    sequence = sequences(kind, model_folder(kind), reference.vocab)[2]
    generator = np.random.default_rng(5)
    targets = np.stack(
        [generator.permutation(reference.vocab)[:3] for _ in sequence]
    ).astype(np.int64)
    weights = generator.normal(size=targets.shape).astype(np.float32)
    with daemon_for(kind).client() as client:
        reply = client.forward([weft.Datum(sequence, targets, weights=weights)])
    result = reply.results[0]
    logprobs = np.asarray(result.logprobs).reshape(targets.shape)
    for column in range(3):
        expected = reference.logprobs(sequence, targets[:, column])
        tolerance.assert_near(logprobs[:, column], expected)
    losses = np.asarray(result.losses).reshape(targets.shape)
    bound = tolerance.summed("f32", 1) * float(np.abs(losses).max())
    tolerance.assert_near(losses, -weights * logprobs, bound)


@pytest.mark.parametrize(
    "kind",
    (SHORT_SMOLLM2, "qwen3", "llama3-rope", "mistral", "qwen2", "gemma2", "gemma3"),
)
def test_most_likely_tokens_have_the_references_logprobs(
    kind: str, daemon_for: Any, reference_for: Any
) -> None:
    reference = reference_for(kind)
    prompt = sequences(kind, model_folder(kind), reference.vocab)[0]
    with daemon_for(kind).client() as client:
        result = client.sample(
            prompt,
            max_tokens=4,
            temperature=0.0,
            ignore_eos=True,
            prompt_logprobs=True,
            top_logprobs=20,
            prompt_top_logprobs=20,
        )
    expected = reference.logprobs(prompt[:-1], prompt[1:])
    assert result.prompt_logprobs is not None
    measured = np.asarray(result.prompt_logprobs)[1:]
    tolerance.assert_near(measured, expected)
    sample = result.samples[0]
    logits = reference.logits([*prompt, *sample.tokens[:-1]])
    assert len(sample.top_logprobs) == len(sample.tokens) == 4
    listed = result.prompt_top_logprobs
    assert len(listed) == len(prompt) and not listed[0]
    for token, own, top in zip(prompt, result.prompt_logprobs, listed, strict=True):
        assert dict(top).get(token, own) == own
    tops = [[*sorted(top, key=lambda t: -t[1])] for top in listed[1:]]
    tops += sample.top_logprobs
    for row, top in zip(logits.astype(np.float64), tops, strict=True):
        logprobs = row - row.max() - np.log(np.exp(row - row.max()).sum())
        tokens = np.asarray([token for token, _ in top])
        values = np.asarray([logprob for _, logprob in top])
        assert len(tokens) == 20 and np.all(np.diff(values) <= 0.0)
        tolerance.assert_near(values, logprobs[tokens])
        # Differences of log-probabilities are differences of logits.
        measured = values - values[0]
        logit_gaps = row[tokens] - row[tokens[0]]
        tolerance.assert_near(measured, logit_gaps, tolerance.LOGITS)
        cut = np.sort(logprobs)[-20]
        assert np.all(logprobs[tokens] >= cut - tolerance.LOGPROBS)
