"""Adds up what cuda_trace.cc wrote:

    cuda_trace.py FILE.csv [--gap MS] [--burst N] [--top K]

Splits the trace into bursts of work, between which the device is idle for more than
--gap ms. Lists the bursts. For one of them (the longest, or --burst) prints the
device's time by kernel: total ms, share, calls, mean us, name, last launch.
"""

from __future__ import annotations

import argparse
import csv
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_NOISE = re.compile(r"\b(void|at::native::|c10::|\(anonymous namespace\)::)")
_NAME_WIDTH = 110


@dataclass(frozen=True)
class Launch:
    """A kernel, copy or memset on the device. Times are in ns."""

    start: int
    end: int
    name: str
    shape: str

    @property
    def time(self) -> int:
        return self.end - self.start


def read(lines: Iterable[str]) -> list[Launch]:
    """Returns the launches of a trace, ordered by start."""
    found = []
    for kind, start, end, _stream, grid, block, registers, size, name in csv.reader(
        lines
    ):
        shape = f"grid {grid} block {block} registers {registers} bytes {size}"
        short = f"{kind} {_NOISE.sub('', name).strip()[:_NAME_WIDTH]}"
        found.append(Launch(int(start), int(end), short, shape))
    return sorted(found, key=lambda launch: (launch.start, launch.end))


def bursts_of(launches: list[Launch], gap_ms: float) -> list[list[Launch]]:
    """Returns runs of launches between which the device is idle for at most gap_ms."""
    bursts: list[list[Launch]] = []
    last_end = 0
    for launch in launches:
        if not bursts or launch.start - last_end > gap_ms * 1e6:
            bursts.append([])
        bursts[-1].append(launch)
        last_end = max(last_end, launch.end)
    return bursts


def length(burst: list[Launch]) -> int:
    """Returns the ns from the first start to the last end."""
    return max(launch.end for launch in burst) - burst[0].start


def busy(burst: list[Launch]) -> float:
    """Returns the share of the burst's length in which at least one launch runs."""
    total = covered = 0
    for launch in burst:
        total += max(0, launch.end - max(launch.start, covered))
        covered = max(covered, launch.end)
    return total / max(1, length(burst))


@dataclass
class Sum:
    """The sums over all launches with one name."""

    time: int = 0
    calls: int = 0
    shape: str = ""


def sums_of(burst: list[Launch]) -> dict[str, Sum]:
    """Returns the sums by name, the longest first."""
    sums: dict[str, Sum] = {}
    for launch in burst:
        entry = sums.setdefault(launch.name, Sum())
        entry.time += launch.time
        entry.calls += 1
        entry.shape = launch.shape
    return dict(sorted(sums.items(), key=lambda item: -item[1].time))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--gap", type=float, default=20.0)
    parser.add_argument("--burst", type=int)
    parser.add_argument("--top", type=int, default=40)
    options = parser.parse_args()
    with options.file.open(newline="") as lines:
        launches = read(lines)
    if not launches:
        print(f"{options.file}: nothing ran on the device")
        return 1
    bursts = bursts_of(launches, options.gap)
    for index, burst in enumerate(bursts):
        begin = (burst[0].start - launches[0].start) / 1e6
        print(
            f"burst {index}: at {begin:.0f} ms, {length(burst) / 1e6:.2f} ms, "
            f"busy {busy(burst):.2f}, {len(burst)} launches"
        )
    chosen = options.burst
    if chosen is None:
        chosen = max(range(len(bursts)), key=lambda index: length(bursts[index]))
    sums = sums_of(bursts[chosen])
    total = sum(entry.time for entry in sums.values())
    print(f"\nburst {chosen}: {total / 1e6:.2f} ms of device time")
    for name, entry in list(sums.items())[: options.top]:
        print(
            f"{entry.time / 1e6:9.3f} ms {entry.time / total:6.1%} {entry.calls:6d} x "
            f"{entry.time / entry.calls / 1e3:8.1f} us  {name}  [{entry.shape}]"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
