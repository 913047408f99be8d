"""Tests starts from unusual logs: torn, written with other limits, without stored
replies, or from a disk that failed."""

from __future__ import annotations

import json
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import raw
from batching import together
from daemon import wait_until
from durable import Durable, batch, facts, image, raw_batch, train

from weft import methods
from weft._proto import adapters_pb2, training_pb2

SLOW_REPLAY = "recovery.replay=sleep(300)"  # For each record.
SMALL_SNAPSHOTS = ("--snapshot-log-bytes", "1000")


def optim(adapter_id: str, step: int) -> Any:
    return training_pb2.OptimStepRequest(
        adapter_id=adapter_id, step=step, adamw={"learning_rate": 1e-2}
    )


def trained_image(durable: Durable) -> dict[str, bytes]:
    """Makes adapter a with eight steps and returns its image."""
    with durable.daemon.client() as client:
        client.create_adapter("a", rank=4, seed=1)
        for seed in range(8):
            train(client, "a", seed)
    return image(durable, "a")


def test_a_start_needs_no_stored_replies(durable: Durable) -> None:
    daemon = durable.start("--max-stored-reply-bytes", "0")
    with daemon.client() as client:
        client.create_adapter("a", rank=4, seed=1)
        for seed in range(3):
            train(client, "a", seed)
        client.adapter("a").snapshot("s")
    before, known = image(durable, "a"), facts(durable, "a")
    durable.restart()
    assert image(durable, "a") == before
    now = facts(durable, "a")
    # image() saves a checkpoint, which is a step.
    assert (now.optim_steps, list(now.snapshots)) == (3, ["s"])
    assert now.last_step == known.last_step + 1


def test_a_torn_import_leaves_no_adapter(durable: Durable, tmp_path: Path) -> None:
    daemon = durable.start()
    with daemon.client() as client:
        client.create_adapter("a", rank=4, seed=1).export(tmp_path / "folder")
        client.import_adapter("i", tmp_path / "folder")
    daemon.kill()
    durable.tear()
    with durable.start().client() as client:
        assert [info.adapter_id for info in client.adapters()] == ["a"]
        client.import_adapter("i", tmp_path / "folder")


def test_a_batch_that_fits_the_device_no_more_is_refused_by_flag(
    durable: Durable,
) -> None:
    daemon = durable.start()
    with daemon.client() as client:
        adapters = [client.create_adapter(f"a{i}", rank=4) for i in range(3)]
        for seed in range(4):
            together(
                client, [partial(a.forward_backward, batch(seed)) for a in adapters]
            )
    daemon.kill()
    process = durable.launch("--max-resident-adapters", "1")
    assert process.wait() != 0
    assert "--max-resident-adapters" in process.log_tail()
    durable.start("--max-resident-adapters", "3")


def test_an_adapter_serves_while_others_are_restored(durable: Durable) -> None:
    daemon = durable.start()
    with daemon.client() as client:
        for name in "ab":
            client.create_adapter(name, rank=4, seed=1)
        train(client, "a", 1)
        for seed in range(12):
            train(client, "b", seed)
        known = {name: facts(durable, name).last_step for name in "ab"}
    daemon.kill()
    daemon = durable.launch(failpoints=SLOW_REPLAY)
    daemon.wait_until_serving()
    get = adapters_pb2.GetAdapterRequest(adapter_id="b")
    create = adapters_pb2.CreateAdapterRequest(adapter_id="b")
    with daemon.client() as client:
        train(client, "a", 2)
        client.create_adapter("c", rank=2, seed=1)
        train(client, "c", 1)
        for method, request in (
            (methods.GET_ADAPTER, get),
            (methods.CREATE_ADAPTER, create),
            (methods.OPTIM_STEP, optim("b", known["b"] + 1)),
        ):
            refused = durable.call(method, request)
            assert refused.code == "UNAVAILABLE", (refused, daemon.log_tail())
            assert "grpc-retry-pushback-ms" in refused.trailers
        listed = durable.call(methods.LIST_ADAPTERS, adapters_pb2.ListAdaptersRequest())
        assert [(a.adapter_id, a.restoring) for a in listed.reply.adapters] == [
            ("a", False),
            ("b", True),
            ("c", False),
        ]
        assert "\nweft_adapters_recovering 1\n" in daemon.scrape()
    daemon.kill()  # The replay still runs, and the log has new records.
    durable.start()
    assert facts(durable, "a").last_step == known["a"] + 2
    assert facts(durable, "b").last_step == known["b"]
    assert facts(durable, "c").last_step == 2
    crashed = {name: image(durable, name) for name in "abc"}
    durable.daemon.kill()
    durable.folder = durable.folder / "calm"
    with durable.start().client() as client:
        for name, rank, seeds in (("a", 4, [1, 2]), ("b", 4, range(12)), ("c", 2, [1])):
            client.create_adapter(name, rank=rank, seed=1)
            for seed in seeds:
                train(client, name, seed)
    assert {name: image(durable, name) for name in "abc"} == crashed


