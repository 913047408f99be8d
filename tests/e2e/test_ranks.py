"""Tests how groups of ranks start and stop."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from daemon import STOP_SECONDS
from groups import TENSOR_2, children, gone, make


def test_a_drain_ends_all_ranks(tmp_path: Path) -> None:
    process = make(tmp_path, *TENSOR_2)
    process.start()
    ranks = children(process.pid)
    begin = time.monotonic()
    assert process.stop() == 0
    # The ranks got the command to stop, so they ended without a timeout and
    # without a kill.
    assert time.monotonic() - begin < 8
    assert "the rank stops" not in process.log_tail()
    assert all(gone(rank) for rank in ranks)


def test_a_rank_that_cannot_load_ends_the_start(tmp_path: Path) -> None:
    process = make(tmp_path, "--tensor-parallel-size", "5")
    process.launch()
    assert process.wait(STOP_SECONDS) == 1
    assert "--tensor-parallel-size" in process.log_tail()


def test_torchrun_starts_a_group(tmp_path: Path) -> None:
    """torchrun's agent serves the rendezvous and is the parent of all ranks."""
    process = make(tmp_path, *TENSOR_2)
    agent = [sys.executable, "-m", "torch.distributed.run", "--no-python"]
    process.start_with(*agent, "--standalone", "--nproc-per-node=2")
    with process:
        with process.client() as client:
            drawn = client.sample([5, 6, 7], max_tokens=4, ignore_eos=True)
        assert len(drawn.samples[0].tokens) == 4
        ranks = children(process.pid)
        assert len(ranks) == 2
        os.kill(ranks[1], signal.SIGKILL)
        assert process.wait(STOP_SECONDS) != 0
        assert all(gone(rank) for rank in ranks)
