"""What a sequence's numbers depend on: itself, its adapter, and nothing else. For
every family, steps of eight adapters at once give the bits of the same steps one at a
time, on one thread, cut into micro-batches; with bases in every form. And samples have
the log-probabilities that Forward computes for their tokens, to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import exported
import models
import numpy as np
import pytest
from daemon import DEVICE, Daemon, running

import weft

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="promised on CPUs")

ADAPTERS = 8
CALLS = ADAPTERS * 4  # Of forward_backward and forward.
# Of sequences of an adapter. Some fill more rows than a kernel computes at a time.
LENGTHS = (5, 33, 2, 70)
Trained = tuple[list[Any], dict[str, bytes]]


def _data(seed: int) -> list[weft.Datum]:
    random = np.random.default_rng(seed)
    lengths = random.permutation(LENGTHS)[: 1 + seed % len(LENGTHS)]
    return [
        weft.Datum.next_token(random.integers(5, 90, length + 1)) for length in lengths
    ]


def _train(client: weft.Client, seed: int, folder: Path) -> Trained:
    """Makes two steps. Returns every number of the replies, and the weights."""
    adapter = client.create_adapter(f"a{seed}", rank=4 + seed, seed=seed)
    numbers: list[Any] = []
    for step in range(2):
        result = adapter.forward_backward(_data(10 * step + seed))
        numbers += [
            result.metrics["loss:sum"],
            *(list(d.logprobs) for d in result.results),
        ]
        optim = adapter.optim_step(learning_rate=1e-2)
        numbers.append(optim.grad_norm)
    prompt = _data(seed)[0].tokens
    for scored in (adapter.forward(_data(seed)), adapter.forward([_data(seed)[0]])):
        numbers += [list(d.logprobs) for d in scored.results]
    sample = adapter.sample(prompt, max_tokens=8, temperature=0.0, prompt_logprobs=True)
    numbers.append([list(s.tokens) + list(s.logprobs) for s in sample.samples])
    assert sample.prompt_logprobs is not None
    numbers.append([float(x) for x in sample.prompt_logprobs[1:]])
    return numbers, exported.files(adapter, folder)


def _alone(daemon: Daemon, folder: Path) -> list[Trained]:
    with daemon.client() as client:
        return [_train(client, seed, folder / str(seed)) for seed in range(ADAPTERS)]


def _together(daemon: Daemon, folder: Path) -> list[Trained]:
    with daemon.client() as client, ThreadPoolExecutor(ADAPTERS) as pool:
        started = [
            pool.submit(_train, client, seed, folder / str(seed))
            for seed in range(ADAPTERS)
        ]
        return [future.result(300) for future in started]


def _expect_same(model: Path, folder: Path, *flags: str) -> None:
    """Expects equal bits of a daemon that gets all adapters' calls at once, and of one
    that gets them one at a time and cuts them."""
    results: dict[str, list[Trained]] = {}
    batches: dict[str, float] = {}
    ways: dict[str, tuple[Callable[..., list[Trained]], tuple[str, ...]]] = {
        "alone": (_alone, ("--threads", "1", "--max-batch-tokens", "80")),
        "together": (_together, ("--threads", "2")),
    }
    for name, (run, own) in ways.items():
        with running(model, folder / name, *flags, *own) as daemon:
            results[name] = run(daemon, folder / f"{name}-files")
            batches[name] = daemon.metric("weft_batch_tokens_count", 'kind="train"')
    # The calls of several adapters did share batches, and single calls were cut.
    assert batches["together"] < CALLS < batches["alone"]
    for seed, (alone, together) in enumerate(
        zip(results["alone"], results["together"], strict=True)
    ):
        for i, (one, other) in enumerate(zip(alone[0], together[0], strict=True)):
            assert one == other, f"adapter {seed}, number {i}"
        assert alone[1] == together[1], f"adapter {seed}"


@pytest.mark.parametrize("kind", models.TINY)
def test_a_sequence_has_the_same_bits_in_every_batch(kind: str, tmp_path: Path) -> None:
    _expect_same(models.tiny_model(kind), tmp_path)


@pytest.mark.parametrize("flags", [("--dtype", "bf16"), ("--weights", "int8")])
@pytest.mark.parametrize("kind", ["llama-tied", "mixtral", "qwen3-next"])
def test_in_other_forms_of_the_base(
    kind: str, flags: tuple[str, ...], tmp_path: Path
) -> None:
    _expect_same(models.tiny_model(kind), tmp_path, *flags)


# Of prompts. Attention cuts keys at multiples of 256, and pages have 16 tokens.
PROMPTS = (5, 33, 250, 300)
DRAWN = 20  # Of a sample.
# These have a chunked form in training and prompts, and another in decoding.
RECURRENT = ("qwen3-5", "qwen3-next")
OTHERS = [kind for kind in models.TINY if not kind.startswith(RECURRENT)]
TEMPERATURES = (1.0, 0.7, 0.0)


def _expect_samples_of_forward(model: Path, folder: Path, *flags: str) -> None:
    """Expects Forward, alone, to give the bits of samples that shared their batches,
    and of prompts that ran in pieces."""

    def trained(client: weft.Client, seed: int) -> weft.Adapter:
        adapter = client.create_adapter(f"a{seed}", rank=4 + seed, seed=seed)
        adapter.forward_backward(_data(seed))
        adapter.optim_step(learning_rate=1e-2)
        return adapter

    def draw(adapter: weft.Adapter, seed: int) -> weft.SampleResult:
        random = np.random.default_rng(seed)
        length = min(PROMPTS[seed % len(PROMPTS)], context - DRAWN)
        return adapter.sample(
            random.integers(5, 90, length).tolist(),
            num_samples=2,
            max_tokens=DRAWN,
            temperature=TEMPERATURES[seed % len(TEMPERATURES)],
            seed=seed,
            ignore_eos=True,
            prompt_logprobs=True,
        )

    pieces = ("--max-batch-tokens", "128", "--threads", "2")
    with (
        running(model, folder, *flags, *pieces) as daemon,
        daemon.client() as client,
        ThreadPoolExecutor(ADAPTERS) as pool,
    ):
        context = client.info().model.context_length
        adapters = [trained(client, seed) for seed in range(ADAPTERS)]
        results = list(pool.map(draw, adapters, range(ADAPTERS)))
        for seed, (adapter, result) in enumerate(zip(adapters, results, strict=True)):
            temperature = TEMPERATURES[seed % len(TEMPERATURES)] or 1.0
            for sample in result.samples:
                scored = adapter.forward(
                    [weft.Datum.from_sample(sample)], temperature=temperature
                )
                drawn = scored.results[0].logprobs[len(sample.prompt) - 1 :]
                assert list(drawn) == list(sample.logprobs), f"adapter {seed}"
            prompt = result.samples[0].prompt
            scored = adapter.forward([weft.Datum.next_token(prompt)])
            assert result.prompt_logprobs is not None
            assert list(scored.results[0].logprobs) == [
                float(x) for x in result.prompt_logprobs[1:]
            ], f"prompt of adapter {seed}"


@pytest.mark.parametrize("kind", OTHERS)
def test_samples_have_the_bits_of_forward(kind: str, tmp_path: Path) -> None:
    _expect_samples_of_forward(models.tiny_model(kind), tmp_path)


# Rounded products, which some processors have, are not promised.
@pytest.mark.parametrize(
    "flags", [("--dtype", "bf16", "--cpu-bf16", "off"), ("--weights", "int8")]
)
@pytest.mark.parametrize("kind", ["llama-tied", "mixtral"])
def test_samples_of_other_forms_of_the_base(
    kind: str, flags: tuple[str, ...], tmp_path: Path
) -> None:
    _expect_samples_of_forward(models.tiny_model(kind), tmp_path, *flags)


@pytest.mark.parametrize("kind", OTHERS)
def test_a_shared_prompt_changes_no_logprob(kind: str, tmp_path: Path) -> None:
    """Ends of 3 to 40 tokens on prompts that fill less and more than one chunk."""
    scored, batches = [], []
    limit = ("--max-batch-tokens", "384")
    for flag in ("--share-prompts", "--no-share-prompts"):
        with (
            running(models.tiny_model(kind), tmp_path / flag, flag, *limit) as daemon,
            daemon.client() as client,
        ):
            adapter = client.create_adapter("a", rank=4, seed=1)
            context = client.info().model.context_length
            random = np.random.default_rng(1)
            for length in (90, min(300, context - 41)):
                prompt = random.integers(5, 90, length)
                ends = [random.integers(5, 90, size) for size in (3, 20, 40)]
                data = [
                    weft.Datum.next_token(np.concatenate([prompt, end])) for end in ends
                ]
                result = adapter.forward_backward(data)
                scored.append([list(d.logprobs) for d in result.results])
            batches.append(daemon.metric("weft_batch_tokens_count", 'kind="train"'))
    # Only with a shared prompt do the data of a call fit into one batch.
    assert batches[0] == 2 < batches[1]
    assert scored[:2] == scored[2:]
