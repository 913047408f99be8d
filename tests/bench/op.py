"""Times operations of Weft beside LibTorch's on a CPU in f32. All sides take turns in
one process, and their results must be equal up to rounding before the times count.

attention: the forward and the backward pass of training's attention, beside LibTorch's
causal kernel. grouped: the products of many experts' rows with the experts' weights;
each thread of Weft computes whole experts, as in its mixture layers, beside LibTorch's
grouped product, and a loop that computes one expert after another.
"""

from __future__ import annotations

import argparse
import json
import subprocess

import daemon
import report
import tolerance

OP_BENCH = daemon.BUILD_DIR / "tests" / "bench" / "op_bench"
SIZES = {
    "attention": {
        "sequences": 8,
        "length": 512,
        "heads": 9,
        "kv_heads": 3,
        "features": 64,
    },
    "grouped": {"rows": 8192, "hidden": 1024, "features": 512, "experts": 64},
}


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    sizes = dict(zip(SIZES[options.op], options.sizes, strict=True))
    numbers = [str(n) for n in (*options.sizes, options.threads, options.reps)]
    done = subprocess.run(
        [OP_BENCH, options.op, *numbers], capture_output=True, text=True, check=True
    )
    line = json.loads(done.stdout)
    allowed = tolerance.summed("f32", _terms(options.op, sizes))
    for name, difference in line["difference"].items():
        if not difference <= allowed:
            raise AssertionError(f"{name} differs by {difference} > {allowed}")
    sides = {
        name: _figures(options.op, sizes, min(of))
        for name, of in line["seconds"].items()
    }
    ours = sides.pop("weft")
    report.emit_ratios(
        "op",
        options,
        ours={"weft": ours},
        peer=sides,
        ratio={
            f"speed weft/{name}": report.ratio(
                side["seconds"] / ours["seconds"],
                at_least=1 if options.op == "attention" else None,
            )
            for name, side in sides.items()
        },
        config={
            "op": options.op,
            **sizes,
            "threads": options.threads,
            "reps": options.reps,
        },
        difference=line["difference"],
    )
    return 0


def _terms(op: str, sizes: dict[str, int]) -> int:
    """Returns how many terms a result sums."""
    if op == "grouped":
        return sizes["hidden"]
    # A score sums over the features, and an output sums over the keys.
    return sizes["length"] + sizes["features"]


def _figures(op: str, sizes: dict[str, int], seconds: float) -> dict[str, float]:
    """Returns the figures of a side. Only `grouped` has a rate."""
    if op != "grouped":
        return {"seconds": seconds}
    work = 2 * sizes["rows"] * sizes["hidden"] * sizes["features"]
    return {"seconds": seconds, "gflops": work / seconds / 1e9}


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = report.parser("op", __doc__)
    parser.add_argument("op", choices=SIZES)
    names = "; ".join(f"{op}: {', '.join(sizes)}" for op, sizes in SIZES.items())
    parser.add_argument("--sizes", type=int, nargs="+", help=names)
    options = parser.parse_args(arguments)
    default = SIZES[options.op]
    options.sizes = options.sizes or list(default.values())
    if len(options.sizes) != len(default):
        parser.error(f"--sizes: {', '.join(default)} of {options.op}")
    return options
