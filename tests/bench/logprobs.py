"""Times the head alone: log-probabilities of targets and the gradient of the hidden
rows, with a frozen weight, in f32 (on cuda in bf16). Compares Weft's fused head with
three heads in torch. They keep all logits (naive), compute as TRL does (selective), or
run in checkpointed chunks (chunked).

Every side's results are compared with f64 before its times count. Memory is what a
process needs in addition to its inputs. On cuda it is the memory of LibTorch's
allocator.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import daemon
import flops
import inputs
import numpy as np
import report
import shapes
import tolerance
from peer_options import DTYPES
from processes import HERE, run_program, scratch

HEAD_BENCH = daemon.BUILD_DIR / "tests" / "bench" / "head_bench"
PEERS = ("naive", "selective", "chunked")
TOLERANCE = 1e-5  # Relative error by norm, for sums of some ten thousand f32 terms.
RESULTS = ("logprobs", "dhidden")
# The least rate of the forward pass on a GPU, as a fraction of its GEMM rate.
FORWARD_TARGET = 0.85
NUMBERS = ("rows", "hidden", "vocab", "chunk", "threads", "reps")

Arrays = dict[str, np.ndarray]


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    with scratch() as folder:
        for name, values in make_inputs(options).items():
            values.tofile(folder / name)
        expected = _exact(options, folder)
        sides: dict[str, Callable[[], report.Run]] = {
            side: partial(_measure, options, folder, expected, side)
            for side in ("fused", *PEERS)
        }
        runs = report.take_turns(options.rounds, sides)
    work = report.Work(
        options.rows, flops.head_flops(options.rows, options.hidden, options.vocab)
    )
    result = report.make(
        "logprobs",
        options,
        runs,
        peers=PEERS,
        work=dict.fromkeys(runs, work),
        config={name: getattr(options, name) for name in NUMBERS[:4]},
        ratios=partial(_ratios, options, runs),
    )
    report.emit(result, options.output)
    return 0


def make_inputs(options: argparse.Namespace) -> Arrays:
    """Returns seeded noise in the dtype of all sides, stored in f32. The logits
    then have a standard deviation of 3."""
    generator = np.random.default_rng(inputs.SEED)

    def normal(*shape: int) -> np.ndarray:
        return generator.standard_normal(shape, dtype=np.float32)

    hidden = normal(options.rows, options.hidden)
    weight = normal(options.vocab, options.hidden)
    weight *= np.float32(3 / options.hidden**0.5)
    if DTYPES[options.device] == "bf16":
        hidden, weight = bf16(hidden), bf16(weight)
    return {
        "hidden": hidden,
        "weight": weight,
        "targets": generator.integers(0, options.vocab, options.rows),
        "gradients": normal(options.rows),
    }


def bf16(values: np.ndarray) -> np.ndarray:
    """Rounds finite f32 values to bf16, ties to even. They stay stored in f32."""
    bits = values.view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded & np.uint32(0xFFFF0000)).view(np.float32)


def error(found: np.ndarray, expected: np.ndarray) -> float:
    """Returns the norm of the difference, divided by the norm of `expected`."""
    difference = found.reshape(expected.shape) - expected
    return float(np.linalg.norm(difference) / np.linalg.norm(expected))


def bound(side: str, result: str, dtype: str) -> float:
    """Returns how far a side may be from f64. Weft's log-probabilities are f32,
    whatever the dtype of hidden rows and weight."""
    if dtype == "f32" or (side, result) == ("fused", "logprobs"):
        return TOLERANCE
    return tolerance.summed(dtype, 1)


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = report.parser("logprobs", __doc__)
    report.add_device(parser)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument(
        "--shape", choices=shapes.SHAPES, help="for --hidden and --vocab"
    )
    parser.add_argument("--hidden", type=int, help="576, or of --shape")
    parser.add_argument("--vocab", type=int, help="49152, or of --shape")
    parser.add_argument("--chunk", type=int, default=1024, help="rows of logits")
    options = parser.parse_args(arguments)
    shape = shapes.SHAPES[options.shape or "smollm2-135m"]
    options.hidden = options.hidden or shape["hidden_size"]
    options.vocab = options.vocab or shape["vocab_size"]
    return options


def _run(options: argparse.Namespace, program: list[Any], *last: str) -> report.Run:
    numbers = [str(getattr(options, name)) for name in NUMBERS]
    return run_program([*program, *numbers, options.device, *last], options.threads)


def _peer(options: argparse.Namespace, folder: Path, side: str) -> report.Run:
    return _run(options, [sys.executable, HERE / "head_peer.py", folder], side)


def _exact(options: argparse.Namespace, folder: Path) -> Arrays:
    """Returns log-probabilities [N] and the gradient of hidden [N, H], computed in
    f64."""
    _peer(options, folder, "exact")
    return {name: _take(folder / name, np.float64) for name in RESULTS}


def _measure(
    options: argparse.Namespace, folder: Path, expected: Arrays, side: str
) -> report.Run:
    """Runs one process of a side. Ends the bench if its results are wrong."""
    if side in PEERS:
        run = _peer(options, folder, side)
    else:
        run = _run(options, [HEAD_BENCH, folder])
    for name, values in expected.items():
        found = error(_take(folder / name, np.float32), values)
        run[f"{name}_error"] = found
        most = bound(side, name, DTYPES[options.device])
        if not found <= most:
            raise SystemExit(
                f"{side}: {name} off by {found:.1e} > {most:.0e}; times mean nothing"
            )
    return run


def _take(path: Path, dtype: type) -> np.ndarray:
    """Reads and removes a result file. So a later process that writes no results cannot
    pass with this file."""
    values: np.ndarray = np.fromfile(path, dtype=dtype)
    path.unlink()
    return values


def _ratios(
    options: argparse.Namespace, runs: report.Runs, sides: report.Sides
) -> dict[str, Any]:
    def over(name: str, peer: str) -> float:
        return float(sides["fused"][name] / sides[peer][name])

    limits: dict[str, float | None] = {"seconds": 1.1, "extra_rss_bytes": 1 / 8}
    if options.device == "cuda":
        limits = {"seconds": 1.1, "extra_allocated_bytes": None}
    result = {}
    for peer in PEERS:
        for name, limit in limits.items():
            result[f"{name} fused/{peer}"] = report.ratio(
                over(name, peer), at_most=limit if peer == "naive" else None
            )
    seconds = min(second for run in runs["fused"] for second in run["forward_seconds"])
    rate = flops.head_flops(options.rows, options.hidden, options.vocab) / 2 / seconds
    result["forward fused/GEMM rate"] = report.ratio(
        rate / report.gemm_rate(runs, PEERS),
        at_least=FORWARD_TARGET if options.device == "cuda" else None,
    )
    return result