def test_a_replay_that_fails_ends_the_server(durable: Durable) -> None:
    daemon = durable.start()
    with daemon.client() as client:
        client.create_adapter("a", rank=4, seed=1)
        client.create_adapter("b", rank=4, seed=2)
        for seed in range(3):
            train(client, "b", seed)
    before = image(durable, "b")
    daemon.kill()
    # A snapshot during the replay would lose the records that are not replayed yet, so
    # the daemon writes no snapshot.
    daemon = durable.launch(
        *SMALL_SNAPSHOTS,
        failpoints="recovery.replay=err(EIO)#8;recovery.replay=sleep(500)",
    )
    daemon.wait_until_serving()
    with daemon.client() as client:
        train(client, "a", 1)
    assert daemon.wait() == 1
    assert "replaying the log" in daemon.log_tail()
    durable.start()
    assert facts(durable, "a").last_step == 2
    assert image(durable, "b") == before


def test_a_drain_does_not_wait_for_the_replay(durable: Durable) -> None:
    daemon = durable.start()
    before = trained_image(durable)
    daemon.kill()
    daemon = durable.launch(failpoints=SLOW_REPLAY)
    daemon.wait_until_serving()
    known = daemon.log_path.stat().st_size
    assert daemon.stop() == 0
    assert b'"state recovered"' not in daemon.log_path.read_bytes()[known:]
    durable.start()
    assert image(durable, "a") == before


def test_what_is_refused_leaves_no_file(durable: Durable, tmp_path: Path) -> None:
    daemon = durable.start()
    with daemon.client() as client:
        a = client.create_adapter("a", rank=4, seed=1)
        a.export(tmp_path / "folder")
        a.save("c")
        client.create_adapter("b", rank=8, seed=1)
        for _ in range(3):
            with pytest.raises(Exception, match="exists"):
                client.import_adapter("a", tmp_path / "folder")
    load = adapters_pb2.LoadCheckpointRequest(
        adapter_id="b", source_adapter_id="a", name="c"
    )
    assert durable.call(methods.LOAD_CHECKPOINT, load).code == "FAILED_PRECONDITION"
    wait_until(lambda: not durable.images, "the image stays")


def test_a_save_that_was_not_answered_is_answered_when_repeated(
    durable: Durable,
) -> None:
    daemon = durable.start()
    with daemon.client() as client:
        client.create_adapter("a", rank=4, seed=1)
        train(client, "a", 1)
    save = adapters_pb2.SaveCheckpointRequest(
        adapter_id="a",
        name="c",
        step=3,
        kind="CHECKPOINT_KIND_SAMPLER",
        metadata={"loss": "0.5"},
        ttl_seconds=3600,
        keep_newest=2,
    )
    first = durable.call(methods.SAVE_CHECKPOINT, save)
    assert first.code == "OK", first.message
    durable.daemon.kill()
    durable.tear()
    durable.start()
    again = durable.call(methods.SAVE_CHECKPOINT, save)
    assert again.code == "OK", again.message
    assert again.reply.checkpoint == first.reply.checkpoint
    other = adapters_pb2.SaveCheckpointRequest(adapter_id="a", name="c", step=4)
    assert durable.call(methods.SAVE_CHECKPOINT, other).code == "ALREADY_EXISTS"


def test_a_stop_waits_for_the_replies_that_wait_for_the_disk(durable: Durable) -> None:
    daemon = durable.start(failpoints="journal.sync=sleep(1000)")
    create = adapters_pb2.CreateAdapterRequest(adapter_id="a", config={"rank": 4})
    outcomes: list[raw.Outcome] = []
    caller = threading.Thread(
        target=lambda: outcomes.append(durable.call(methods.CREATE_ADAPTER, create))
    )
    caller.start()
    daemon.wait_for_calls("CreateAdapter", 1)
    assert daemon.stop() == 0
    caller.join()
    assert [outcome.code for outcome in outcomes] == ["OK"]


def test_a_clean_stop_leaves_a_start_nothing_to_run_again(durable: Durable) -> None:
    daemon = durable.start()
    before = trained_image(durable)
    assert daemon.stop() == 0
    assert list((durable.folder / "state").glob("SNAPSHOT-*"))
    daemon = durable.start()
    recovered = [
        record
        for record in map(json.loads, daemon.log_tail().splitlines())
        if record["msg"] == "state recovered"
    ]
    # The snapshot began a new segment, which may have a settings record.
    assert recovered[-1]["records"] <= 1
    assert image(durable, "a") == before


def test_numbers_of_other_settings_are_warned_of(durable: Durable) -> None:
    daemon = durable.start("--loss-chunk-size", "64")
    durable.call(
        methods.CREATE_ADAPTER,
        adapters_pb2.CreateAdapterRequest(adapter_id="a", config={"rank": 4}),
    )
    durable.call(
        methods.FORWARD_BACKWARD,
        training_pb2.ForwardBackwardRequest(
            adapter_id="a", step=1, data=raw_batch(1), loss={"function": 1}
        ),
    )
    assert durable.call(methods.OPTIM_STEP, optim("a", 2)).code == "OK"
    daemon.kill()
    daemon = durable.start("--loss-chunk-size", "32")
    assert "loss_chunk=64" in daemon.log_tail()
    assert facts(durable, "a").last_step == 2
