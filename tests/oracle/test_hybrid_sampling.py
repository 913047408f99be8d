"""Samples from models whose layers compute attention or a gated delta rule: states of
sequences that start, fork, wait and begin with a cached prefix."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import daemon as daemon_module
import numpy as np
import pytest
import tolerance
import torch
from batching import together
from conftest import model_folder
from daemon import DTYPE
from reference import mixed_shapes
from test_sampling import scored
from texts import random_tokens

KINDS = ("qwen3-5", "qwen3-5-tied", "qwen3-next")
# A state of this model needs more than LITTLE_CACHE has.
WIDE = "qwen3-5-wide"
GREEDY_TOKENS = 40
# Two whole pages, and a part of a third.
PROMPT_TOKENS = 45
HITS = "weft_prefix_cache_hit_tokens_total"
# At least the states of a prompt and of a sample of it, and a page. So sequences wait
# for each other's states, and are preempted.
LITTLE_CACHE = ("--kv-cache-bytes", "100000", "--max-decode-sequences", "4")


@contextmanager
def sampled_from(
    kind: str, folder: Path, adapter: Path, *flags: str
) -> Iterator[tuple[Any, Any, Any]]:
    """Yields a new daemon, a client of it, and the adapter."""
    folder.mkdir()
    with (
        daemon_module.running(model_folder(kind), folder, *flags) as daemon,
        daemon.client() as client,
    ):
        yield daemon, client, client.import_adapter("sampled", adapter)


def metric(daemon: Any, name: str) -> float:
    found = re.search(rf"^{name} (\S+)$", daemon.scrape(), re.MULTILINE)
    assert found is not None, name
    return float(found[1])


@pytest.mark.parametrize("kind", (*KINDS, WIDE))
def test_greedy_equals_generate(kind: str, daemon_for: Any, reference_for: Any) -> None:
    """The second time, prompts begin with their cached prefixes."""
    reference = reference_for(kind)
    prompts = [random_tokens(reference.vocab, PROMPT_TOKENS, seed) for seed in range(8)]
    expected = reference.greedy(prompts, GREEDY_TOKENS)
    with daemon_for(kind).client() as client:
        for _ in range(2):
            calls = [
                partial(
                    client.sample,
                    prompt,
                    max_tokens=GREEDY_TOKENS,
                    temperature=0.0,
                    ignore_eos=True,
                )
                for prompt in prompts
            ]
            results = together(client, calls)
            drawn = [[int(t) for t in r.samples[0].tokens] for r in results]
            assert drawn == expected


@pytest.mark.parametrize("kind", (*KINDS, WIDE))
@pytest.mark.parametrize("piece", (1024, 24))
def test_prompts_with_one_beginning(
    kind: str, piece: int, reference_for: Any, tmp_path: Path
) -> None:
    """The second prompt stores the state where it leaves the first, and the third
    begins with it. With small pieces, prefill takes several passes."""
    reference = reference_for(kind)
    beginning = random_tokens(reference.vocab, 70, 1)
    prompts = [
        [*beginning, *random_tokens(reference.vocab, 20, 50 + i)] for i in range(3)
    ]
    folder = reference.make_adapter(tmp_path / "a", mixed_shapes(kind)[1], seed=24)
    flags = ("--max-batch-tokens", str(piece))
    with sampled_from(kind, tmp_path / "d", folder, *flags) as (daemon, client, own):
        drawn = {}
        for source in (client, own):
            hits = metric(daemon, HITS)
            drawn[source] = [
                source.sample(p, max_tokens=20, seed=5, ignore_eos=True).samples[0]
                for p in prompts
            ]
            assert metric(daemon, HITS) == hits + 64
    with reference.adapter(folder) as adapted:
        expect_logprobs(adapted, prompts, drawn[own])
    expect_logprobs(reference, prompts, drawn[client])


def expect_logprobs(model: Any, prompts: list[list[int]], samples: list[Any]) -> None:
    for prompt, sample in zip(prompts, samples, strict=True):
        expected = drawn_logprobs(model, prompt, sample)
        tolerance.assert_near(sample.logprobs, expected)


def drawn_logprobs(model: Any, prompt: list[int], sample: Any) -> np.ndarray:
    tokens = [*prompt, *(int(token) for token in sample.tokens)]
    logprobs = model.logprobs(tokens[:-1], tokens[1:])[len(prompt) - 1 :]
    return np.asarray(torch.as_tensor(logprobs).detach())


@pytest.mark.bf16
@pytest.mark.parametrize("kind", ("qwen3-5", WIDE))
def test_steps_score_as_chunks(
    kind: str, both_for: Any, unique: Any, tmp_path: Path
) -> None:
    """Samples compute the rule step by step, and Forward by chunks. On a device in bf16
    the chunks round the inputs of their products, and the steps do not. No bound
    follows from bf16 alone, because the rule's norms enlarge its errors. If each side
    is as near to f64 as transformers in bf16, the sides differ by at most twice
    transformers' error."""
    reference, daemon = both_for(kind)
    prompt = random_tokens(reference.vocab, PROMPT_TOKENS, 3)
    folder = reference.make_adapter(tmp_path / "a", mixed_shapes(kind)[1], seed=22)
    with daemon.client() as client:
        adapter = client.import_adapter(unique("steps"), folder)
        # The sequences have three chunks.
        samples = adapter.sample(
            prompt, num_samples=3, max_tokens=110, seed=5, ignore_eos=True
        ).samples
        trained = [scored(adapter, prompt, s.tokens, 1.0) for s in samples]
    sampled = np.concatenate([sample.logprobs for sample in samples])
    difference = sampled - np.concatenate(trained)
    if DTYPE == "f32":
        tolerance.assert_near(
            difference, np.zeros_like(difference), tolerance.SAMPLER_VERSUS_TRAINER
        )
        return
    with reference.adapter(folder) as adapted, torch.no_grad():
        exact, rounded = (
            np.concatenate([drawn_logprobs(model, prompt, s) for s in samples])
            for model in (adapted, adapted.in_bf16())
        )
    assert np.linalg.norm(difference) <= 2 * np.linalg.norm(rounded - exact)


