"""Backups and restores between folders and stores, and what `fleet list` says, while a
daemon works on the state."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import exported
import pytest
import stores
from durable import Durable, train
from members import Fleet, weftctl
from objects import Objects
from stores import Store

pytestmark = pytest.mark.skipif(
    not stores.is_installed(),
    reason="no build/store-venv: object stores were NOT tested",
)

SMALL_SNAPSHOTS = ("--snapshot-log-bytes", "50000")


def image(daemon: Any, folder: Path) -> dict[str, bytes]:
    """Returns the weights of adapter "a"."""
    with daemon.client() as client, tempfile.TemporaryDirectory(dir=folder) as made:
        tensors = exported.weights(client.adapter("a"), Path(made) / "a")
    return {name: tensor.tobytes() for name, tensor in tensors.items()}


@contextmanager
def working(daemon: Any) -> Iterator[None]:
    """Trains adapter "b" until the end, and so has snapshots written."""
    stop = threading.Event()

    def work() -> None:
        with daemon.client() as client:
            seed = 0
            while not stop.is_set():
                train(client, "b", seed)
                seed += 1

    worker = threading.Thread(target=work)
    worker.start()
    try:
        yield
    finally:
        stop.set()
        worker.join()


def test_a_state_goes_from_store_to_folder_to_store(
    fleet: Fleet, seaweedfs: Store, objects: Objects, tmp_path: Path
) -> None:
    owner = fleet.add("a", *SMALL_SNAPSHOTS)
    owner.wait_for("serving")
    with owner.client() as client:
        for name in ("a", "b"):
            client.create_adapter(name, rank=4, seed=1)
        for seed in range(3):
            train(client, "a", seed)
    before = image(owner, tmp_path)
    backup, second = tmp_path / "backup", seaweedfs.url
    with working(owner):
        weftctl(seaweedfs, "state", "backup", fleet.url, backup)
        weftctl(seaweedfs, "state", "backup", fleet.url, second)
        assert weftctl(seaweedfs, "state", "verify", fleet.url)["adapters"] == 2
        (log,) = weftctl(seaweedfs, "fleet", "list", fleet.url)
    assert (log["log"], log["epoch"], log["state"]) == (0, 1, "alive")
    assert (log["owner"], log["address"]) == ("a", owner.address)
    # All this has not disturbed the owner.
    assert image(owner, tmp_path) == before
    assert owner.stop() == 0
    (log,) = weftctl(seaweedfs, "fleet", "list", fleet.url)
    assert log["state"] == "released" and log["snapshot"] > 0

    third = seaweedfs.url
    weftctl(seaweedfs, "state", "restore", backup, third)
    for url in (second, third):
        held = objects.listing(url)
        assert weftctl(seaweedfs, "state", "verify", url)["adapters"] == 2
        assert objects.listing(url) == held
        folder = tmp_path / url.rsplit("/", 1)[1]
        with Fleet(folder, url, fleet.environment) as again:
            member = again.add("c")
            member.wait_for("serving")
            member.wait_until_restored()
            assert image(member, tmp_path) == before
            assert member.stop() == 0


def test_a_state_goes_from_a_folder_to_a_store_and_back(
    durable: Durable, seaweedfs: Store, tmp_path: Path
) -> None:
    daemon = durable.start(*SMALL_SNAPSHOTS)
    with daemon.client() as client:
        for name in ("a", "b"):
            client.create_adapter(name, rank=4, seed=1)
        train(client, "a", 0)
    before = image(daemon, tmp_path)
    url = seaweedfs.url
    with working(daemon):
        weftctl(seaweedfs, "state", "backup", durable.folder / "state", url)
    daemon.kill()
    again = Durable(tmp_path / "again")
    again.folder.mkdir()
    weftctl(seaweedfs, "state", "restore", url, again.folder / "state")
    again.start()
    with again.daemon:
        assert image(again.daemon, tmp_path) == before
