"""Times the products of many experts' rows with the experts' weights, on a CPU in f32.
Each thread of Weft computes whole experts, as in its mixture layers. The peers are
LibTorch's grouped product, and a loop that computes one expert after another. All sides
run in turns in one process.

The results must be equal up to rounding before the times count.
"""

from __future__ import annotations

import argparse
import json
import subprocess

import daemon
import report
import tolerance

GROUPED_BENCH = daemon.BUILD_DIR / "tests" / "bench" / "grouped_bench"
NUMBERS = ("rows", "hidden", "features", "experts", "threads", "reps")
PEERS = ("grouped_mm", "loop")


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    numbers = [str(getattr(options, name)) for name in NUMBERS]
    done = subprocess.run(
        [GROUPED_BENCH, *numbers], capture_output=True, text=True, check=True
    )
    line = json.loads(done.stdout)
    allowed = tolerance.summed("f32", options.hidden)
    for name, difference in line["difference"].items():
        if not difference <= allowed:
            raise AssertionError(f"{name} differs by {difference} > {allowed}")
    work = 2 * options.rows * options.hidden * options.features / 1e9
    sides = {
        name: {"seconds": min(seconds), "gflops": work / min(seconds)}
        for name, seconds in line["seconds"].items()
    }
    ratios = {
        f"speed weft/{name}": report.ratio(
            sides[name]["seconds"] / sides["weft"]["seconds"]
        )
        for name in PEERS
    }
    report.emit_ratios(
        "grouped",
        options,
        ours={"weft": sides["weft"]},
        peer={name: sides[name] for name in PEERS},
        ratio=ratios,
        config={name: getattr(options, name) for name in NUMBERS},
    )
    return 0


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = report.parser("grouped", __doc__)
    for name, value in (
        ("rows", 8192),
        ("hidden", 1024),
        ("features", 512),
        ("experts", 64),
    ):
        parser.add_argument(f"--{name}", type=int, default=value)
    return parser.parse_args(arguments)
