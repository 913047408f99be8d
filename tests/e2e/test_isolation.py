"""Tests that what one tenant does leaves no trace in another."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import exported
import numpy as np
import pytest
import tolerance
from batching import together
from texts import next_token, random_tokens

VOCAB = 320
STEPS = 20


def batch(tenant: int, step: int) -> list[Any]:
    """Returns the tenant's sequences for a step. Each tenant has a few sequences of its
    own, which its adapter can learn."""
    length = 6 + 5 * (tenant % 4)
    seeds = (1000 * tenant + step % 4, 1000 * tenant + 500 + step % 3)
    return [next_token(random_tokens(VOCAB, length, seed)) for seed in seeds]


# Adapters with these targets also train the output head, through which all
# rows pass.
HEADED = ("q_proj", "down_proj", "lm_head")


def test_calls_made_together_share_a_batch(daemon_for: Any, unique: Any) -> None:
    """Tests of mixed batches rely on it. On a busy machine a call may come too late, so
    one of five attempts must succeed."""
    daemon = daemon_for("llama-tied")
    with daemon.client() as client:
        adapters = [client.create_adapter(unique("meets"), rank=4) for _ in range(4)]
        calls = [
            partial(adapter.forward_backward, batch(index, 0))
            for index, adapter in enumerate(adapters)
        ]

        def num_batches() -> float:
            return float(daemon.metric("weft_step_seconds_count", 'phase="train"'))

        def num_new() -> float:
            before = num_batches()
            together(client, calls)
            return num_batches() - before

        assert any(num_new() == 1 for _ in range(5))


def test_stepping_one_adapter_leaves_all_bytes_of_the_others(
    daemon_for: Any, unique: Any, tmp_path: Path
) -> None:
    daemon = daemon_for("llama-tied")
    with daemon.client() as client:
        adapters = [
            client.create_adapter(
                unique("bytes"), rank=rank, seed=rank, target_modules=modules
            )
            for rank, modules in ((4, HEADED), (8, HEADED), (16, None))
        ]
        # Accumulated gradients and moments must exist, so that the test sees
        # whether they change.
        for index, adapter in enumerate(adapters):
            adapter.forward_backward(batch(index, 0))
            adapter.optim_step(learning_rate=1e-2)
            adapter.forward_backward(batch(index, 1))
        before = [exported.saved(daemon, a, "before") for a in adapters]
        calls = [partial(a.forward, batch(9, 0)) for a in adapters[1:]]
        calls.append(partial(adapters[0].forward_backward, batch(0, 2)))
        together(client, calls)
        adapters[0].optim_step(learning_rate=1e-1, weight_decay=0.5)
        client.sample(random_tokens(VOCAB, 5, 1), max_tokens=5)
        after = [exported.saved(daemon, a, "after") for a in adapters]
    assert "adapter_model.safetensors" in before[0]
    assert (
        before[0]["adapter_model.safetensors"]
        != (after[0]["adapter_model.safetensors"])
    )
    assert before[1:] == after[1:]


def test_eight_clients_at_once_train_what_they_train_one_by_one(
    daemon_for: Any, unique: Any, tmp_path: Path
) -> None:
    daemon = daemon_for("llama-tied")
    alone = [_train(daemon, unique("alone"), i, None) for i in range(8)]
    barrier = threading.Barrier(8)
    names = [unique("company") for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        futures = [
            pool.submit(_train, daemon, name, i, barrier)
            for i, name in enumerate(names)
        ]
        company = [future.result(300) for future in futures]
    bound = tolerance.trained_in_company("f32")
    with daemon.client() as client:
        for i, (one, other) in enumerate(zip(alone, company, strict=True)):
            expected = exported.weights(client.adapter(one), tmp_path / f"a{i}")
            actual = exported.weights(client.adapter(other), tmp_path / f"c{i}")
            tolerance.assert_tensors(actual, expected, bound)


def test_a_failed_request_leaves_the_accumulator_as_it_was(
    daemon_for: Any, unique: Any
) -> None:
    import weft

    daemon = daemon_for("llama-tied")
    with daemon.client() as client:
        adapter = client.create_adapter(unique("failed"), rank=4, seed=1)
        adapter.forward_backward(batch(1, 1))
        before = exported.saved(daemon, adapter, "before")
        bad = weft.Datum([1, 2, 3], [2, 3, VOCAB])
        with pytest.raises(weft.InvalidArgument):
            adapter.forward_backward([*batch(1, 2), bad])
        assert exported.saved(daemon, adapter, "after") == before


def _train(daemon: Any, name: str, tenant: int, barrier: Any) -> str:
    """Runs twenty steps of one tenant over its own connection."""
    with daemon.client() as client:
        adapter = client.create_adapter(name, rank=(4, 8, 16)[tenant % 3], seed=tenant)
        for step in range(STEPS):
            if barrier is not None:
                barrier.wait(120)
            loss = adapter.forward_backward(batch(tenant, step))
            adapter.optim_step(learning_rate=5e-3)
            assert np.isfinite(loss.metrics["loss:sum"])
    return name
