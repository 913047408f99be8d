"""Tests models whose layers compute attention or a gated delta rule: prompts that data
share, and the layers that the backward pass computes again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import checkpoints
import daemon as daemon_module
import numpy as np
import pytest
import tolerance
from conftest import model_folder
from reference import mixed_shapes
from test_gradients import assert_gradients
from texts import next_token, random_tokens, sequences

KINDS = ("qwen3-5", "qwen3-next")
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
def test_prompts_that_data_share(
    kind: str, daemon_for: Any, reference_for: Any, unique: Any, tmp_path: Path
) -> None:
    """The data come in one request, in which they share prompts, and one by one."""
    reference, daemon = reference_for(kind), daemon_for(kind)
    data = forked_data(reference.vocab)
    folder = reference.make_adapter(tmp_path / "a", mixed_shapes(kind)[2], seed=4)
    with daemon.client() as client:
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
        difference = tolerance.max_difference(result.logprobs, wanted)
        assert difference <= tolerance.LOGPROBS


# What the backward pass computes again: nothing, all layers, or those that do not fit.
# The budget is that of a batch of which two layers fit.
MODES = {
    "off": ("--gradient-checkpointing", "off"),
    "all": ("--gradient-checkpointing", "all"),
    "auto": ("--gradient-checkpointing", "auto", "--memory-budget", "4000000"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_layers_that_are_computed_again(
    kind: str, reference_for: Any, unique: Any, tmp_path: Path
) -> None:
    reference = reference_for(kind)
    data = [next_token(t) for t in sequences(kind, Path(), reference.vocab)]
    folder = reference.make_adapter(tmp_path / "a", mixed_shapes(kind)[2], seed=4)
    measured = {}
    for mode, flags in MODES.items():
        path = tmp_path / mode
        path.mkdir()
        with (
            daemon_module.running(model_folder(kind), path, *flags) as daemon,
            daemon.client() as client,
        ):
            adapter = client.import_adapter(unique("again"), folder)
            adapter.forward_backward(data)
            measured[mode] = checkpoints.gradients(daemon, adapter)
    with reference.adapter(folder) as adapted:
        adapted.cross_entropy_backward(data)
        assert_gradients(measured["off"], adapted.gradients())
    for mode in ("all", "auto"):
        for name, gradient in measured["off"].items():
            np.testing.assert_array_equal(measured[mode][name], gradient, name)
