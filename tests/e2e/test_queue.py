"""Tests that clients with more steps under way than the server has memory for get all
of them done: no step is lost, and what waits never holds what it waits for. What waits
takes no more memory than its tenant may have."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import daemon as daemon_module
import grpc
import pytest
from models import tiny_model
from payloads import PAYLOADS, custom_inputs, tokens
from raw import Raw
from texts import next_token, random_tokens
from token_file import Tokens

import weft
from weft import methods

VOCAB = 320
DATA = [next_token(random_tokens(VOCAB, 40, 1))]
TIMEOUT = 60.0  # Seconds.
MODEL = tiny_model("llama-tied")
MIB = 1 << 20


# With 4 MiB, two calls may wait, which leave room for two more; with five calls, four.
@pytest.mark.parametrize(
    ("flag", "value"),
    [("request-memory", 4 * MIB), ("max-calls-per-tenant", 5)],
    ids=["memory", "calls"],
)
def test_the_step_that_all_wait_for_is_admitted(
    tmp_path: Path, flag: str, value: int
) -> None:
    name, count = "gap", 20
    known = Tokens(tmp_path / "tokens")
    token = known.add("a", "acme", "train")
    flags = (f"--{flag}", str(value), "--auth-tokens-file", str(known.path))
    with (
        daemon_module.running(MODEL, tmp_path, *flags) as daemon,
        Raw(daemon.address, token) as raw,
        ThreadPoolExecutor(count) as pool,
    ):
        assert raw.create(name, rank=4).code == "OK"
        waiting = []
        for step in range(2, 2 + count):
            waiting.append(pool.submit(raw.optim_step, name, step=step))
            held = -1
            while held != daemon.metric("weft_queue_depth", 'kind="optim"'):
                held = sum(not future.done() for future in waiting)
        assert 2 <= held <= 5
        assert raw.optim_step(name, step=1).code == "OK"
        results = [future.result(TIMEOUT) for future in waiting]
        codes = [outcome.code for outcome in results]
        refused = ["RESOURCE_EXHAUSTED"] * (count - held)
        assert codes == ["OK"] * held + refused
        for step, outcome in enumerate(results[held:], 2 + held):
            assert int(outcome.trailers["grpc-retry-pushback-ms"]) > 0
            assert raw.optim_step(name, step=step).code == "OK"


EXPERTS = tiny_model("qwen3-moe")  # Takes each kind of payload.
ACCOUNT = 256 * MIB
BOUNDED = (
    *("--request-memory", str(ACCOUNT), "--threads", "1"),
    *("--max-batch-tokens", "256", "--no-share-prompts"),
)


@contextmanager
def growth(daemon: daemon_module.Daemon) -> Iterator[None]:
    """Checks that the process grows by no more than the account and 15 %."""
    before = daemon.peak_resident_bytes()
    yield
    assert daemon.peak_resident_bytes() - before <= 1.15 * ACCOUNT


def outcomes(calls: list[Any]) -> list[str]:
    """Returns the errors of the calls that have ended: refusals."""
    errors = [str(call.exception()) for call in calls if call.done()]
    assert all("RESOURCE_EXHAUSTED" in error for error in errors), errors
    return errors


def test_steps_behind_a_missing_one_hold_no_more_than_their_share(
    tmp_path: Path,
) -> None:
    request_type = methods.FORWARD_BACKWARD.request_type
    with (
        daemon_module.Daemon(EXPERTS, tmp_path, *BOUNDED) as daemon,
        Raw(daemon.address) as raw,
        grpc.insecure_channel(daemon.address) as channel,
        growth(daemon),
    ):
        call: Any = methods.FORWARD_BACKWARD.bind(channel)
        for payload in PAYLOADS:
            name = payload.__name__
            assert raw.create(name, rank=1).code == "OK"
            request = request_type(adapter_id=name, **payload(2))
            calls = []
            for step in range(2, 22):
                request.step = step
                calls.append(call.future(request, timeout=TIMEOUT))
                if step == 2:  # Alone, it finds room.
                    daemon.wait_for_metric("weft_queue_depth", "kind", 1)
            while not calls[-1].done():
                time.sleep(0.05)
            assert 0 < len(outcomes(calls)) < len(calls)
            for future in calls:
                future.cancel()
            # What waited is gone, and the step that it waited for is admitted.
            assert raw.optim_step(name, step=1).code == "OK"
            while daemon.metric("weft_queue_depth", "kind") > 0:
                time.sleep(0.05)


def test_steps_whose_connection_breaks_hold_no_more_than_their_share(
    tmp_path: Path,
) -> None:
    """They wait for one that runs for long, so they are accepted, and stay."""
    request_type = methods.FORWARD_BACKWARD.request_type
    requests = [request_type(adapter_id="a", **make(4)) for make in PAYLOADS]
    with (
        daemon_module.Daemon(EXPERTS, tmp_path, *BOUNDED) as daemon,
        Raw(daemon.address) as raw,
        grpc.insecure_channel(daemon.address) as channel,
        growth(daemon),
    ):
        assert raw.create("a", rank=1).code == "OK"
        call: Any = methods.FORWARD_BACKWARD.bind(channel)
        long = request_type(adapter_id="a", step=1, **tokens(4))
        running = call.future(long)
        daemon.wait_for_metric("weft_tenant_train_tokens_total", "", 4096)
        # One after another, until the share is in use.
        calls: list[Any] = []
        for request in itertools.chain([long] * 2, itertools.cycle(requests)):
            depth = daemon.metric("weft_queue_depth", "kind")
            request.step = 2 + len(calls)
            calls.append(call.future(request, timeout=TIMEOUT))
            while not calls[-1].done():
                if daemon.metric("weft_queue_depth", "kind") > depth:
                    break
            if calls[-1].done():
                break
        assert outcomes(calls) and len(calls) > 10
        for future in calls:
            future.cancel()
        get = methods.GET_ADAPTER.request_type(adapter_id="a")
        accepted = raw.call(methods.GET_ADAPTER, get).reply.adapter.next_step - 2
        assert accepted == len(calls) - 1
        assert not running.done()


def test_a_request_that_never_has_room_fails_for_good(tmp_path: Path) -> None:
    flags = ("--request-memory", str(64 * MIB))
    with (
        daemon_module.running(MODEL, tmp_path, *flags) as daemon,
        Raw(daemon.address) as raw,
    ):
        assert raw.create("a", rank=1).code == "OK"
        fields = custom_inputs(12)
        outcome = raw.forward_backward("a", fields["data"], loss=fields["loss"], step=1)
        assert outcome.code == "RESOURCE_EXHAUSTED", outcome
        assert "--request-memory" in outcome.message
        assert "grpc-retry-pushback-ms" not in outcome.trailers
        # The step has failed and keeps its number.
        assert raw.optim_step("a", step=2).code == "OK"


@pytest.mark.parametrize(
    ("memory", "clients", "adapters", "steps"),
    [(8, 1, 1, 64), (8, 1, 1, 300), (32, 1, 64, 4), (8, 4, 2, 40), (32, 2, 1, 400)],
    ids=lambda number: str(number),
)
def test_all_steps_submitted_at_once_are_done(
    tmp_path: Path, memory: int, clients: int, adapters: int, steps: int
) -> None:
    flags = "--request-memory", str(memory * MIB)
    with ExitStack() as stack:
        daemon = stack.enter_context(daemon_module.running(MODEL, tmp_path, *flags))
        handles = [
            stack.enter_context(
                weft.Client(daemon.address, timeout=2 * TIMEOUT)
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
            future.result(2 * TIMEOUT)
        assert [handle.info().last_step for handle in handles] == [steps] * len(handles)
