"""Tests that an adapter says how many tokens its gradient has, whatever becomes of the
adapter, and that a dropped gradient leaves no trace."""

from __future__ import annotations

import subprocess
from typing import Any

import daemon as daemon_module
import numpy as np
import pytest
from durable import Durable, batch, image, train

import weft


def tokens_of(data: list[Any]) -> int:
    return sum(len(datum.tokens) for datum in data)


def accumulated(server: Durable, adapter_id: str = "a") -> int:
    with server.daemon.client() as client:
        return int(client.adapter(adapter_id).info().accumulated_tokens)


def test_a_gradient_has_the_tokens_of_all_its_requests(durable: Durable) -> None:
    daemon = durable.start()
    with daemon.client() as client:
        adapter = client.create_adapter("a", rank=4, seed=1)
        parts = [batch(seed) for seed in range(6)]
        # Several requests share a micro-batch.
        pending = [adapter.submit.forward_backward(part) for part in parts]
        for one in pending:
            one.result()
        adapter.forward(parts[0])
        count = sum(map(tokens_of, parts))
        assert adapter.info().accumulated_tokens == count
        adapter.snapshot("s")  # The engine's own count, not that of the desk.
        assert adapter.info().accumulated_tokens == count
        assert adapter.save("train").accumulated_tokens == count
        assert adapter.save("weights", kind="sampler").accumulated_tokens == 0
        assert adapter.optim_step().accumulated_tokens == count
        assert adapter.info().accumulated_tokens == 0
        assert adapter.load("train").accumulated_tokens == count
        assert adapter.zero_grad().accumulated_tokens == count
        assert adapter.load("train", weights_only=True).accumulated_tokens == 0
        broken = batch(1)
        broken[0].weights = np.full(len(broken[0].tokens), 1e38, dtype=np.float32)
        for _ in range(2):
            adapter.forward_backward(broken)
        with pytest.raises(weft.FailedPrecondition, match="not finite"):
            adapter.optim_step()
        assert adapter.info().accumulated_tokens == 0


@pytest.mark.parametrize("end", ["kill", "snapshot", "load", "moved"])
def test_a_restart_knows_the_gradient(durable: Durable, end: str) -> None:
    flags = ("--max-resident-adapters", "1") if end == "moved" else ()
    daemon = durable.start(*flags)
    with daemon.client() as client:
        client.create_adapter("a", rank=4, seed=1)
        train(client, "a", 1)
        adapter = client.adapter("a")
        adapter.forward_backward(batch(2))
        if end == "snapshot":
            weftctl = daemon_module.BUILD_DIR / "client" / "weftctl" / "weftctl"
            command = [weftctl, "state", "snapshot", "--server", daemon.address]
            subprocess.run(command, check=True)
        elif end == "load":
            adapter.save("c")
            adapter.load("c")
        elif end == "moved":
            client.create_adapter("b", rank=4)
            assert adapter.info().location != "device"
    count = tokens_of(batch(2))
    assert accumulated(durable) == count
    for _ in range(2):
        durable.restart()
        assert accumulated(durable) == count
    with durable.daemon.client() as client:
        assert client.adapter("a").optim_step().accumulated_tokens == count


def test_a_dropped_gradient_leaves_no_trace(durable: Durable) -> None:
    daemon = durable.start()
    with daemon.client() as client:
        for name in "ab":
            client.create_adapter(name, rank=4, seed=1)
            train(client, name, 1)
        client.adapter("a").forward_backward(batch(5))
        dropped = client.adapter("a").zero_grad()
        assert dropped.accumulated_tokens == tokens_of(batch(5))
        assert dropped.version == client.adapter("a").info().version == 2
        for name in "ab":
            train(client, name, 2)
    expected = image(durable, "b")
    assert image(durable, "a") == expected
    durable.restart()  # It runs the log again.
    assert image(durable, "a") == expected
