"""Tests that custom losses are replayed."""

from __future__ import annotations

from typing import Any

import pytest
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
