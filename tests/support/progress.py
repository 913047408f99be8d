"""Shows how far a run of ctest is: progress.py ENTRIES COSTS < ctest's output.

Repeats ctest's output. After each entry that ends, a bar says how much of the run is
done, how many seconds are left, and what runs now. ENTRIES is the JSON of `ctest
--show-only`. An entry counts by its seconds in earlier runs (COSTS, ctest's
CTestCostData.txt). An entry without earlier runs counts as the mean of the others.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

START = re.compile(r"^ +Start +\d+: (\S+)")
END = re.compile(r"^ *\d+/\d+ Test +#\d+: (\S+) ")
WIDTH = 20


def weights(entries: str, costs: str) -> dict[str, float]:
    """Maps each entry of the run to its expected seconds."""
    names = [test["name"] for test in json.loads(entries)["tests"]]
    rows = (line.split() for line in costs.partition("\n---")[0].splitlines())
    known = {row[0]: float(row[2]) for row in rows if len(row) == 3}
    found = [known[name] for name in names if known.get(name, 0) > 0]
    mean = sum(found) / len(found) if found else 1.0
    return {name: known.get(name, 0) or mean for name in names}


def bar(share: float, elapsed: float, running: Iterable[str]) -> str:
    """Returns the bar after `elapsed` seconds, when `share` of the run is done."""
    filled = round(WIDTH * share)
    text = f"[{'#' * filled}{'.' * (WIDTH - filled)}] {share:4.0%}"
    if 0 < share < 1:
        text += f", about {elapsed / share - elapsed:.0f} s left"
    names = ", ".join(running)
    return f"{text}; runs: {names}" if names else text


def follow(lines: Iterable[str], expected: dict[str, float]) -> Iterator[str]:
    """Yields the lines, and a bar after each line that ends an entry."""
    begin = time.monotonic()
    running: dict[str, None] = {}
    done = 0.0
    for line in lines:
        yield line
        if started := START.match(line):
            running[started[1]] = None
        elif ended := END.match(line):
            running.pop(ended[1], None)
            done += expected.get(ended[1], 0)
            share = min(1.0, done / sum(expected.values()))
            yield bar(share, time.monotonic() - begin, running) + "\n"


def main(entries: str, costs: str) -> None:
    old = Path(costs)
    expected = weights(
        Path(entries).read_text(), old.read_text() if old.exists() else ""
    )
    for line in follow(sys.stdin, expected):
        print(line, end="", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
