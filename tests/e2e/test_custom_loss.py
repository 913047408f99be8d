"""Tests that custom losses are replayed, and let others have turns."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from daemon import processor_seconds
from durable import Durable, image

import weft


def test_a_custom_loss_is_replayed_from_the_log_alone(durable: Durable) -> None:
    def loss(logprobs: Any, a: Any, k: Any) -> tuple[Any, dict[str, Any]]:
        return ((logprobs * a).exp() * k).sum(), {"custom/k:sum": k.sum()}

    traced = weft.trace_loss(loss, a=1, k=0)
    daemon = durable.start()
    tokens = list(range(3, 20))
    with daemon.client() as client:
        adapter = client.create_adapter("a", rank=4, seed=1)
        for k in range(1, 4):
            inputs: Any = {"a": [0.25 * i for i in range(17)], "k": k}
            datum = weft.Datum(tokens, tokens, custom_inputs=inputs)
            result = adapter.forward_backward([datum], "custom", custom_loss=traced)
            assert result.metrics["custom/k:sum"] == k
            adapter.optim_step(learning_rate=1e-2)
            adapter.forward_backward([datum], "custom", custom_loss=traced)
        unfit = weft.Datum(tokens, tokens, custom_inputs={"a": [1.0, 2.0], "k": 1})
        with pytest.raises(weft.InvalidArgument, match=r"nodes\[3\] \(mul\) The size"):
            adapter.forward_backward([unfit], "custom", custom_loss=traced)
    before = image(durable, "a")
    durable.restart()
    assert image(durable, "a") == before


def of_many_calls(logprobs: Any) -> tuple[Any, dict[str, Any]]:
    for _ in range(500):
        logprobs.cumsum(0)
    return logprobs.sum(), {}


def of_many_values(logprobs: Any) -> tuple[Any, dict[str, Any]]:
    values = torch.full([1 << 20], 0.7, dtype=torch.float64, device=logprobs.device)
    for _ in range(7):
        values = torch.pow(values, 1.37)
    return logprobs.sum(), {}


@pytest.mark.parametrize("loss", [of_many_calls, of_many_values])
def test_others_have_turns_during_a_step_of_a_costly_loss(
    loss: Any, daemon_for: Any, unique: Any
) -> None:
    """The data have few tokens, so that without the loss one micro-batch takes all. The
    processor time that weftd takes is compared, because the machine may be busy."""
    datum, count = weft.Datum([3], [4]), 250
    if loss is of_many_values:
        datum, count = weft.Datum([3] * 32, np.full((32, 64), 4)), 16
    traced = weft.trace_loss(loss, logprobs=datum.targets.ndim)
    daemon = daemon_for("llama-tied")
    waits = []
    with daemon.client() as client, ThreadPoolExecutor(1) as pool:
        adapter = client.create_adapter(unique("costly"), rank=1)
        other = client.create_adapter(unique("other"), rank=1)
        start = processor_seconds(daemon.pid)
        data = [datum] * count
        step = pool.submit(adapter.forward, data, "custom", custom_loss=traced)
        while not step.done():
            before = processor_seconds(daemon.pid)
            other.sample([3], max_tokens=1)
            waits.append(processor_seconds(daemon.pid) - before)
        assert step.result().metrics["tokens:sum"] == count * datum.targets.size
        took = processor_seconds(daemon.pid) - start
    assert max(waits) < 0.6 * took, (waits, took)
