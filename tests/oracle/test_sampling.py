"""Compares samples with generate(), with samples in other batches, and with
Forward."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tolerance
from batching import together
from conftest import SHORT_SMOLLM2, SMOLLM2, SMOLLM2S, model_folder
from daemon import DTYPE
from experts import need_equal_choices
from reference import MIXED, mixed_shapes
from texts import passages, random_tokens

PROMPT_TOKENS = 12
# Prompt and sampled tokens together are longer than two pages. Two of SmolLM2's texts
# end earlier.
GREEDY_TOKENS = 21
FAMILIES = (
    SHORT_SMOLLM2,
    "llama3-rope",
    "qwen3-tied-sharded",
    "mistral",
    "gemma2",
    "gemma3",
    "qwen3-moe",
    "gpt-oss",
    "smollm3",
    "olmo2",
    "granite",
    "phi3",
    "glm4",
    "ministral3",
    "qwen2-5-vl",
    "qwen3-5",
    "qwen3-5-wrapped",
    "qwen3-next",
)


def prompts_of(kind: str, vocab: int) -> list[list[int]]:
    """Returns eight prompts of equal length."""
    if kind in SMOLLM2S:
        return [p[:PROMPT_TOKENS] for p in passages(model_folder(kind))]
    return [random_tokens(vocab, PROMPT_TOKENS, seed) for seed in range(8)]


def amount(kind: str, tiny: int, demo: int) -> int:
    """Returns how many tokens or prompts to sample: `demo` for SmolLM2, otherwise
    `tiny`. `demo` is smaller, because a token of SmolLM2 takes as long as hundreds of a
    tiny model. SmolLM2 has no window whose end the samples must pass."""
    return demo if kind in SMOLLM2S else tiny


def scored(adapter: Any, prompt: list[int], tokens: Any, temperature: float) -> Any:
    """Returns Forward's log-probabilities of sampled tokens."""
    import weft

    sequence = [*prompt, *(int(token) for token in tokens)]
    datum = weft.Datum.next_token(sequence, prompt_length=len(prompt))
    reply = adapter.forward([datum], temperature=temperature)
    return np.asarray(reply.results[0].logprobs)[len(prompt) - 1 :]


def test_greedy_equals_generate_of_smollm2(daemon_for: Any, reference_for: Any) -> None:
    reference = reference_for(SMOLLM2)
    prompts = prompts_of(SMOLLM2, reference.vocab)
    expected = reference.greedy(prompts, GREEDY_TOKENS)
    values: dict[str, Any] = {"max_tokens": GREEDY_TOKENS, "temperature": 0.0}
    with daemon_for(SMOLLM2).client() as client:
        results = together(
            client,
            [partial(client.sample, p, ignore_eos=True, **values) for p in prompts],
        )
        calls = [partial(client.sample, p, **values) for p in prompts[2:5]]
        stopped = [result.samples[0] for result in together(client, calls)]
    assert [list(result.samples[0].tokens) for result in results] == expected
    reasons = [sample.finish_reason for sample in stopped]
    assert reasons == ["length", "stop", "stop"]
    for sample, tokens in zip(stopped, expected[2:5], strict=True):
        ends = [i for i, token in enumerate(tokens) if token in reference.ends]
        assert list(sample.tokens) == tokens[: ends[0] + 1 if ends else None]


@pytest.mark.parametrize("kind", (SHORT_SMOLLM2, "qwen3"))
def test_seeded_samples_are_the_same_alone_and_in_company(
    kind: str, daemon_for: Any, reference_for: Any, unique: Any, tmp_path: Path
) -> None:
    reference = reference_for(kind)
    prompts = prompts_of(kind, reference.vocab)[: amount(kind, 8, 4)]
    folder = reference.make_adapter(tmp_path / "a", MIXED[2], seed=21)
    with daemon_for(kind).client() as client:
        adapter = client.import_adapter(unique("sampled"), folder)
        calls = [
            partial(
                (client if i % 2 else adapter).sample,
                prompt,
                max_tokens=amount(kind, 16, 8),
                seed=1000 + i,
                top_k=40 * (i % 3),
                ignore_eos=True,
            )
            for i, prompt in enumerate(prompts)
        ]
        alone = [call() for call in calls]
        in_company = together(client, calls)
    for one, other in zip(alone, in_company, strict=True):
        assert list(one.samples[0].tokens) == list(other.samples[0].tokens)
        tolerance.assert_near(
            one.samples[0].logprobs,
            other.samples[0].logprobs,
            tolerance.SAMPLER_VERSUS_TRAINER,
        )


def test_samples_of_one_prompt_do_not_depend_on_their_number(daemon_for: Any) -> None:
    with daemon_for("llama-tied").client() as client:
        prompt = random_tokens(320, 9, 1)
        few = client.sample(
            prompt, num_samples=2, max_tokens=20, seed=3, ignore_eos=True
        )
        many = client.sample(
            prompt, num_samples=6, max_tokens=20, seed=3, ignore_eos=True
        )
    texts = [tuple(sample.tokens) for sample in many.samples]
    assert texts[:2] == [tuple(sample.tokens) for sample in few.samples]
    assert len(set(texts)) == 6


