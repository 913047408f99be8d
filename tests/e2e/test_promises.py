"""Tests which state of an adapter survives a restart, for each durability. The server
tells a client if the adapter's state is not the one that the client knows."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
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
        for seed, name in enumerate(("memory", "checkpoint", "step", "never_saved")):
            durability = "checkpoint" if name == "never_saved" else name
            adapter = client.create_adapter(
                name, rank=4, seed=seed, durability=durability
            )
            assert adapter.info().durability == durability
        assert client.create_adapter("default").info().durability == "step"
        for name in ("memory", "checkpoint", "step"):
            train(client, name, 1)
        saved = {n: image(durable, n) for n in ("memory", "checkpoint", "step")}
        before = log_bytes(durable)
        for name in ("memory", "checkpoint"):
            for seed in range(3):
                train(client, name, seed)
        # The log has none of these steps.
        assert log_bytes(durable) - before < 2000
        train(client, "step", 2)
    promised = {name: facts(durable, name) for name in ("memory", "checkpoint", "step")}
    assert [promised[n].durable_step for n in promised] == [3, 3, 5]
    durable.restart()
    with durable.daemon.client() as client:
        names = [info.adapter_id for info in client.adapters()]
        assert names == ["checkpoint", "default", "step"]
    assert facts(durable, "step") == promised["step"]
    restored = facts(durable, "checkpoint")
    assert (restored.last_step, restored.durable_step) == (3, 3)
    assert restored.epoch > promised["checkpoint"].epoch
    assert restored.durability == adapters_pb2.DURABILITY_CHECKPOINT
    assert image(durable, "checkpoint") == saved["checkpoint"]
    # The error names the lost adapter's checkpoints.
    optim = training_pb2.OptimStepRequest(adapter_id="memory", step=12)
    gone = durable.call(methods.OPTIM_STEP, optim)
    assert gone.code == "NOT_FOUND" and "checkpoints 'image'" in gone.message
    # Step 9 was answered before the restart, but it does not belong to the new epoch.
    optim = training_pb2.OptimStepRequest(
        adapter_id="checkpoint", step=9, epoch=promised["checkpoint"].epoch
    )
    stale = durable.call(methods.OPTIM_STEP, optim)
    assert (
        stale.code == "FAILED_PRECONDITION" and "durable up to step 4" in stale.message
    )


def test_a_checkpointed_adapter_comes_back_from_the_latest_load_or_save(
    durable: Durable, tmp_path: Path
) -> None:
    daemon = durable.start("--snapshot-log-bytes", "1000")
    with daemon.client() as client:
        a = client.create_adapter("a", rank=4, seed=1, durability="checkpoint")
        other = client.create_adapter("other", rank=4, seed=2)
        train(client, "a", 1)
        a.resync()
        a.save("small", kind="sampler")
        train(client, "other", 2)
        other.resync()
        other.save("theirs")
        a.load("theirs", source="other")
        expected = image(durable, "other")
        for seed in range(8):  # Snapshots are written and the log is cut.
            train(client, "other", seed)
    for _ in range(2):
        durable.restart()
        with durable.daemon.client() as client:
            assert client.adapter("a").info().optim_steps == 1
    assert image(durable, "a") == expected  # image() saves checkpoint "image".
    with durable.daemon.client() as client:
        a = client.adapter("a")
        a.optim_step()
        last = a.save("mine").last_step
        client.adapter("a").delete()
        client.create_adapter("a", rank=4, seed=3, durability="checkpoint")
        client.adapter("a").load("mine")
    durable.restart()
    assert facts(durable, "a").last_step == last
    (durable.folder / "run" / "checkpoints" / "a" / "mine").rename(tmp_path / "mine")
    durable.restart()
    assert "an adapter does not come back" in durable.daemon.log_tail()
    with durable.daemon.client() as client, pytest.raises(weft.NotFound):
        client.adapter("a")
    (tmp_path / "mine").rename(durable.folder / "run" / "checkpoints" / "a" / "mine")
    durable.restart()
    assert facts(durable, "a").last_step == last


def test_a_checkpointed_adapter_comes_back_from_every_start(durable: Durable) -> None:
    # The limit is one adapter. So the replay of the log must remove `first` before it
    # restores `a`.
    daemon = durable.start("--max-adapters-per-tenant", "1")
    with daemon.client() as client:
        client.create_adapter("first", rank=4, tenant="t").delete()
        a = client.create_adapter(
            "a", rank=4, seed=1, tenant="t", durability="checkpoint"
        )
        train(client, "a", 1)
        a.resync()
        a.save("c")
    # The key of `a` is the highest in the log, and no later adapter may get this key.
    for _ in range(3):
        durable.restart()
        with durable.daemon.client() as client:
            assert client.adapter("a").info().optim_steps == 1


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
        for durability in ("step", "checkpoint"):
            with pytest.raises(weft.FailedPrecondition, match="--state-dir"):
                client.create_adapter(unique("a"), durability=durability)
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
