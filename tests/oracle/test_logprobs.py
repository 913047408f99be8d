"""Log-probabilities of ragged packed sequences against transformers + peft."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tolerance
from batching import together
from conftest import SMOLLM2, model_folder
from daemon import DTYPE
from models import TINY
from reference import MIXED
from texts import next_token, sequences

KINDS = (SMOLLM2, *TINY)


@pytest.mark.bf16
@pytest.mark.parametrize("kind", KINDS)
def test_base_logprobs_of_every_position(
    kind: str, daemon_for: Any, reference_for: Any
) -> None:
    reference = reference_for(kind)
    tokens = sequences(kind, model_folder(kind), reference.vocab)
    with daemon_for(kind).client() as client:
        results = client.forward([next_token(t) for t in tokens]).results
    for sequence, result in zip(tokens, results, strict=True):
        expected = reference.logprobs(sequence[:-1], sequence[1:])
        difference = tolerance.max_difference(result.logprobs, expected)
        bound = tolerance.logprobs(DTYPE, expected)
        assert difference <= bound, f"length {len(sequence)}"
        assert tolerance.max_difference(result.losses, -result.logprobs) == 0.0


@pytest.mark.bf16
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_mixed_in_one_batch(
    kind: str, daemon_for: Any, reference_for: Any, unique: Any, tmp_path: Path
) -> None:
    reference = reference_for(kind)
    tokens = sequences(kind, model_folder(kind), reference.vocab)
    folders = [
        reference.make_adapter(tmp_path / str(i), shape, seed=40 + i)
        for i, shape in enumerate(MIXED)
    ]
    with daemon_for(kind).client() as client:
        adapters = [client.import_adapter(unique("mixed"), f) for f in folders]
        data = [[next_token(t) for t in tokens[i:]] for i in range(len(adapters))]
        replies = together(
            client,
            [partial(a.forward, d) for a, d in zip(adapters, data, strict=True)],
        )
    base = reference.logprobs(tokens[0][:-1], tokens[0][1:])
    for index, (folder, reply) in enumerate(zip(folders, replies, strict=True)):
        with reference.adapter(folder) as adapted:
            for sequence, result in zip(tokens[index:], reply.results, strict=True):
                expected = adapted.logprobs(sequence[:-1], sequence[1:])
                expected = expected.detach().numpy()
                difference = tolerance.max_difference(result.logprobs, expected)
                bound = tolerance.logprobs(DTYPE, expected)
                assert difference <= bound, (index, len(sequence))
    assert tolerance.max_difference(replies[0].results[0].logprobs, base) > 1e-2


@pytest.mark.parametrize("kind", (SMOLLM2, "llama-untied"))
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
    assert tolerance.max_difference(result.logprobs, expected) <= tolerance.LOGPROBS
    scores = reference.logits(sequence[:-1]).astype(np.float64) / 0.7
    scores -= scores.max(axis=1, keepdims=True)
    logprobs = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
    entropies = -(np.exp(logprobs) * logprobs).sum(axis=1)
    assert tolerance.max_difference(result.entropies, entropies) <= tolerance.LOGITS


def test_soft_targets(daemon_for: Any, reference_for: Any) -> None:
    import weft

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
        difference = tolerance.max_difference(logprobs[:, column], expected)
        assert difference <= tolerance.LOGPROBS
    losses = np.asarray(result.losses).reshape(targets.shape)
    bound = tolerance.summed("f32", 1) * float(np.abs(losses).max())
    assert tolerance.max_difference(losses, -weights * logprobs) <= bound


@pytest.mark.parametrize(
    "kind", (SMOLLM2, "qwen3", "llama3-rope", "mistral", "qwen2", "gemma2", "gemma3")
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
            stop=[],
            prompt_logprobs=True,
            top_logprobs=20,
        )
    expected = reference.logprobs(prompt[:-1], prompt[1:])
    measured = np.asarray(result.prompt_logprobs)[1:]
    assert tolerance.max_difference(measured, expected) <= tolerance.LOGPROBS
    sample = result.samples[0]
    logits = reference.logits([*prompt, *sample.tokens[:-1]])[len(prompt) - 1 :]
    assert len(sample.top_logprobs) == len(sample.tokens) == 4
    for row, top in zip(logits.astype(np.float64), sample.top_logprobs, strict=True):
        logprobs = row - row.max() - np.log(np.exp(row - row.max()).sum())
        tokens = np.asarray([token for token, _ in top])
        values = np.asarray([logprob for _, logprob in top])
        assert len(tokens) == 20 and np.all(np.diff(values) <= 0.0)
        assert tolerance.max_difference(values, logprobs[tokens]) <= tolerance.LOGPROBS
        # Differences of log-probabilities are differences of logits.
        measured = values - values[0]
        logit_gaps = row[tokens] - row[tokens[0]]
        assert tolerance.max_difference(measured, logit_gaps) <= tolerance.LOGITS
        cut = np.sort(logprobs)[-20]
        assert np.all(logprobs[tokens] >= cut - tolerance.LOGPROBS)
