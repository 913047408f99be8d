"""Tests models whose layers compute attention or a gated delta rule: prompts that data
share, and the layers that the backward pass computes again."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import checkpoints
import daemon as daemon_module
import numpy as np
import pytest
import tolerance
from conftest import model_folder
from daemon import DTYPE
from reference import mixed_shapes
from test_gradients import assert_gradients
from texts import next_token, random_tokens, sequences

import weft

KINDS = ("qwen3-5", "qwen3-5-wide", "qwen3-next")
CHUNK = 64  # The most rows of a chunk of the rule.


def forked_data(vocab: int) -> list[Any]:
    """Returns data that share prompts: forks at the edge of a chunk and inside it, and
    forks of forks. The tokens after the first fork count."""
    root = random_tokens(vocab, CHUNK, 1)
    branch = [*root, *random_tokens(vocab, 21, 2)]
    deep = [*branch, *random_tokens(vocab, CHUNK + 6, 3)]
    starts = (root, root, branch, branch, deep, deep)
    data = []
    for index, (start, length) in enumerate(
        zip(starts, (9, 2, 7, 12, 1, 8), strict=True)
    ):
        tokens = [*start, *random_tokens(vocab, length, 10 + index)]
        weights = (np.arange(len(tokens) - 1) >= len(root)).astype(np.float32)
        data.append(next_token(tokens, weights=weights))
    return data


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shares", ("true", "false"))
def test_prompts_that_data_share(
    kind: str, shares: str, reference_for: Any, unique: Any, tmp_path: Path
) -> None:
    """The data come in one request, in which they may share prompts, and one by one."""
    reference = reference_for(kind)
    data = forked_data(reference.vocab)
    folder = reference.make_adapter(tmp_path / "a", mixed_shapes(kind)[2], seed=4)
    flag = f"--share-prompts={shares}"
    (tmp_path / "weftd").mkdir()
    with (
        daemon_module.running(model_folder(kind), tmp_path / "weftd", flag) as daemon,
        daemon.client() as client,
    ):
        shared, alone = (client.import_adapter(unique("tree"), folder) for _ in "ab")
        results = shared.forward_backward(data).results
        for datum in data:
            alone.forward_backward([datum])
        measured = [checkpoints.gradients(daemon, a) for a in (shared, alone)]
    with reference.adapter(folder) as adapted:
        _, scores = adapted.scored_backward(data)
        for gradients in measured:
            assert_gradients(gradients, adapted.gradients())
    for datum, result, expected in zip(data, results, scores, strict=True):
        wanted = expected * (np.asarray(datum.weights) != 0)
        tolerance.assert_near(result.logprobs, wanted)


def gradients_of(
    kind: str, folder: Path, adapter: Path, data: list[Any], *flags: str
) -> dict[str, np.ndarray]:
    """Returns the gradients that a daemon with these flags computes."""
    folder.mkdir()
    with (
        daemon_module.running(model_folder(kind), folder, *flags) as daemon,
        daemon.client() as client,
    ):
        imported = client.import_adapter("again", adapter)
        imported.forward_backward(data)
        return checkpoints.gradients(daemon, imported)


def needed_bytes(
    kind: str, folder: Path, adapter: Path, data: list[Any], mode: str
) -> int:
    """Returns the memory that the data need in this mode."""
    flags = ("--gradient-checkpointing", mode, "--memory-budget", "1")
    with pytest.raises(weft.ResourceExhausted, match="needs") as error:
        gradients_of(kind, folder, adapter, data, *flags)
    found = re.search(r"needs (\d+) bytes", str(error.value))
    assert found is not None
    return int(found[1])


@pytest.mark.parametrize("kind", KINDS)
def test_layers_that_are_computed_again(
    kind: str, reference_for: Any, tmp_path: Path
) -> None:
    """The backward pass computes again: nothing, all layers, or those that do not fit.
    In the third case the budget lies between those of the others."""
    reference = reference_for(kind)
    data = [next_token(t) for t in sequences(kind, Path(), reference.vocab)]
    adapter = reference.make_adapter(tmp_path / "a", mixed_shapes(kind)[2], seed=4)

    def run(mode: str, *flags: str) -> dict[str, np.ndarray]:
        policy = ("--gradient-checkpointing", mode)
        return gradients_of(kind, tmp_path / mode, adapter, data, *policy, *flags)

    kept = run("off")
    least, most = (
        needed_bytes(kind, tmp_path / f"needed-{mode}", adapter, data, mode)
        for mode in ("all", "off")
    )
    assert least < most
    again = {
        "all": run("all"),
        "auto": run("auto", "--memory-budget", str((least + most) // 2)),
    }
    with reference.adapter(adapter) as adapted:
        adapted.cross_entropy_backward(data)
        assert_gradients(kept, adapted.gradients())
    for mode, gradients in again.items():
        for name, gradient in kept.items():
            np.testing.assert_array_equal(gradients[name], gradient, f"{mode} {name}")


@pytest.mark.bf16
@pytest.mark.skipif(DTYPE != "bf16", reason="compares the rounding errors of bf16")
@pytest.mark.parametrize(
    "kind,forks",
    (
        ("qwen3-5", False),
        ("qwen3-5-tied", False),
        ("qwen3-5-wide", False),
        ("qwen3-5-wide", True),
    ),
)
def test_bf16_moves_numbers_less_than_in_transformers(
    kind: str, forks: bool, both_for: Any, unique: Any, tmp_path: Path
) -> None:
    """Both sides differ from f64 by the errors of bf16, which the norms enlarge. The
    daemon rounds only the inputs of products, and transformers every result."""
    reference, daemon = both_for(kind)
    data = forked_data(reference.vocab)
    if not forks:
        data = [next_token(t) for t in sequences(kind, Path(), reference.vocab)]
    folder = reference.make_adapter(tmp_path / "a", mixed_shapes(kind)[2], seed=4)
    with daemon.client() as client:
        adapter = client.import_adapter(unique("bf16"), folder)
        results = adapter.forward_backward(data).results
        measured = checkpoints.gradients(daemon, adapter)
    with reference.adapter(folder) as adapted:
        rounded = adapted.in_bf16().step(data)
        exact = adapted.step(data)

    def worst(gradients: dict[str, np.ndarray]) -> float:
        return max(
            tolerance.relative_difference(gradients[name], gradient)
            for name, gradient in exact.gradients.items()
        )

    def scored(logprobs: list[Any]) -> np.ndarray:
        # The daemon gives 0 for tokens of weight 0.
        masks = [1 if d.weights is None else np.asarray(d.weights) != 0 for d in data]
        return np.concatenate([p * m for p, m in zip(logprobs, masks, strict=True)])

    assert worst(measured) <= worst(rounded.gradients)
    wanted = scored(exact.logprobs)
    assert tolerance.relative_difference(
        scored([result.logprobs for result in results]), wanted
    ) <= tolerance.relative_difference(scored(rounded.logprobs), wanted)
