"""Splits one model over several ranks. Compares the results with transformers and
peft, and with those of one rank."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import checkpoints
import daemon as daemon_module
import numpy as np
import pytest
import tolerance
from batching import together
from conftest import SHORT_SMOLLM2, SMOLLM2, SMOLLM2S, FirstSteps, model_folder
from parallel import EXPERT_SIZES, SIZES, need_devices
from reference import Step, mixed_shapes
from test_distill import check_distillation
from test_gradients import assert_gradients, mixed_data
from test_sampling import amount
from texts import sequences

KINDS = ("llama-tied", "qwen3", "gemma2")
PAGE_TOKENS = 16  # Tokens of a page of keys and values.


class Group(NamedTuple):
    """A daemon with several ranks, and its model."""

    kind: str
    daemon: daemon_module.Daemon


# The tests of one group run one after another, so that each daemon starts once
# and has the cores for itself.
@pytest.fixture(
    scope="module",
    params=[
        *itertools.product(KINDS, SIZES),
        # The whole demo model shows how errors add up. Its first layers show all that
        # splitting them does: nine query heads, three of keys, and a large vocabulary.
        # Ranks that only share data split none of them.
        (SMOLLM2, "tensor 2"),
        *(
            (SHORT_SMOLLM2, size)
            for size in SIZES
            if size not in ("data 2", "tensor 2")
        ),
        ("qwen3-moe", "tensor 2"),
        ("gpt-oss", "tensor 2"),
        ("qwen3-moe", "tensor 2, experts 2"),
        ("gpt-oss", "tensor 4, experts 2"),
        ("glm4", "tensor 2"),
        ("phi3", "tensor 2"),
        ("glm4-moe", "tensor 2, experts 2"),
        ("qwen3-5", "tensor 2"),
        ("qwen3-next", "tensor 2, experts 2"),
    ],
    ids=lambda group: f"{group[0]}-{group[1]}",
)
def group(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Group]:
    kind, size = request.param
    flags = (SIZES | EXPERT_SIZES)[size]
    need_devices(flags)
    folder = tmp_path_factory.mktemp("weftd-ranks")
    with daemon_module.running(model_folder(kind), folder, *flags) as daemon:
        yield Group(kind, daemon)


def test_losses_and_gradients_of_a_mixed_batch(
    group: Group,
    first_steps: FirstSteps,
    reference_for: Any,
    unique: Any,
    tmp_path: Path,
) -> None:
    """Runs two steps. The second one uses weights that an optimizer step on rank 0
    has changed, of AdamW or of Muon. What it shows does not depend on the size of the
    model, so SmolLM2 has only the first."""
    kind, daemon = group
    reference = reference_for(kind)
    tokens = sequences(kind, model_folder(kind), reference.vocab)
    folders = [
        reference.make_adapter(tmp_path / str(i), shape, seed=50 + i)
        for i, shape in enumerate(mixed_shapes(kind))
    ]
    data = mixed_data(tokens)
    with daemon.client() as client:
        adapters = [client.import_adapter(unique("ranks"), f) for f in folders]
        for step in range(1 if kind in SMOLLM2S else 2):
            calls = [
                partial(a.forward_backward, d)
                for a, d in zip(adapters, data, strict=True)
            ]
            replies = together(client, calls)
            measured = [checkpoints.gradients(daemon, adapter) for adapter in adapters]
            for index, folder in enumerate(folders):
                if step == 0 and (kind, index) in first_steps:
                    wanted = first_steps[kind, index]
                else:
                    with reference.adapter(folder) as adapted:
                        wanted = adapted.step(data[index])
                if step == 0:
                    first_steps[kind, index] = wanted
                assert_gradients(measured[index], wanted.gradients)
                assert_scores(replies[index], wanted, data[index])
            if step == 0:
                for index, adapter in enumerate(adapters):
                    optimizer = ("adamw", "muon")[index % 2]
                    adapter.optim_step(optimizer=optimizer, learning_rate=1e-3)
                    folders[index] = tmp_path / f"trained-{index}"
                    adapter.export(folders[index])


def test_a_teacher(
    group: Group, reference_for: Any, unique: Any, tmp_path: Path
) -> None:
    """Ranks share the vocabulary of both models, or the data of the students."""
    import weft

    kind, daemon = group
    # Four of SmolLM2's layers give random tokens log-probabilities of -50, which f32
    # rounds by more than the bound.
    if kind not in ("gemma2", "qwen3-moe"):
        pytest.skip("two models have all that a teacher changes")
    check_distillation(
        "js", kind, daemon, reference_for(kind), unique, tmp_path, weft.Teacher
    )


@pytest.fixture(scope="module")
def of_one_rank() -> dict[str, list[Any]]:
    """Caches the samples of one rank by kind, because they are the same for all
    sizes."""
    return {}


def assert_scores(reply: Any, wanted: Step, data: list[Any]) -> None:
    for result, logprobs, datum in zip(
        reply.results, wanted.logprobs, data, strict=True
    ):
        logprobs = logprobs * (datum.weights != 0)
        tolerance.assert_near(result.logprobs, logprobs)
    assert reply.metrics["loss:sum"] == pytest.approx(wanted.loss, rel=1e-4)


def test_sampling_is_that_of_one_rank(
    group: Group,
    of_one_rank: dict[str, list[Any]],
    daemon_for: Any,
    reference_for: Any,
    unique: Any,
    tmp_path: Path,
) -> None:
    """Samples the base model and an adapter, each twice and with several samples per
    prompt. The prompt ends inside a page, so the samples copy the page. The second
    call finds the prompt's full pages in the prefix cache."""
    kind = group.kind
    reference = reference_for(kind)
    prompt = sequences(kind, model_folder(kind), reference.vocab)[3][:-3]
    assert len(prompt) > PAGE_TOKENS and len(prompt) % PAGE_TOKENS
    folder = reference.make_adapter(tmp_path / "a", mixed_shapes(kind)[1], seed=5)
    options = {
        "max_tokens": amount(kind, 6, 3),
        "temperature": 0.0,
        "ignore_eos": True,
        "num_samples": 3,
    }
    # Only the first rank changes logits.
    changes: Any = {
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.5,
        "allowed_token_ids": range(0, reference.vocab, 2),
    }

    def draw(daemon: daemon_module.Daemon) -> list[Any]:
        with daemon.client() as client:
            adapter = client.import_adapter(unique("ranks"), folder)
            return [
                source.sample(prompt, prompt_logprobs=scores_prompt, **options)
                for source in (client, adapter)
                for scores_prompt in (True, False)
            ] + [adapter.sample(prompt, **options, **changes)]

    if kind not in of_one_rank:
        of_one_rank[kind] = draw(daemon_for(kind))
    for own, other in zip(draw(group.daemon), of_one_rank[kind], strict=True):
        if other.prompt_logprobs is not None:
            tolerance.assert_near(own.prompt_logprobs, other.prompt_logprobs)
        for sample, wanted in zip(own.samples, other.samples, strict=True):
            np.testing.assert_array_equal(sample.tokens, wanted.tokens)
            tolerance.assert_near(sample.logprobs, wanted.logprobs)
    page = group.daemon.scrape()
    hits = re.search(r"^weft_prefix_cache_hit_tokens_total (\S+)$", page, re.MULTILINE)
    assert hits is not None and float(hits[1]) >= 2 * PAGE_TOKENS
