"""Tests which state of an adapter survives a restart, for each durability. The server
tells a client if the adapter's state is not the one that the client knows."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import pytest
from batching import together
from durable import KIND, Durable, batch, facts, image, raw_batch, train

import weft
from weft import methods
from weft._proto import adapters_pb2, training_pb2


def log_bytes(durable: Durable) -> int:
    return sum(path.stat().st_size for path in durable.segments)


def test_each_adapter_survives_as_it_was_promised(durable: Durable) -> None:
    daemon = durable.start()
    with daemon.client() as client:
        for seed, name in enumerate(("memory", "step")):
            adapter = client.create_adapter(name, rank=4, seed=seed, durability=name)
            assert adapter.info().durability == name
            train(client, name, 1)
        assert client.create_adapter("default").info().durability == "step"
        saved = image(durable, "memory")  # Saves the checkpoint "image".
        before = log_bytes(durable)
        for seed in range(3):
            train(client, "memory", seed)
        # The log has none of these steps.
        assert log_bytes(durable) - before < 2000
        train(client, "step", 2)
    promised = {name: facts(durable, name) for name in ("memory", "step")}
    assert [promised[n].durable_step for n in promised] == [3, 4]
    durable.restart()
    with durable.daemon.client() as client:
        names = [info.adapter_id for info in client.adapters()]
        assert names == ["default", "step"]
    assert facts(durable, "step") == promised["step"]
    # The error names the lost adapter's checkpoints.
    optim = training_pb2.OptimStepRequest(adapter_id="memory", step=10)
    gone = durable.call(methods.OPTIM_STEP, optim)
    assert gone.code == "NOT_FOUND" and "checkpoints 'image'" in gone.message
    load = adapters_pb2.LoadCheckpointRequest(
        adapter_id="memory", name="image", durability=adapters_pb2.DURABILITY_MEMORY
    )
    loaded = durable.call(methods.LOAD_CHECKPOINT, load).reply.adapter
    assert (loaded.last_step, loaded.durable_step) == (3, 3)
    assert loaded.epoch > promised["memory"].epoch
    # A client of the time before the restart is told where the state is.
    optim = training_pb2.OptimStepRequest(
        adapter_id="memory", step=9, epoch=promised["memory"].epoch
    )
    stale = durable.call(methods.OPTIM_STEP, optim)
    assert (
        stale.code == "FAILED_PRECONDITION" and "durable up to step 3" in stale.message
    )
    assert image(durable, "memory") == saved


def test_batches_of_logged_adapters_keep_their_bits_beside_others(
    durable: Durable,
) -> None:
    daemon = durable.start()
    with daemon.client() as client:
        adapters = [
            client.create_adapter(f"{d}{i}", rank=4, seed=i, durability=d)
            for d in ("memory", "step")
            for i in range(2)
        ]
        for seed in range(3):
            together(
                client, [partial(a.forward_backward, batch(seed)) for a in adapters]
            )
            for adapter in adapters:
                adapter.optim_step(learning_rate=1e-2)
    before = {name: image(durable, name) for name in ("step0", "step1")}
    durable.restart()
    assert {name: image(durable, name) for name in before} == before


def test_what_a_server_cannot_keep_is_refused(daemon_for: Any, unique: Any) -> None:
    with daemon_for(KIND).client() as client:
        assert client.create_adapter(unique("a")).info().durability == "memory"
        with pytest.raises(weft.FailedPrecondition, match="--state-dir"):
            client.create_adapter(unique("a"), durability="step")
        with pytest.raises(weft.InvalidArgument, match="durability is 'disk'"):
            client.create_adapter(unique("a"), durability="disk")


def test_a_client_is_fenced_once_another_one_has_loaded(
    daemon_for: Any, unique: Any
) -> None:
    name = unique("a")
    with daemon_for(KIND).client() as one, daemon_for(KIND).client() as two:
        first = one.create_adapter(name, rank=4)
        first.forward_backward(batch(1))
        first.save("c")
        second = two.adapter(name)
        second.load("c")
        for _ in range(2):  # The client does not adopt the new epoch.
            with pytest.raises(weft.FailedPrecondition, match="epoch"):
                first.optim_step()
        assert second.info().optim_steps == 0
        assert second.optim_step().step == second.info().last_step
        first.resync()
        first.forward_backward(batch(2))
        with pytest.raises(weft.WeftError):
            second.forward_backward(batch(3))


def test_a_replayed_step_is_answered_within_its_epoch(durable: Durable) -> None:
    daemon = durable.start()
    with daemon.client() as client:
        epoch = client.create_adapter("a", rank=4).info().epoch
    step = training_pb2.ForwardBackwardRequest(
        adapter_id="a", step=1, epoch=epoch, data=raw_batch(1), loss={"function": 1}
    )
    first = durable.call(methods.FORWARD_BACKWARD, step)
    time.sleep(0.1)
    durable.restart()
    again = durable.call(methods.FORWARD_BACKWARD, step)
    assert again.replayed and again.reply == first.reply
