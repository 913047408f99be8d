"""Tests the start on a damaged state folder. The server names the damaged file and the
way out, and ends. A restored backup brings all adapters back."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import daemon as daemon_module
import pytest
from durable import Durable, batch, image, train
from test_recovery import SMALL_SNAPSHOTS

WEFTCTL = daemon_module.BUILD_DIR / "client" / "weftctl" / "weftctl"


def flip(path: Path, offset: int) -> None:
    contents = bytearray(path.read_bytes())
    contents[offset] ^= 1
    path.write_bytes(contents)


def weftctl_state(*words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [WEFTCTL, "state", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def refused(durable: Durable) -> str:
    process = durable.launch("--log-format", "json")
    assert process.wait(20) == 1
    return str(process.log_tail())


def newest_snapshot(durable: Durable) -> bytes:
    try:
        return max((durable.folder / "state").glob("SNAPSHOT-*")).read_bytes()
    except (ValueError, FileNotFoundError):
        # There is no snapshot yet, or it was just replaced.
        return b""


def test_a_damaged_log_ends_the_start_and_a_backup_helps(
    durable: Durable, tmp_path: Path
) -> None:
    state, backup = durable.folder / "state", tmp_path / "backup"
    daemon = durable.start()
    with daemon.client() as client:
        for seed, name in enumerate(("a", "b")):
            client.create_adapter(name, rank=4, seed=seed)
            train(client, name, seed)
        before = {name: image(durable, name) for name in ("a", "b")}
        copied = weftctl_state("backup", state, backup)
        assert copied.returncode == 0, copied.stderr
        train(client, "a", 9)
        train(client, "b", 2)
    daemon.kill()
    segment = max(durable.segments, key=lambda path: path.stat().st_size)
    # Damages the record of the request whose data are batch(9). Others follow it.
    flip(segment, segment.read_bytes().index(batch(9)[0].tokens.tobytes()))
    log = refused(durable)
    assert f"segment {segment.name} of the log, offset " in log
    assert "`weftctl state restore BACKUP DIR`" in log
    assert log.count("`weftctl state restore") == 1
    assert "of the log, offset " in weftctl_state("verify", state).stderr

    again = Durable(tmp_path / "again")
    again.folder.mkdir()
    restored = weftctl_state("restore", backup, again.folder / "state")
    assert restored.returncode == 0, restored.stderr
    again.start()
    with again.daemon:
        assert {name: image(again, name) for name in before} == before


@pytest.mark.parametrize("how", ["missing", "short", "flipped"])
def test_an_image_that_cannot_be_read_is_named(how: str, durable: Durable) -> None:
    daemon = durable.start(*SMALL_SNAPSHOTS)
    with daemon.client() as client:
        client.create_adapter("a", rank=4, seed=1)
        while b"a" not in newest_snapshot(durable):
            train(client, "a", 7)
            time.sleep(0.05)
    daemon.stop()
    snapshot = newest_snapshot(durable)
    path = next(path for path in durable.images if path.name.encode() in snapshot)
    if how == "missing":
        path.unlink()
    elif how == "short":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        flip(path, path.stat().st_size - 1)
    checked = weftctl_state("verify", durable.folder / "state")
    assert checked.returncode == 1 and path.name in checked.stderr
    # A start does not read the blocks of every image, so it may miss a flipped byte.
    if how != "flipped":
        log = refused(durable)
        assert path.name in log and "`weftctl state restore" in log
