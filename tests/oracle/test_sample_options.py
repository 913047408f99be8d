"""Compares samples of requests that change logits with generate() and with the logits
processors of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tolerance
import torch
from conftest import SHORT_SMOLLM2
from daemon import DTYPE
from experts import need_equal_choices
from reference import mixed_shapes
from test_sampling import amount, prompts_of
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

KINDS = (SHORT_SMOLLM2, "llama-tied", "gemma2")
# The penalties multiply a logit, and with it its error, by at most this.
REPETITION = 1.4


class Penalties(LogitsProcessor):  # type: ignore[misc]
    """OpenAI's presence and frequency penalty of the tokens behind the prompt, by the
    formula of its documentation."""

    def __init__(self, prompt_tokens: int, presence: float, frequency: float) -> None:
        self.prompt_tokens = prompt_tokens
        self.presence = presence
        self.frequency = frequency

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        counts = torch.zeros_like(scores)
        for row, tokens in enumerate(input_ids[:, self.prompt_tokens :]):
            for token in tokens:
                counts[row, token] += 1
        return scores - counts * self.frequency - (counts > 0) * self.presence


def allowed_of(vocab: int) -> list[int]:
    """Returns two thirds of the vocabulary."""
    return [token for token in range(vocab) if token % 3 != 1]


def generated(
    reference: Any, prompt: list[int], count: int, **options: Any
) -> tuple[list[int], np.ndarray]:
    """Returns generate()'s greedy tokens [S], and the log-probabilities [S, V] of the
    scores from which it took them."""
    ids = torch.tensor([prompt])
    with torch.no_grad():
        output = reference.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=count,
            output_scores=True,
            return_dict_in_generate=True,
            pad_token_id=0,
            **options,
        )
    scores = torch.stack(output.scores)[:, 0].double()
    tokens = [int(token) for token in output.sequences[0, len(prompt) :]]
    return tokens, np.asarray(torch.log_softmax(scores, dim=-1).numpy())


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_equals_generate_with_all_options(
    kind: str, daemon_for: Any, reference_for: Any
) -> None:
    reference = reference_for(kind)
    count = amount(kind, 20, 12)
    prompt = prompts_of(kind, reference.vocab)[1]
    allowed = allowed_of(reference.vocab)
    plain, _ = generated(reference, prompt, count)
    biases = {plain[0]: -1.5, plain[1]: 2.0, allowed[7]: 1.0}
    asked: dict[str, Any] = {
        "sequence_bias": {(token,): bias for token, bias in biases.items()},
        "repetition_penalty": REPETITION,
        "prefix_allowed_tokens_fn": lambda *_: allowed,
        "logits_processor": LogitsProcessorList([Penalties(len(prompt), 0.7, 0.3)]),
    }
    # The token that comes third ends a sample, but not before two thirds of it.
    end = generated(reference, prompt, 3, **asked)[0][2]
    least = count * 2 // 3
    tokens, logprobs = generated(
        reference, prompt, count, **asked, eos_token_id=end, min_new_tokens=least
    )
    assert end not in tokens[:least]
    values: dict[str, Any] = {
        "max_tokens": count,
        "temperature": 0.0,
        "logit_bias": biases,
        "repetition_penalty": REPETITION,
        "presence_penalty": 0.7,
        "frequency_penalty": 0.3,
        "allowed_token_ids": allowed,
        "min_tokens": least,
        "stop": [end],
        "ignore_eos": True,
        "top_logprobs": 5,
    }
    with daemon_for(kind).client() as client:
        sample = client.sample(prompt, **values).samples[0]
        streamed = [
            int(token)
            for delta in client.sample_stream(prompt, **values)
            for token in delta.tokens
        ]
    assert list(sample.tokens) == tokens == streamed
    expected = [row[token] for row, token in zip(logprobs, tokens, strict=True)]
    bound = REPETITION * tolerance.logprobs(DTYPE, expected)
    tolerance.assert_near(sample.logprobs, expected, bound)
    for row, top in zip(logprobs, sample.top_logprobs, strict=True):
        tolerance.assert_near([p for _, p in top], np.sort(row)[:-6:-1], bound)
        tolerance.assert_near([p for _, p in top], [row[t] for t, _ in top], bound)


@pytest.mark.parametrize("kind", KINDS)
def test_drawn_tokens_have_the_logprobs_of_the_processors(
    kind: str, daemon_for: Any, reference_for: Any, unique: Any, tmp_path: Path
) -> None:
    reference = reference_for(kind)
    need_equal_choices(reference.model.config)
    prompt = prompts_of(kind, reference.vocab)[3]
    folder = reference.make_adapter(tmp_path / "a", mixed_shapes(kind)[1], seed=22)
    with daemon_for(kind).client() as client:
        adapter = client.import_adapter(unique("penalised"), folder)
        sample = adapter.sample(
            prompt,
            max_tokens=amount(kind, 30, 8),
            temperature=0.8,
            min_p=0.02,
            logit_bias={5: 1.5},
            repetition_penalty=REPETITION,
            presence_penalty=-0.5,
            frequency_penalty=0.25,
            seed=5,
            ignore_eos=True,
        ).samples[0]
    tokens = torch.tensor([[*prompt, *(int(token) for token in sample.tokens)]])
    with reference.adapter(folder) as adapted:
        scores = adapted.all_logits(tokens[0].tolist()).detach()
    changes = LogitsProcessorList(
        [
            SequenceBiasLogitsProcessor({(5,): 1.5}),
            RepetitionPenaltyLogitsProcessor(REPETITION),
            Penalties(len(prompt), -0.5, 0.25),
            TemperatureLogitsWarper(0.8),
        ]
    )
    expected = []
    for position in range(len(prompt), tokens.shape[1]):
        seen = tokens[:, :position]
        changed = changes(seen, scores[position - 1 : position].float())
        kept = MinPLogitsWarper(0.02)(seen, changed)
        token = int(tokens[0, position])
        assert torch.isfinite(kept[0, token])
        expected.append(float(torch.log_softmax(changed.double(), dim=-1)[0, token]))
    bound = REPETITION / 0.8 * tolerance.logprobs(DTYPE, expected)
    tolerance.assert_near(sample.logprobs, expected, bound)


# Pearson's statistic has the mean d, the number of degrees of freedom, and the
# deviation sqrt(2 d). The seeds are fixed, so the test never fails by chance.
@pytest.mark.parametrize(
    "filters",
    ({"min_p": 0.4}, {"min_p": 0.2, "top_p": 0.5}, {"min_p": 0.1, "top_k": 20}),
    ids=("min_p", "top_p", "top_k"),
)
def test_draws_follow_the_truncated_distribution(
    filters: dict[str, Any], daemon_for: Any, reference_for: Any
) -> None:
    reference = reference_for("llama-tied")
    prompt = prompts_of("llama-tied", reference.vocab)[2]
    warpers = LogitsProcessorList([TemperatureLogitsWarper(0.7)])
    if "top_k" in filters:
        warpers.append(TopKLogitsWarper(filters["top_k"]))
    if "top_p" in filters:
        warpers.append(TopPLogitsWarper(filters["top_p"]))
    warpers.append(MinPLogitsWarper(filters["min_p"]))
    logits = torch.tensor(reference.logits(prompt)[-1:])
    expected = torch.softmax(warpers(torch.tensor([prompt]), logits), dim=-1)[0].numpy()
    counts = np.zeros(reference.vocab)
    with daemon_for("llama-tied").client() as client:
        for seed in range(32):
            result = client.sample(
                prompt,
                num_samples=64,
                max_tokens=1,
                temperature=0.7,
                seed=seed,
                ignore_eos=True,
                **filters,
            )
            for sample in result.samples:
                counts[int(sample.tokens[0])] += 1
    kept = expected > 0
    assert not counts[~kept].any()
    wanted = expected[kept] * counts.sum()
    freedom = len(wanted) - 1
    assert freedom >= 2
    statistic = float((((counts[kept] - wanted) ** 2) / wanted).sum())
    assert abs(statistic - freedom) < 5 * np.sqrt(2 * freedom)
