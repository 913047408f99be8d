"""Tests weftctl state: a backup of a live server, its check, and a start from it."""

from __future__ import annotations

import json
import subprocess
import threading
from pathlib import Path
from typing import Any

import daemon as daemon_module
import pytest
from durable import Durable, facts, image, train

WEFTCTL = daemon_module.BUILD_DIR / "client" / "weftctl" / "weftctl"


def weftctl(*words: Any) -> subprocess.CompletedProcess[str]:
    command = [str(WEFTCTL), "state", *map(str, words), "-o", "json"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_a_backup_has_what_was_answered_before_it(
    durable: Durable, tmp_path: Path
) -> None:
    daemon = durable.start("--snapshot-log-bytes", "50000")
    state, backup = durable.folder / "state", tmp_path / "backup"
    with daemon.client() as client:
        for name in ("a", "b"):
            client.create_adapter(name, rank=4, seed=1)
        for seed in range(4):
            train(client, "a", seed)
        before, known = image(durable, "a"), facts(durable, "a")
        stop = threading.Event()

        def work() -> None:
            with daemon.client() as other:
                seed = 0
                while not stop.is_set():
                    train(other, "b", seed)
                    seed += 1

        worker = threading.Thread(target=work)
        worker.start()
        copied = weftctl("backup", state, backup)
        stop.set()
        worker.join()
    assert copied.returncode == 0, copied.stderr
    assert weftctl("backup", state, backup).returncode == 1, "it exists"
    live = weftctl("verify", state)
    assert live.returncode == 0, live.stderr
    daemon.kill()

    verified = weftctl("verify", backup)
    assert verified.returncode == 0, verified.stderr
    assert json.loads(verified.stdout)["adapters"] == 2
    again = Durable(tmp_path / "again")
    again.folder.mkdir()
    restored = weftctl("restore", backup, again.folder / "state")
    assert restored.returncode == 0, restored.stderr
    again.start()
    with again.daemon:
        now = facts(again, "a")
        assert (now.optim_steps, now.epoch) == (known.optim_steps, known.epoch)
        assert image(again, "a") == before


@pytest.mark.parametrize("part", ["log", "images", "SNAPSHOT"])
def test_a_damaged_backup_is_not_restored(
    durable: Durable, tmp_path: Path, part: str
) -> None:
    daemon = durable.start()
    with daemon.client() as client:
        client.create_adapter("a", rank=4, seed=1)
        for seed in range(6):
            train(client, "a", seed)
    assert daemon.stop() == 0, "a clean stop writes a snapshot"
    daemon = durable.start()
    with daemon.client() as client:
        train(client, "a", 7)
        train(client, "a", 8)
    daemon.kill()
    state = durable.folder / "state"
    damaged = max(state.glob(f"{part}*"))
    if part == "images":
        damaged = max(damaged.iterdir())
    if part == "log":
        # Segments and snapshots are named by their first record. One that the
        # snapshot replaces may still be there, and nobody reads it.
        first = int(max(state.glob("SNAPSHOT-*")).name.split("-")[1])
        damaged = max(p for p in damaged.iterdir() if int(p.stem) <= first)
    contents = bytearray(damaged.read_bytes())
    contents[len(contents) // 2] ^= 1
    damaged.write_bytes(contents)
    refused = weftctl("restore", state, tmp_path / "to")
    assert refused.returncode == 1, refused.stdout
    assert "DATA_LOSS" in refused.stderr
    assert not (tmp_path / "to").exists()


def test_what_is_no_state_folder_is_named(tmp_path: Path) -> None:
    assert "not a state folder" in weftctl("backup", tmp_path, tmp_path / "to").stderr
    assert "NOT_FOUND" in weftctl("verify", tmp_path).stderr
    assert list(tmp_path.iterdir()) == []
