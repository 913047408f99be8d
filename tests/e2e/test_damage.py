"""Tests the start on a damaged state folder. The server names the damaged adapters and
ends. With --recover-adapter it starts without them and keeps their files."""

from __future__ import annotations

import subprocess
import time
from functools import partial
from pathlib import Path

import daemon as daemon_module
import pytest
from batching import together
from durable import Durable, batch, image, train
from test_recovery import SMALL_SNAPSHOTS

WEFTCTL = daemon_module.BUILD_DIR / "client" / "weftctl" / "weftctl"
# After this many seconds the next record lists all adapters.
CENSUS = 1.1


def damage(path: Path, offset: int) -> None:
    contents = bytearray(path.read_bytes())
    contents[offset] ^= 1
    path.write_bytes(contents)


def damage_request(durable: Durable, seed: int) -> None:
    """Damages the record of the request whose data are batch(seed)."""
    segment = max(durable.segments, key=lambda path: path.stat().st_size)
    data = batch(seed)[0].tokens.tobytes()
    damage(segment, segment.read_bytes().index(data))


def refused(durable: Durable, *flags: str) -> str:
    process = durable.launch(*flags)
    assert process.wait(20) == 1
    return str(process.log_tail())


def newest_snapshot(durable: Durable) -> bytes:
    try:
        return max((durable.folder / "state").glob("SNAPSHOT-*")).read_bytes()
    except (ValueError, FileNotFoundError):
        # There is no snapshot yet, or it was just replaced.
        return b""


def sides(durable: Durable) -> list[Path]:
    return sorted((durable.folder / "state").glob("set-aside/*"))


@pytest.fixture
def trained(durable: Durable) -> Durable:
    """Has two adapters whose gradients share batches, and a third that is trained
    alone."""
    daemon = durable.start()
    with daemon.client() as client:
        adapters = [
            client.create_adapter(name, rank=4, seed=i)
            for i, name in enumerate(("first", "wounded", "third"))
        ]
        train(client, "third", 1)
        for seed in range(2):
            together(
                client, [partial(a.forward_backward, batch(seed)) for a in adapters[:2]]
            )
            for adapter in adapters[:2]:
                adapter.optim_step(learning_rate=1e-2)
    return durable


def test_a_hole_in_the_log_costs_only_the_adapter_that_is_given_up(
    trained: Durable,
) -> None:
    before = {name: image(trained, name) for name in ("first", "third")}
    with trained.daemon.client() as client:
        client.adapter("wounded").forward_backward(batch(9))
        time.sleep(CENSUS)
        train(client, "third", 2)
        before["third"] = image(trained, "third")
    trained.daemon.kill()
    damage_request(trained, 9)
    log = refused(trained, "--log-format", "json")
    assert "adapter 'wounded': records are lost" in log
    assert "'first'" not in log and "'third'" not in log
    assert "--recover-adapter" in log
    assert "adapter 'wounded'" in refused(trained, "--recover-adapter", "third")
    assert not sides(trained)

    daemon = trained.start("--recover-adapter", "wounded")
    with daemon.client() as client:
        assert [a.adapter_id for a in client.adapters()] == ["first", "third"]
        assert client.adapter("first").info().optim_steps == 2
    # The replay runs the batch without the lost adapter. The bits do not change,
    # because the batch has few rows (src/ops/matmul.h).
    assert {name: image(trained, name) for name in before} == before
    (side,) = sides(trained)
    assert list((side / "log").iterdir()) and (side / "FORMAT").exists()
    kept = max((side / "log").iterdir(), key=lambda path: path.stat().st_size)
    assert b"wounded" in kept.read_bytes()

    # The flag may stay: it does not remove a new adapter with the same name.
    with daemon.client() as client:
        client.create_adapter("wounded", rank=8)
    trained.restart("--recover-adapter", "wounded")
    with trained.daemon.client() as client:
        assert client.adapter("wounded").info().config.rank == 8
    # A later start does not need the flag.
    trained.restart("--log-format", "json")
    assert {name: image(trained, name) for name in before} == before
    assert sides(trained) == [side]


@pytest.mark.parametrize("how", ["missing", "short", "flipped"])
def test_an_image_that_cannot_be_read_costs_its_adapter(
    how: str, durable: Durable
) -> None:
    daemon = durable.start(*SMALL_SNAPSHOTS)
    with daemon.client() as client:
        for seed, name in enumerate(("good", "bad")):
            client.create_adapter(name, rank=4, seed=seed)
            train(client, name, seed)
        before = client.adapter("good").info().optim_steps
        while b"bad" not in newest_snapshot(durable):
            train(client, "bad", 7)
            time.sleep(0.05)
    daemon.stop()
    snapshot = newest_snapshot(durable)
    # The snapshot names each adapter before its image.
    path = min(
        durable.images,
        key=lambda p: snapshot.find(p.name.encode(), snapshot.find(b"bad")) % 2**32,
    )
    if how == "missing":
        path.unlink()
    elif how == "short":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        damage(path, path.stat().st_size - 1)
    checked = subprocess.run(
        [WEFTCTL, "state", "verify", durable.folder / "state"],
        capture_output=True,
        text=True,
    )
    assert checked.returncode == 1 and "adapter 'bad'" in checked.stderr
    # A start does not read the blocks of every image, so it may miss a flipped byte.
    if how != "flipped":
        assert "adapter 'bad'" in refused(durable, *SMALL_SNAPSHOTS)
    with durable.start("--recover-adapter=bad").client() as client:
        (good,) = client.adapters()
        assert (good.adapter_id, good.optim_steps) == ("good", before)
        train(client, "good", 5)
    (side,) = sides(durable)
    names = [file.name for file in (side / "images").iterdir()]
    assert names == ([] if how == "missing" else [path.name])
