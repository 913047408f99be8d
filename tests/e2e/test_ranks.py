"""A group of ranks ends as one, and comes back as one."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import daemon as daemon_module
import models
import numpy as np
import pytest

SIZES = (
    ("--tensor-parallel-size", "2"),
    ("--tensor-parallel-size", "2", "--data-parallel-size", "2"),
)
STOP_SECONDS = 20.0


def children(pid: int) -> list[int]:
    """Processes whose parent it is, in the order of their start."""
    tasks = Path(f"/proc/{pid}/task")
    found = {
        int(child)
        for task in tasks.iterdir()
        for child in (task / "children").read_text("ascii").split()
    }
    return sorted(found)


def gone(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/status").read_text("ascii")
    except FileNotFoundError:
        return True
    return "State:\tZ" in status


def data(seed: int) -> list[Any]:
    import weft

    generator = np.random.default_rng(seed)
    return [weft.Datum.next_token(generator.integers(3, 300, 24)) for _ in range(4)]


def start(folder: Path, *flags: str) -> daemon_module.Daemon:
    process = daemon_module.Daemon(models.tiny_model("llama-tied"), folder, *flags)
    process.start()
    return process


def train(process: daemon_module.Daemon, until: threading.Event) -> list[Any]:
    """Steps of one adapter until one fails; what was acknowledged."""
    import weft

    replies: list[Any] = []
    with process.client(timeout=20.0, retry=weft.NO_RETRY) as client:
        adapter = client.create_adapter("a", rank=4, seed=1)
        try:
            while not until.is_set():
                adapter.forward_backward(data(len(replies)))
                replies.append(adapter.optim_step(learning_rate=1e-2).grad_norm)
        except weft.WeftError:
            pass
    return replies


@pytest.mark.parametrize("flags", SIZES, ids=" ".join)
@pytest.mark.parametrize("victim", range(2))
@pytest.mark.parametrize("seconds", (0.0, 0.05, 0.3))
def test_a_killed_rank_ends_the_group_and_no_step_is_half_done(
    flags: tuple[str, ...], victim: int, seconds: float, tmp_path: Path
) -> None:
    process = start(tmp_path / "first", *flags)
    ranks = [process.pid, *children(process.pid)]
    assert len(ranks) == int(np.prod([int(size) for size in flags[1::2]]))
    stop = threading.Event()
    replies: list[Any] = []
    worker = threading.Thread(target=lambda: replies.extend(train(process, stop)))
    if seconds > 0:  # Otherwise the group is idle.
        worker.start()
        time.sleep(seconds)
    os.kill(ranks[victim], signal.SIGKILL)
    assert process.wait(STOP_SECONDS) != 0
    stop.set()
    if seconds > 0:
        worker.join()
    limit = time.monotonic() + STOP_SECONDS
    while not all(gone(rank) for rank in ranks[1:]):
        assert time.monotonic() < limit, "ranks outlive their group"
        time.sleep(0.05)
    # What was acknowledged is what one rank gives: no step was half done.
    again = start(tmp_path / "again", *flags)
    try:
        with again.client() as client:
            adapter = client.create_adapter("a", rank=4, seed=1)
            for number, norm in enumerate(replies):
                adapter.forward_backward(data(number))
                expected = adapter.optim_step(learning_rate=1e-2).grad_norm
                assert norm == pytest.approx(expected, rel=1e-4)
    finally:
        again.stop()


def test_a_drain_ends_all_ranks(tmp_path: Path) -> None:
    process = start(tmp_path, *SIZES[0])
    ranks = children(process.pid)
    assert process.stop() == 0
    assert all(gone(rank) for rank in ranks)


def test_a_rank_that_cannot_load_ends_the_start(tmp_path: Path) -> None:
    process = daemon_module.Daemon(
        models.tiny_model("llama-tied"), tmp_path, "--tensor-parallel-size", "64"
    )
    process.launch()
    assert process.wait(STOP_SECONDS) == 1
    assert "--tensor-parallel-size" in process.log_tail()
