"""Tests cuda_trace.py: bursts, busy share and sums of a trace, against values
computed by hand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import cuda_trace

MS = 1_000_000
KERNEL = "1x1x1,32x1x1,40,0"
LINES = [
    f'kernel,{0 * MS},{2 * MS},7,{KERNEL},"void at::native::first()"',
    f'kernel,{1 * MS},{3 * MS},8,{KERNEL},"second()"',
    f'memcpy,{4 * MS},{5 * MS},7,,,,4096,"kind 1"',
    f'kernel,{105 * MS},{106 * MS},7,{KERNEL},"second()"',
]


def test_a_pause_longer_than_the_gap_begins_another_burst() -> None:
    launches = cuda_trace.read(LINES)
    assert [len(b) for b in cuda_trace.bursts_of(launches, 20)] == [3, 1]
    assert [len(b) for b in cuda_trace.bursts_of(launches, 200)] == [4]


def test_launches_that_overlap_are_busy_once() -> None:
    burst = cuda_trace.bursts_of(cuda_trace.read(LINES), 20)[0]
    assert cuda_trace.length(burst) == 5 * MS
    assert cuda_trace.busy(burst) == 4 / 5


def test_sums_are_by_name_the_longest_first() -> None:
    sums = cuda_trace.sums_of(cuda_trace.read(LINES))
    assert list(sums) == ["kernel second()", "kernel first()", "memcpy kind 1"]
    assert sums["kernel second()"].time == 3 * MS
    assert sums["kernel second()"].calls == 2


def test_the_program_prints_the_longest_burst(tmp_path: Path) -> None:
    trace = tmp_path / "run.csv"
    trace.write_text("\n".join(LINES) + "\n", "utf-8")
    done = subprocess.run(
        [sys.executable, cuda_trace.__file__, trace], capture_output=True, text=True
    )
    assert done.returncode == 0
    assert "burst 0: at 0 ms, 5.00 ms, busy 0.80, 3 launches\n" in done.stdout
    assert "burst 0: 5.00 ms of device time\n" in done.stdout
    trace.write_text("", "utf-8")
    done = subprocess.run(
        [sys.executable, cuda_trace.__file__, trace], capture_output=True, text=True
    )
    assert done.returncode == 1 and "nothing ran on the device" in done.stdout
