"""Tests that a killed server continues where it was: nothing that it has answered
is lost, nothing is done twice, and the adapters have the same bits."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import checkpoints
import daemon as daemon_module
import models
from batching import together
from durable import VOCAB, Durable, batch, facts, image, raw_batch
from texts import random_tokens

from weft import methods
from weft._proto import adapters_pb2, training_pb2


def train_together(client: Any, adapters: list[Any], rounds: int) -> None:
    """Trains the adapters so that their steps share micro-batches."""
    for step in range(rounds):
        together(
            client,
            [
                partial(a.forward_backward, batch(10 * i + step))
                for i, a in enumerate(adapters)
            ],
        )
        for adapter in adapters:
            adapter.optim_step(learning_rate=1e-2)


def test_adapters_survive_a_kill_with_all_their_bits(durable: Durable) -> None:
    daemon = durable.start()
    with daemon.client() as client:
        adapters = [
            client.create_adapter(f"a{i}", rank=4 * (i + 1), seed=i) for i in range(3)
        ]
        train_together(client, adapters, 3)
        adapters[0].snapshot("early")
        train_together(client, adapters, 1)
        # This gradient stays in the accumulator.
        adapters[1].forward_backward(batch(77))
        adapters[2].snapshot("late")
        adapters[2].release_snapshot("late")
        client.create_adapter("gone", rank=4).delete()
        prompt = random_tokens(VOCAB, 8, 5)
        sampled = adapters[0].sample(prompt, snapshot="early", temperature=0)
    before = {a: image(durable, a) for a in ("a0", "a1", "a2")}
    known = {a: facts(durable, a) for a in before}
    daemon = durable.restart()
    assert {a: facts(durable, a) for a in known} == known
    assert {a: image(durable, a) for a in before} == before
    with daemon.client() as client:
        assert [info.adapter_id for info in client.adapters()] == [*before]
        again = client.adapter("a0").sample(prompt, snapshot="early", temperature=0)
        assert again.samples[0].tokens == sampled.samples[0].tokens


def test_a_step_is_done_once_and_answered_again_after_a_kill(durable: Durable) -> None:
    daemon = durable.start()
    with daemon.client() as client:
        client.create_adapter("a", rank=4, seed=1)
    train = training_pb2.ForwardBackwardRequest(
        adapter_id="a", step=1, data=raw_batch(3), loss={"function": 1}
    )
    optim = training_pb2.OptimStepRequest(adapter_id="a", step=2)
    score = training_pb2.ForwardRequest(
        adapter_id="a", step=3, data=raw_batch(4), loss={"function": 1}
    )
    calls = [
        (methods.FORWARD_BACKWARD, train),
        (methods.OPTIM_STEP, optim),
        (methods.FORWARD, score),
    ]
    first = [durable.call(*call) for call in calls]
    assert [outcome.code for outcome in first] == ["OK"] * 3
    for _ in range(2):
        durable.restart()
        again = [durable.call(*call) for call in calls]
        assert all(outcome.replayed for outcome in again)
        assert [o.reply for o in again] == [o.reply for o in first]
    other = training_pb2.OptimStepRequest(
        adapter_id="a", step=2, adamw={"learning_rate": 0.5}
    )
    assert durable.call(methods.OPTIM_STEP, other).code == "ALREADY_EXISTS"
    known = facts(durable, "a")
    assert (known.last_step, known.durable_step, known.optim_steps) == (3, 3, 1)


def test_a_step_that_failed_for_good_fails_so_again_after_a_kill(
    durable: Durable,
) -> None:
    daemon = durable.start()
    with daemon.client() as client:
        client.create_adapter("a", rank=4, seed=1)
    # The gradient of these losses overflows.
    bad = training_pb2.ForwardBackwardRequest(
        adapter_id="a", step=1, data=raw_batch(3, weight=3e38), loss={"function": 1}
    )
    optim = training_pb2.OptimStepRequest(adapter_id="a", step=2)
    assert durable.call(methods.FORWARD_BACKWARD, bad).code == "OK"
    first = durable.call(methods.OPTIM_STEP, optim)
    assert first.code == "FAILED_PRECONDITION", first.message
    assert first.trailers["weft-step-done"] == "1"
    durable.restart()
    again = durable.call(methods.OPTIM_STEP, optim)
    assert (again.code, again.message) == (first.code, first.message)
    assert again.trailers["weft-step-done"] == "1" and again.replayed
    assert facts(durable, "a").last_step == 2


def test_loads_and_imports_do_not_need_their_files_again(
    durable: Durable, tmp_path: Path
) -> None:
    daemon = durable.start()
    with daemon.client() as client:
        a = client.create_adapter("a", rank=4, seed=1)
        a.forward_backward(batch(1))
        a.optim_step(learning_rate=1e-2)
        a.save("c")
        a.forward_backward(batch(2))
        a.load("c")
        a.forward_backward(batch(3))
        create = adapters_pb2.LoadCheckpointRequest(
            adapter_id="b", source_adapter_id="a", name="c"
        )
        assert durable.call(methods.LOAD_CHECKPOINT, create).code == "OK"
        a.export(tmp_path / "folder")
        client.import_adapter("i", tmp_path / "folder")
    load = adapters_pb2.LoadCheckpointRequest(
        adapter_id="b", source_adapter_id="a", name="c", step=1
    )
    loaded = durable.call(methods.LOAD_CHECKPOINT, load)
    assert loaded.code == "OK", loaded.message
    before = {a: image(durable, a) for a in ("a", "b", "i")}
    known = {a: facts(durable, a) for a in before}
    for adapter in before:
        shutil.rmtree(checkpoints.folder(daemon, adapter, "image"))
    shutil.rmtree(checkpoints.folder(daemon, "a", "c"))
    durable.restart()
    assert {a: facts(durable, a) for a in known} == known
    again = durable.call(methods.LOAD_CHECKPOINT, load)
    assert again.code == "OK" and again.replayed
    for field in ("epoch", "last_step", "next_step"):
        then = getattr(loaded.reply.adapter, field)
        assert getattr(again.reply.adapter, field) == then, field
    assert {a: image(durable, a) for a in before} == before


def test_snapshots_keep_the_log_short_and_change_nothing(durable: Durable) -> None:
    daemon = durable.start(
        *("--snapshot-log-bytes", "20000", "--max-batch-tokens", "64"),
        *("--max-resident-adapters", "2", "--adapter-host-bytes", "1"),
    )
    with daemon.client() as client:
        adapters = [
            client.create_adapter(f"a{i}", rank=4 * (i + 1), seed=i) for i in range(4)
        ]
        adapters[0].snapshot("first")
        for _ in range(3):
            train_together(client, adapters, 2)
    names = [f"a{i}" for i in range(4)]
    before = {a: image(durable, a) for a in names}
    known = {a: facts(durable, a) for a in names}
    state = durable.folder / "state"
    assert list(state.glob("SNAPSHOT-*")), "no snapshot was written"
    log_bytes = sum(path.stat().st_size for path in (state / "log").iterdir())
    assert log_bytes < 200_000
    for _ in range(2):
        daemon = durable.restart()
        assert {a: facts(durable, a) for a in names} == known
        assert {a: image(durable, a) for a in names} == before
        known = {a: facts(durable, a) for a in names}
    with daemon.client() as client:
        train_together(client, [client.adapter(name) for name in names], 2)
    before = {a: image(durable, a) for a in names}
    durable.restart()
    assert {a: image(durable, a) for a in names} == before


def test_a_state_folder_of_another_model_is_refused(
    durable: Durable, tmp_path: Path
) -> None:
    durable.start()
    durable.daemon.stop()
    other = daemon_module.Daemon(
        models.tiny_model("qwen3"),
        tmp_path / "other",
        *("--state-dir", str(durable.folder / "state")),
    )
    other.launch()
    assert other.wait() != 0
    assert "model" in other.log_path.read_text()
