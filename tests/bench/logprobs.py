"""The head alone: log-probabilities of targets and the gradient of the hidden
rows, with a frozen weight, in f32. Weft's fused head against torch with all
logits (naive), TRL's way (selective) and torch in checkpointed chunks (chunked).

Every side's numbers are held against f64 before its times count. Memory is what
a process needs above its inputs.
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
from processes import HERE, run_program, scratch

HEAD_BENCH = daemon.BUILD_DIR / "tests" / "bench" / "head_bench"
PEERS = ("naive", "selective", "chunked")
TOLERANCE = 1e-5  # Relative, by norm; sums of some ten thousand f32 terms.
EXACT_ROWS = 256  # At a time.

Arrays = dict[str, np.ndarray]


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    data = make_inputs(options.rows, options.hidden, options.vocab)
    expected = exact(data)
    with scratch() as folder:
        for name, values in data.items():
            values.tofile(folder / name)
        del data
        sides: dict[str, Callable[[], report.Run]] = {
            side: partial(_measure, options, folder, expected, side)
            for side in ("fused", *PEERS)
        }
        runs = report.take_turns(options.rounds, sides)
    work = report.Work(
        options.rows, flops.head_flops(options.rows, options.hidden, options.vocab)
    )
    names = ("rows", "hidden", "vocab", "chunk")
    result = report.make(
        "logprobs",
        options,
        runs,
        peers=PEERS,
        work=dict.fromkeys(runs, work),
        config={name: getattr(options, name) for name in names},
        ratios=_ratios,
    )
    report.emit(result, options.output)
    return 0


def make_inputs(rows: int, hidden: int, vocab: int) -> Arrays:
    """Seeded noise; logits have a standard deviation of 3."""
    generator = np.random.default_rng(inputs.SEED)

    def normal(*shape: int) -> np.ndarray:
        return generator.standard_normal(shape, dtype=np.float32)

    return {
        "hidden": normal(rows, hidden),
        "weight": normal(vocab, hidden) * np.float32(3 / hidden**0.5),
        "targets": generator.integers(0, vocab, rows),
        "gradients": normal(rows),
    }


def exact(data: Arrays) -> Arrays:
    """Log-probabilities [N] and the gradient of hidden [N, H], in f64."""
    weight = data["weight"].astype(np.float64)
    logprobs, gradients = [], []
    for begin in range(0, len(data["hidden"]), EXACT_ROWS):
        rows = slice(begin, begin + EXACT_ROWS)
        targets = data["targets"][rows]
        here = np.arange(len(targets))
        logits = data["hidden"][rows].astype(np.float64) @ weight.T
        logits -= logits.max(axis=1, keepdims=True)
        selected = logits[here, targets]
        np.exp(logits, out=logits)
        sums = logits.sum(axis=1, keepdims=True)
        logprobs.append(selected - np.log(sums[:, 0]))
        # dlogprob/dlogits = onehot - softmax.
        logits /= -sums
        logits[here, targets] += 1.0
        logits *= data["gradients"][rows, None]
        gradients.append(logits @ weight)
    return {"logprobs": np.concatenate(logprobs), "dhidden": np.concatenate(gradients)}


def error(found: np.ndarray, expected: np.ndarray) -> float:
    """Relative, by norm."""
    difference = found.reshape(expected.shape) - expected
    return float(np.linalg.norm(difference) / np.linalg.norm(expected))


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = report.parser("logprobs", __doc__)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--chunk", type=int, default=1024, help="rows of logits")
    return parser.parse_args(arguments)


def _measure(
    options: argparse.Namespace, folder: Path, expected: Arrays, side: str
) -> report.Run:
    """A process of a side; ends the bench when its numbers are wrong."""
    names = ("rows", "hidden", "vocab", "chunk", "threads", "reps")
    numbers = [str(getattr(options, name)) for name in names]
    command: list[str | Path] = [HEAD_BENCH, folder, *numbers]
    if side in PEERS:
        command = [sys.executable, HERE / "head_peer.py", folder, *numbers, side]
    run = run_program(command, options.threads)
    for name, values in expected.items():
        path = folder / name
        found = error(np.fromfile(path, dtype=np.float32), values)
        path.unlink()
        run[f"{name}_error"] = found
        if not found <= TOLERANCE:
            raise SystemExit(
                f"{side}: {name} off by {found:.1e} > {TOLERANCE:.0e}; times mean nothing"
            )
    return run


def _ratios(sides: report.Sides) -> dict[str, Any]:
    def over(name: str, peer: str) -> float:
        return float(sides["fused"][name] / sides[peer][name])

    limits = {"seconds": 1.1, "extra_rss_bytes": 1 / 8}
    result = {}
    for peer in PEERS:
        for name, limit in limits.items():
            result[f"{name} fused/{peer}"] = report.ratio(
                over(name, peer), at_most=limit if peer == "naive" else None
            )
    return result