@pytest.mark.bf16
@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("temperature", (1.0, 0.7))
def test_sampled_logprobs_equal_forwards(
    kind: str, temperature: float, both_for: Any, unique: Any, tmp_path: Path
) -> None:
    reference, daemon = both_for(kind)
    need_equal_choices(reference.config)
    prompt = prompts_of(kind, reference.vocab)[3]
    folder = reference.make_adapter(tmp_path / "a", mixed_shapes(kind)[1], seed=22)
    with daemon.client() as client:
        adapter = client.import_adapter(unique("consistent"), folder)
        for source in (client, adapter):
            result = source.sample(
                prompt,
                max_tokens=amount(kind, 40, 8),
                temperature=temperature,
                seed=5,
                ignore_eos=True,
            )
            sample = result.samples[0]
            expected = scored(source, prompt, sample.tokens, temperature)
            tolerance.assert_near(
                sample.logprobs,
                expected,
                tolerance.sampler_versus_trainer(DTYPE, expected),
            )


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_prefix_from_the_cache_changes_no_logprob(
    kind: str, daemon_for: Any, reference_for: Any, unique: Any, tmp_path: Path
) -> None:
    import weft

    reference = reference_for(kind)
    # The prompt has two whole pages and a few tokens, and is longer than the
    # windows of the tiny models.
    prompt = random_tokens(reference.vocab, 45, 31)
    folder = reference.make_adapter(tmp_path / "a", mixed_shapes(kind)[1], seed=24)
    with daemon_for(kind).client() as client:
        adapter = client.import_adapter(unique("cached"), folder)

        def check(source: Any) -> None:
            sample = source.sample(
                prompt, max_tokens=amount(kind, 20, 5), seed=5, ignore_eos=True
            ).samples[0]
            expected = scored(source, prompt, sample.tokens, 1.0)
            tolerance.assert_near(
                sample.logprobs, expected, tolerance.SAMPLER_VERSUS_TRAINER
            )

        for source in (client, adapter, client, adapter):
            check(source)
        # The step changes the weights, so that a use of the old cache would
        # show. A large step would also make rounding errors larger.
        before = scored(adapter, prompt, prompt[:20], 1.0)
        adapter.forward_backward([weft.Datum.next_token(prompt)])
        adapter.optim_step(learning_rate=5e-3)
        after = scored(adapter, prompt, prompt[:20], 1.0)
        change = tolerance.max_difference(before, after)
        assert change > 100 * tolerance.SAMPLER_VERSUS_TRAINER
        check(adapter)


def test_snapshot_of_smollm2_stays_what_it_was(
    daemon_for: Any, reference_for: Any, unique: Any, tmp_path: Path
) -> None:
    import weft

    kind = SHORT_SMOLLM2
    reference = reference_for(kind)
    prompt = prompts_of(kind, reference.vocab)[0]
    folder = reference.make_adapter(tmp_path / "a", MIXED[0], seed=23)
    values = {"max_tokens": 6, "seed": 8, "ignore_eos": True}
    with daemon_for(kind).client() as client:
        adapter = client.import_adapter(unique("pinned"), folder)
        adapter.snapshot("before")
        first = adapter.sample(prompt, snapshot="before", **values).samples[0]
        expected = scored(adapter, prompt, first.tokens, 1.0)
        tolerance.assert_near(
            first.logprobs, expected, tolerance.SAMPLER_VERSUS_TRAINER
        )
        adapter.forward_backward([weft.Datum.next_token(prompt)])
        adapter.optim_step(learning_rate=5e-2)
        again = adapter.sample(prompt, snapshot="before", **values).samples[0]
        latest = adapter.sample(prompt, **values).samples[0]
        assert list(again.tokens) == list(first.tokens)
        assert np.array_equal(again.logprobs, first.logprobs)
        assert not np.array_equal(latest.logprobs, first.logprobs)
        adapter.release_snapshot("before")
        with pytest.raises(weft.NotFound):
            adapter.sample(prompt, snapshot="before", **values)


def test_streamed_tokens_are_the_unary_ones(daemon_for: Any) -> None:
    with daemon_for("qwen3").client() as client:
        prompt = random_tokens(320, 6, 4)
        values = {"num_samples": 3, "max_tokens": 12, "seed": 9, "ignore_eos": True}
        unary = client.sample(prompt, **values)
        streamed: dict[int, list[int]] = {}
        for delta in client.sample_stream(prompt, **values):
            streamed.setdefault(delta.sample_index, []).extend(delta.tokens)
    for index, sample in enumerate(unary.samples):
        assert [int(t) for t in streamed[index]] == [int(t) for t in sample.tokens]


def test_stop_rules(daemon_for: Any) -> None:
    with daemon_for("llama-tied").client() as client:
        prompt = random_tokens(320, 6, 4)
        values: dict[str, Any] = {"max_tokens": 24, "seed": 2}
        full = client.sample(prompt, ignore_eos=True, **values).samples[0]
        tokens = [int(token) for token in full.tokens]
        assert len(tokens) == 24
        for rule in ([tokens[5]], [tokens[4:6]]):
            cut = client.sample(prompt, stop=rule, **values).samples[0]
            end = tokens.index(tokens[5]) if isinstance(rule[0], int) else 5
            assert [int(token) for token in cut.tokens] == tokens[: end + 1]
            assert cut.finish_reason == "stop"
        assert full.finish_reason == "length"


def test_stop_texts_of_smollm2(daemon_for: Any) -> None:
    with daemon_for(SHORT_SMOLLM2).client() as client:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(
            str(model_folder(SHORT_SMOLLM2) / "tokenizer.json")
        )
        prompt = passages(model_folder(SHORT_SMOLLM2))[0][:PROMPT_TOKENS]
        values: dict[str, Any] = {"max_tokens": 12, "temperature": 0.0}
        full = client.sample(prompt, ignore_eos=True, **values).samples[0]
        text = tokenizer.decode([int(token) for token in full.tokens])
        needle = text[len(text) // 2 - 3 : len(text) // 2 + 3]
        cut = client.sample(prompt, stop=[needle], **values).samples[0]
        shorter = tokenizer.decode([int(token) for token in cut.tokens])
        assert needle in shorter and text.startswith(shorter)
        assert needle not in tokenizer.decode([int(t) for t in cut.tokens[:-1]])
