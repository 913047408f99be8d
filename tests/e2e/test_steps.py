"""Tests that numbered steps happen exactly once, in order, and durably."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import daemon as daemon_module
import exported
import numpy as np
import pytest
from models import tiny_model
from raw import Outcome, Raw, datum
from texts import next_token, random_tokens

VOCAB = 320
DATA = [datum(random_tokens(VOCAB, 20, seed)) for seed in range(2)]
OTHER = [datum(random_tokens(VOCAB, 20, 77))]
ADAMW = {"learning_rate": 1e-2}


def expect(outcome: Outcome, code: str = "OK") -> Outcome:
    assert outcome.code == code, outcome
    return outcome


def test_the_same_step_again_returns_the_same_reply(
    daemon_for: Any, unique: Any, tmp_path: Path
) -> None:
    daemon, name = daemon_for("llama-tied"), unique("once")
    with Raw(daemon.address) as raw, daemon.client() as client:
        expect(raw.create(name, rank=4, seed=3))
        first = expect(raw.forward_backward(name, DATA, step=1))
        again = expect(raw.forward_backward(name, DATA, step=1))
        assert (first.replayed, again.replayed) == (False, True)
        assert first.reply == again.reply
        step = expect(raw.optim_step(name, step=2, adamw=ADAMW))
        once = exported.saved(daemon, client.adapter(name), "once")
        # The save took its own number. Requests with the old numbers still get their
        # replies.
        repeated = expect(raw.optim_step(name, step=2, adamw=ADAMW))
        assert repeated.replayed and repeated.reply == step.reply
        assert expect(raw.forward_backward(name, DATA, step=1)).replayed
        assert exported.saved(daemon, client.adapter(name), "twice") == once


def test_the_same_number_with_another_payload_is_refused(
    daemon_for: Any, unique: Any
) -> None:
    name = unique("payload")
    with Raw(daemon_for("llama-tied").address) as raw:
        expect(raw.create(name, rank=4))
        expect(raw.forward_backward(name, DATA, step=1))
        refusal = expect(raw.forward_backward(name, OTHER, step=1), "ALREADY_EXISTS")
        assert "1" in refusal.message
        expect(raw.optim_step(name, step=1), "ALREADY_EXISTS")
        expect(raw.optim_step(name, step=2, adamw=ADAMW))
        other = {"learning_rate": 2e-2}
        expect(raw.optim_step(name, step=2, adamw=other), "ALREADY_EXISTS")
        expect(raw.forward(name, DATA, step=3))


def test_a_repetition_while_the_first_runs_joins_it(
    daemon_for: Any, unique: Any
) -> None:
    name = unique("join")
    data = [datum(random_tokens(VOCAB, 400, seed)) for seed in range(16)]
    with Raw(daemon_for("llama-tied").address) as raw, ThreadPoolExecutor(4) as pool:
        expect(raw.create(name, rank=4))
        futures = [
            pool.submit(raw.forward_backward, name, data, step=1) for _ in range(4)
        ]
        outcomes = [expect(future.result(120)) for future in futures]
        assert sum(not outcome.replayed for outcome in outcomes) == 1
        assert all(outcome.reply == outcomes[0].reply for outcome in outcomes)
        expect(raw.optim_step(name, step=2))


def test_steps_that_arrive_out_of_order_run_in_order(
    daemon_for: Any, unique: Any, tmp_path: Path
) -> None:
    daemon = daemon_for("llama-tied")
    names = [unique("in-order"), unique("out-of-order")]
    orders = [(1, 2, 3, 4), (4, 2, 3, 1)]
    with Raw(daemon.address) as raw, daemon.client() as client:
        folders = []
        for name, order in zip(names, orders, strict=True):
            expect(raw.create(name, rank=4, seed=9))
            _submit(raw, name, order)
            folders.append(exported.files(client.adapter(name), tmp_path / name))
        assert client.adapter(names[1]).info().last_step == 4
    weights = [files["adapter_model.safetensors"] for files in folders]
    assert weights[0] == weights[1]


def _submit(raw: Raw, name: str, order: tuple[int, ...]) -> None:
    """Sends four steps in the given order. Each step may wait for the others."""

    def step(number: int) -> Outcome:
        if number % 2 == 0:
            return raw.optim_step(name, step=number, adamw=ADAMW)
        data = DATA if number == 1 else OTHER
        return raw.forward_backward(name, data, step=number)

    with ThreadPoolExecutor(4) as pool:
        futures = []
        for number in order:
            futures.append(pool.submit(step, number))
            time.sleep(0.1)
        for future in futures:
            expect(future.result(60))


def test_a_gap_waits_no_longer_than_the_deadline(daemon_for: Any, unique: Any) -> None:
    name, daemon = unique("gap"), daemon_for("llama-tied")
    given_up = (
        "grpc_server_handled_total",
        'grpc_code="(?:Canceled|DeadlineExceeded)",grpc_method="ForwardBackward"',
    )
    with Raw(daemon.address) as raw:
        expect(raw.create(name, rank=4))
        before = daemon.metric(*given_up)
        start = time.monotonic()
        waiting = raw.forward_backward(name, DATA, step=2, timeout=0.5)
        expect(waiting, "DEADLINE_EXCEEDED")
        assert 0.4 < time.monotonic() - start < 5.0
        # The client's clock may end the call before the server's does.
        daemon.wait_for_metric(*given_up, before + 1)
        expect(raw.forward_backward(name, DATA, step=1))
        expect(raw.optim_step(name, step=2, adamw=ADAMW))


def test_a_save_behind_a_gap_can_be_given_up(daemon_for: Any, unique: Any) -> None:
    """If a client gives up a waiting save, the save must not run later. Another step
    may then have the save's number."""
    from weft import methods
    from weft._proto import adapters_pb2

    name = unique("given-up")
    save = adapters_pb2.SaveCheckpointRequest(adapter_id=name, name="late", step=2)
    daemon = daemon_for("llama-tied")
    with Raw(daemon.address) as raw:
        expect(raw.create(name, rank=4))
        expect(raw.call(methods.SAVE_CHECKPOINT, save, 0.5), "DEADLINE_EXCEEDED")
        # The server learns of the deadline a little later than the client.
        while 'weft_queue_depth{kind="io"} 0\n' not in daemon.scrape():
            time.sleep(0.05)
        expect(raw.forward_backward(name, DATA, step=1))
        expect(raw.optim_step(name, step=2, adamw=ADAMW))
        listed = raw.call(
            methods.LIST_CHECKPOINTS,
            adapters_pb2.ListCheckpointsRequest(adapter_id=name),
        )
        assert not expect(listed).reply.checkpoints


