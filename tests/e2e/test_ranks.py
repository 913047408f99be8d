"""A group of ranks ends as one, and comes back as one."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import daemon as daemon_module
import models
import numpy as np
import pytest
from parallel import need_devices, num_ranks

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
    need_devices(flags)
    process = daemon_module.Daemon(models.tiny_model("llama-tied"), folder, *flags)
    process.start()
    return process


class Training(threading.Thread):
    """Steps of one adapter until one fails; `norms` of those acknowledged."""

    def __init__(self, process: daemon_module.Daemon):
        super().__init__()
        self.norms: list[float] = []
        self._process = process

    def run(self) -> None:
        import weft

        with self._process.client(timeout=20.0, retry=weft.NO_RETRY) as client:
            adapter = client.create_adapter("a", rank=4, seed=1)
            # Anything but a server that is gone fails the test's thread.
            with contextlib.suppress(weft.Unavailable):
                while True:
                    adapter.forward_backward(data(len(self.norms)))
                    step = adapter.optim_step(learning_rate=1e-2)
                    self.norms.append(step.grad_norm)

    def wait_for_steps(self, count: int) -> None:
        limit = time.monotonic() + STOP_SECONDS
        while len(self.norms) < count:
            assert self.is_alive() and time.monotonic() < limit, self.norms
            time.sleep(0.001)


@pytest.mark.parametrize(
    ("flags", "victim", "delay"),
    [(SIZES[0], victim, s) for victim in (0, 1) for s in (None, 0.0, 0.005, 0.01)]
    + [(SIZES[1], victim, 0.01) for victim in range(4)],
)
@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_killed_rank_ends_the_group_and_no_step_is_half_done(
    flags: tuple[str, ...], victim: int, delay: float | None, tmp_path: Path
) -> None:
    """Some time after the second step, or, without a delay, while all are idle."""
    process = start(tmp_path / "first", *flags)
    ranks = [process.pid, *children(process.pid)]
    assert len(ranks) == num_ranks(flags)
    training = Training(process)
    if delay is not None:
        training.start()
        training.wait_for_steps(2)
        time.sleep(delay)
    os.kill(ranks[victim], signal.SIGKILL)
    assert process.wait(STOP_SECONDS) != 0
    if delay is not None:
        training.join()
    limit = time.monotonic() + STOP_SECONDS
    while not all(gone(rank) for rank in ranks[1:]):
        assert time.monotonic() < limit, "ranks outlive their group"
        time.sleep(0.05)
    # What was acknowledged is what one rank gives: no step was half done.
    again = start(tmp_path / "again", *flags)
    try:
        with again.client() as client:
            adapter = client.create_adapter("a", rank=4, seed=1)
            for number, norm in enumerate(training.norms):
                adapter.forward_backward(data(number))
                expected = adapter.optim_step(learning_rate=1e-2).grad_norm
                assert norm == pytest.approx(expected, rel=1e-4)
    finally:
        again.stop()


def test_a_drain_ends_all_ranks(tmp_path: Path) -> None:
    process = start(tmp_path, *SIZES[0])
    ranks = children(process.pid)
    begin = time.monotonic()
    assert process.stop() == 0
    # They were told: nobody waited for them, nobody killed them.
    assert time.monotonic() - begin < 8
    assert "the rank stops" not in process.log_tail()
    assert all(gone(rank) for rank in ranks)


def test_a_rank_that_cannot_load_ends_the_start(tmp_path: Path) -> None:
    process = daemon_module.Daemon(
        models.tiny_model("llama-tied"), tmp_path, "--tensor-parallel-size", "64"
    )
    process.launch()
    assert process.wait(STOP_SECONDS) == 1
    assert "--tensor-parallel-size" in process.log_tail()


def test_torchrun_starts_a_group(tmp_path: Path) -> None:
    """Its agent serves the rendezvous, and is the parent of all ranks."""
    need_devices(SIZES[0])
    process = daemon_module.Daemon(models.tiny_model("llama-tied"), tmp_path, *SIZES[0])
    agent = [sys.executable, "-m", "torch.distributed.run", "--no-python"]
    process.start_with(*agent, "--standalone", "--nproc-per-node=2")
    try:
        with process.client() as client:
            drawn = client.sample([5, 6, 7], max_tokens=4, stop=[])
        assert len(drawn.samples[0].tokens) == 4
        ranks = children(process.pid)
        assert len(ranks) == 2
        os.kill(ranks[1], signal.SIGKILL)
        assert process.wait(STOP_SECONDS) != 0
        assert all(gone(rank) for rank in ranks)
    finally:
        process.kill()


def test_an_idle_rank_0_notices_that_another_one_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that somebody else has started, so that nobody tells it."""
    need_devices(SIZES[0])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MASTER_PORT", str(free.getsockname()[1]))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    model = models.tiny_model("llama-tied")
    other = daemon_module.Daemon(model, tmp_path / "1", *SIZES[0])
    process = daemon_module.Daemon(model, tmp_path / "0", *SIZES[0])
    monkeypatch.setenv("RANK", "1")
    other.launch()
    try:
        monkeypatch.setenv("RANK", "0")
        process.start()
        other.kill()
        assert process.wait(STOP_SECONDS) == 1
    finally:
        other.kill()
        process.kill()
