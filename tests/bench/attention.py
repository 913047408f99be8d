"""Times training's attention and LibTorch's causal kernel on a CPU, forward and
backward in f32. The two take turns in one process.

Outputs and gradients of both must be equal up to rounding before the times count.
"""

from __future__ import annotations

import argparse
import json
import subprocess

import daemon
import report
import tolerance

ATTENTION_BENCH = daemon.BUILD_DIR / "tests" / "bench" / "attention_bench"
NUMBERS = ("sequences", "length", "heads", "kv_heads", "features", "threads", "reps")


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    numbers = [str(getattr(options, name)) for name in NUMBERS]
    done = subprocess.run(
        [ATTENTION_BENCH, *numbers], capture_output=True, text=True, check=True
    )
    line = json.loads(done.stdout)
    # A score sums over the features, and an output sums over the keys.
    allowed = tolerance.summed("f32", options.length + options.features)
    if not line["difference"] <= allowed:
        raise AssertionError(f"results differ by {line['difference']} > {allowed}")
    ours, peer = (min(line[f"{side}_seconds"]) for side in ("ours", "peer"))
    report.emit_ratios(
        "attention",
        options,
        ours={"weft": {"seconds": ours}},
        peer={"LibTorch": {"seconds": peer}},
        ratio={"speed weft/LibTorch": report.ratio(peer / ours, at_least=1)},
        config={name: getattr(options, name) for name in NUMBERS},
        difference=line["difference"],
    )
    return 0


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = report.parser("attention", __doc__)
    for name, value in (
        ("sequences", 8),
        ("length", 512),
        ("heads", 9),
        ("kv-heads", 3),
        ("features", 64),
    ):
        parser.add_argument(f"--{name}", type=int, default=value)
    return parser.parse_args(arguments)
