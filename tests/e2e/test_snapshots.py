"""Tests snapshots of the state folder: what they hold, on a disk that fails or is
short, too."""

from __future__ import annotations

import time
from pathlib import Path

from daemon import wait_until
from durable import Durable, facts, image, train
from test_recovery import SMALL_SNAPSHOTS, optim

from weft import methods
from weft._proto import adapters_pb2


def wait_for_snapshot(durable: Durable, before: list[Path]) -> None:
    folder = durable.folder / "state"
    wait_until(lambda: sorted(folder.glob("SNAPSHOT-*")) != before, "no snapshot")


def test_a_replayed_load_is_in_the_next_snapshot(durable: Durable) -> None:
    daemon = durable.start(*SMALL_SNAPSHOTS)
    with daemon.client() as client:
        client.create_adapter("a", rank=4, seed=1)
        client.create_adapter("b", rank=4, seed=2)
        train(client, "a", 1)
        client.adapter("a").save("c")
        train(client, "a", 2)
        wait_for_snapshot(durable, [])
    durable.restart("--snapshot-log-bytes", "1000000000")
    with durable.daemon.client() as client:
        client.adapter("a").load("c")
    before = image(durable, "a")
    snapshots = sorted((durable.folder / "state").glob("SNAPSHOT-*"))
    # The log that the earlier process wrote counts toward --snapshot-log-bytes, so a
    # small step makes a snapshot due.
    daemon = durable.restart(*SMALL_SNAPSHOTS)
    with daemon.client() as client:
        train(client, "b", 3)
    wait_for_snapshot(durable, snapshots)
    durable.restart()
    assert image(durable, "a") == before


def test_a_snapshot_that_failed_is_written_again(durable: Durable) -> None:
    daemon = durable.start(*SMALL_SNAPSHOTS, failpoints="files.create=err(ENOSPC)#4-5")
    with daemon.client() as client:
        client.create_adapter("a", rank=4, seed=1)
        train(client, "a", 1)
        # The snapshot is tried again after ten seconds, without new work.
        wait_for_snapshot(durable, [])
    assert "no snapshot could be written" in daemon.log_tail()
    before = image(durable, "a")
    durable.restart()
    assert image(durable, "a") == before


def test_a_short_disk_refuses_new_work_but_no_deletion(durable: Durable) -> None:
    daemon = durable.start(*SMALL_SNAPSHOTS)
    with daemon.client() as client:
        client.create_adapter("a", rank=4, seed=1).save("c")
        train(client, "a", 1)
        wait_for_snapshot(durable, [])
    durable.restart("--disk-reserve-bytes", str(1 << 50))
    assert durable.images
    repeated = optim("a", facts(durable, "a").last_step)
    assert durable.call(methods.OPTIM_STEP, repeated).code == "OK"
    create = adapters_pb2.CreateAdapterRequest(adapter_id="b", config={"rank": 4})
    for method, request in (
        (methods.OPTIM_STEP, optim("a", repeated.step + 1)),
        (methods.CREATE_ADAPTER, create),
    ):
        refused = durable.call(method, request)
        assert refused.code == "RESOURCE_EXHAUSTED", refused
        assert "the disk of the state folder is full" in refused.message
        assert f"--disk-reserve-bytes is {1 << 50}" in refused.message
    with durable.daemon.client() as client:
        client.delete_checkpoint("a", "c")
        client.delete_adapter("a")
    # A snapshot after the deletion removes the adapter's image and cuts the log.
    wait_until(lambda: not durable.images, "the image stays")
    daemon = durable.restart("--disk-reserve-bytes", "0")
    with daemon.client() as client:
        assert not client.checkpoints("a") and not client.adapters()
        client.create_adapter("b", rank=4)
        train(client, "b", 2)


def test_snapshots_that_make_no_room_become_rare(durable: Durable) -> None:
    daemon = durable.start("--disk-reserve-bytes", "0")
    with daemon.client() as client:
        client.create_adapter("a", rank=4, seed=1)
        train(client, "a", 1)
    daemon = durable.restart("--disk-reserve-bytes", str(1 << 50))
    before = daemon.log_path.read_text().count("snapshot written")
    wait_for_snapshot(durable, [])
    time.sleep(22)
    # The second one comes ten seconds after the first, the third twenty later.
    written = daemon.log_path.read_text().count("snapshot written") - before
    assert written <= 2