@pytest.mark.parametrize("kind", KINDS)
def test_samples_wait_for_states(kind: str, reference_for: Any, tmp_path: Path) -> None:
    """Groups of several tenants draw the same with little cache as with much. The
    calls come together, and some stream."""
    reference = reference_for(kind)
    folder = reference.make_adapter(tmp_path / "a", mixed_shapes(kind)[2], seed=25)
    values: dict[str, Any] = {"max_tokens": 30, "num_samples": 3, "ignore_eos": True}
    prompts = [random_tokens(reference.vocab, 20 + 9 * i, 70 + i) for i in range(6)]

    def draw(client: Any, adapter: Any) -> list[list[list[int]]]:
        calls = []
        for seed, prompt in enumerate(prompts):
            source = adapter if seed % 2 else client
            call = partial(streamed if seed % 3 == 0 else unary, source)
            calls.append(partial(call, prompt, seed=seed, **values))
        return together(client, calls)

    drawn = {}
    for size, flags in (("much", ()), ("little", LITTLE_CACHE)):
        with sampled_from(kind, tmp_path / size, folder, *flags) as (daemon, *sides):
            drawn[size] = draw(*sides)
            assert metric(daemon, "weft_state_cache_used_bytes") == 0
            preemptions = metric(daemon, "weft_sample_preemptions_total")
            assert (preemptions > 0) == (size == "little")
    assert drawn["little"] == drawn["much"]


def unary(source: Any, *arguments: Any, **values: Any) -> list[list[int]]:
    result = source.sample(*arguments, **values)
    return [[int(token) for token in sample.tokens] for sample in result.samples]


def streamed(source: Any, *arguments: Any, **values: Any) -> list[list[int]]:
    samples: list[list[int]] = [[] for _ in range(values["num_samples"])]
    for delta in source.sample_stream(*arguments, **values):
        samples[delta.sample_index].extend(int(token) for token in delta.tokens)
    return samples
