"""Daemons with several ranks, and their processes."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import daemon as daemon_module
import models
import numpy as np
from daemon import STOP_SECONDS, wait_until
from parallel import SIZES, need_devices

TENSOR_2 = SIZES["tensor 2"]
TENSOR_2_DATA_2 = SIZES["tensor 2, data 2"]


# What reading /proc raises if a thread or process has ended.
GONE = (FileNotFoundError, ProcessLookupError)


def children(pid: int) -> list[int]:
    """Returns the processes whose parent is `pid`, in the order of their start."""
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(*GONE):  # The thread has ended after it was listed.
            found.update(map(int, (task / "children").read_text("ascii").split()))
    return sorted(found)


def gone(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/status").read_text("ascii")
    except GONE:
        return True
    return "State:\tZ" in status


def waits_for_signals(pid: int) -> bool:
    """Returns whether the process has blocked SIGTERM, to handle it in its own way.
    The mask of blocked signals cannot tell, because it lacks SIGTERM while sigtimedwait
    waits. So this checks whether the process ignores SIGPIPE, which it does right after
    it blocks SIGTERM."""
    status = Path(f"/proc/{pid}/status").read_text("ascii")
    ignored = int(status.split("SigIgn:")[1].split()[0], 16)
    return bool(ignored >> (signal.SIGPIPE - 1) & 1)


def ranks_of(process: daemon_module.Daemon) -> list[int]:
    """Returns the process ids of all ranks. `process`, rank 0, started the others."""
    return [process.pid, *children(process.pid)]


def kill_rank(process: daemon_module.Daemon, rank: int) -> None:
    """Kills a rank (kill -9). The group must end with an error and leave no
    process."""
    ranks = ranks_of(process)
    os.kill(ranks[rank], signal.SIGKILL)
    assert process.wait(STOP_SECONDS) != 0
    wait_until(lambda: all(map(gone, ranks[1:])), "ranks outlive their group")


def make(folder: Path, *flags: str, model: Path | None = None) -> daemon_module.Daemon:
    """Returns a daemon that is not started yet. The default model is a tiny one."""
    need_devices(flags)
    return daemon_module.Daemon(
        model or models.tiny_model("llama-tied"), folder, *flags
    )


def data(seed: int, count: int = 4, length: int = 24) -> list[Any]:
    import weft

    generator = np.random.default_rng(seed)
    return [
        weft.Datum.next_token(generator.integers(3, 300, length)) for _ in range(count)
    ]