def test_steps_in_flight_from_one_client(daemon_for: Any, unique: Any) -> None:
    with daemon_for("llama-tied").client() as client:
        adapter = client.create_adapter(unique("flight"), rank=4)
        data = [next_token(random_tokens(VOCAB, 30, 5))]
        futures: list[Any] = []
        for _ in range(6):
            futures.append(adapter.submit.forward_backward(data))
            futures.append(adapter.submit.optim_step(learning_rate=2e-2))
        results = [future.result(120) for future in futures]
    losses = [result.metrics["loss:sum"] for result in results[::2]]
    assert [result.step for result in results] == list(range(1, 13))
    assert losses[-1] < losses[0]


def test_training_goes_on_bit_equal_after_a_crash(tmp_path: Path) -> None:
    """Saves, takes two more steps, kills (kill -9), restarts, loads, and repeats
    the two steps."""
    with daemon_module.Daemon(tiny_model("qwen3"), tmp_path / "weftd") as daemon:
        with daemon.client() as client:
            adapter = client.create_adapter("tenant", rank=8, seed=4)
            _two_steps(adapter)
            adapter.forward_backward([next_token(random_tokens(VOCAB, 12, 90))])
            adapter.save("middle")
            saved = adapter.info()
            _two_steps(adapter)
            expected = exported.saved(daemon, adapter, "end")
        daemon.kill()
        daemon.start()
        with Raw(daemon.address) as raw:
            expect(raw.load("tenant", "middle"))
        with daemon.client() as client:
            names = {checkpoint.name for checkpoint in client.checkpoints("tenant")}
            assert {"middle", "end"} <= names
            adapter = client.adapter("tenant")
            assert adapter.info().last_step == saved.last_step
            assert adapter.info().optim_steps == saved.optim_steps
            _two_steps(adapter)
            assert exported.saved(daemon, adapter, "end-again") == expected


def _two_steps(adapter: Any) -> None:
    for seed in (70, 71):
        adapter.forward_backward([next_token(random_tokens(VOCAB, 25, seed))])
        adapter.optim_step(learning_rate=1e-2, weight_decay=0.01)


def test_weights_only_load_starts_afresh(daemon_for: Any, unique: Any) -> None:
    with daemon_for("llama-tied").client() as client:
        source = client.create_adapter(unique("source"), rank=4, seed=1)
        _two_steps(source)
        source.save("v1")
        copy = client.create_adapter(unique("copy"), rank=4, seed=2)
        copy.load("v1", source=source.id, weights_only=True)
        assert copy.info().optim_steps == 0
        data = [next_token(random_tokens(VOCAB, 25, 1))]
        logprobs = [a.forward(data).results[0].logprobs for a in (source, copy)]
        assert np.array_equal(logprobs[0], logprobs[1])


def test_save_does_not_overwrite_unless_told(daemon_for: Any, unique: Any) -> None:
    import weft

    with daemon_for("llama-tied").client() as client:
        adapter = client.create_adapter(unique("kept"), rank=4)
        adapter.save("v1")
        with pytest.raises(weft.AlreadyExists):
            adapter.save("v1")
        adapter.save("v1", overwrite=True)
        client.delete_checkpoint(adapter.id, "v1")
        with pytest.raises(weft.NotFound):
            adapter.load("v1")
