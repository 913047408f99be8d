"""Tests that clients with more steps under way than the queue holds get all of them
done: no step is lost, and none waits while the engine is idle."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import daemon as daemon_module
import pytest
from models import tiny_model
from raw import Outcome, Raw
from texts import next_token, random_tokens
from token_file import Tokens

import weft

VOCAB = 320
DATA = [next_token(random_tokens(VOCAB, 40, 1))]
TIMEOUT = 60.0  # Seconds.
MODEL = tiny_model("llama-tied")
HINT = 1.2  # Seconds; the most that a client waits after the server's hint.


# Four steps may wait. One more call may be under way, for the step that they wait for.
@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("max-queue-requests", 4),
        ("max-queue-requests-per-tenant", 4),
        ("max-calls-per-tenant", 5),
    ],
    ids=["queue", "tenant", "calls"],
)
def test_the_step_that_all_wait_for_is_admitted(
    tmp_path: Path, flag: str, value: int
) -> None:
    name, places = "gap", 4
    tokens = Tokens(tmp_path / "tokens")
    token = tokens.add("a", "acme", "train")
    flags = (f"--{flag}", str(value), "--auth-tokens-file", str(tokens.path))
    with (
        daemon_module.running(MODEL, tmp_path, *flags) as daemon,
        Raw(daemon.address, token) as raw,
        ThreadPoolExecutor(places) as pool,
    ):
        assert raw.create(name, rank=4).code == "OK"
        waiting = [pool.submit(raw.optim_step, name, step=2 + i) for i in range(places)]
        daemon.wait_for_metric("weft_queue_depth", 'kind="optim"', places)
        assert raw.optim_step(name, step=1).code == "OK"
        outcomes: list[Outcome] = [future.result(TIMEOUT) for future in waiting]
        assert [outcome.code for outcome in outcomes[:-1]] == ["OK"] * (places - 1)
        # The step that was farthest ahead gave its place, and its number is free.
        assert outcomes[-1].code == "RESOURCE_EXHAUSTED", outcomes
        assert int(outcomes[-1].trailers["grpc-retry-pushback-ms"]) > 0
        assert raw.optim_step(name, step=places + 1).code == "OK"


def test_a_step_too_far_ahead_is_told_to_wait(daemon_for: Any, unique: Any) -> None:
    name = unique("far")
    with Raw(daemon_for("llama-tied").address) as raw:
        assert raw.create(name, rank=4).code == "OK"
        far = raw.optim_step(name, step=258)
        assert far.code == "RESOURCE_EXHAUSTED" and "256 steps ahead" in far.message
        assert int(far.trailers["grpc-retry-pushback-ms"]) > 0


@pytest.mark.parametrize(
    ("places", "clients", "adapters", "steps"),
    [(16, 1, 1, 64), (16, 1, 1, 300), (64, 1, 64, 4), (16, 4, 2, 40), (64, 2, 1, 400)],
    ids=lambda number: str(number),
)
def test_all_steps_submitted_at_once_are_done(
    tmp_path: Path, places: int, clients: int, adapters: int, steps: int
) -> None:
    flags = "--max-queue-requests", str(places)
    with ExitStack() as stack:
        daemon = stack.enter_context(daemon_module.running(MODEL, tmp_path, *flags))
        handles = [
            stack.enter_context(
                weft.Client(daemon.address, timeout=TIMEOUT)
            ).create_adapter(f"{c}-{a}", rank=4)
            for c in range(clients)
            for a in range(adapters)
        ]
        futures: list[Future[Any]] = [
            handle.submit.forward_backward(DATA)
            for _ in range(steps)
            for handle in handles
        ]
        for future in futures:
            future.result(TIMEOUT)
        assert [handle.info().last_step for handle in handles] == [steps] * len(handles)


def test_an_answer_lets_the_next_steps_go_before_the_hint(tmp_path: Path) -> None:
    """One client, 16 places and 300 steps: at 16 steps for each hint this would take
    19 hints."""

    async def train(address: str) -> float:
        async with weft.AsyncClient(address, timeout=TIMEOUT) as client:
            adapter = await client.create_adapter("asyncio", rank=4)
            start = time.monotonic()
            await asyncio.gather(
                *(adapter.submit.optim_step(learning_rate=1e-4) for _ in range(300))
            )
            return time.monotonic() - start

    flags = "--max-queue-requests", "16"
    with daemon_module.running(MODEL, tmp_path, *flags) as daemon:
        assert asyncio.run(train(daemon.address)) < 5 * HINT
