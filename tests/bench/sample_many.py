"""Draws the samples of a reinforcement-learning batch in two ways. One side makes a
single `sample_many` call. The other makes one `sample` call per prompt, and keeps
--pieces calls in flight. Both sides must draw the same tokens, because tokens depend on
the seed and not on the batch. Two samples may still diverge at an unlikely token:
the cumulative probabilities before and after this token are so close that their last
bits decide whether the token is drawn. These bits depend on the batch."""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile
from typing import Any

import daemon
import inputs
import machine
import report
import tolerance
from processes import RANK, running, scratch

import weft

SEED = 11
# The least share of tokens that both sides draw before their samples diverge. If the
# sides had different seeds or prompts, the share would be near 0.
EQUAL = 0.75
Results = list[weft.SampleResult]


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    prompts = inputs.questions(options.model, options.prompts)
    with scratch() as work, running(options, work) as (process, client):
        adapter = client.create_adapter("bench", rank=RANK, seed=1)
        drawing = {
            "max_tokens": options.max_tokens,
            "num_samples": options.samples,
        }

        def at_once() -> Results:
            return list(adapter.sample_many(prompts, seed=SEED, **drawing))

        def in_pieces() -> Results:
            with ThreadPoolExecutor(options.pieces) as pool:
                return list(pool.map(one, range(len(prompts))))

        def one(number: int) -> weft.SampleResult:
            result: weft.SampleResult = adapter.sample(
                prompts[number], seed=SEED + number, **drawing
            )
            return result

        adapter.sample(prompts[0], max_tokens=1)
        sides = {"at once": at_once, "in pieces": in_pieces}
        runs: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
        for _ in range(options.rounds):
            for side, draw in sides.items():
                runs[side].append(measure(draw, process))
                seconds = runs[side][-1]["seconds"]
                print(f"sample_many: {side} {seconds:.1f} s", file=sys.stderr)
    equal = _expect_same_tokens(runs)
    best = {
        side: min(own, key=lambda run: float(run["seconds"]))
        for side, own in runs.items()
    }
    report.emit_ratios(
        "sample_many",
        options,
        ours=best,
        ratio={
            "speed at once/in pieces": report.ratio(
                best["at once"]["tokens_per_second"]
                / best["in pieces"]["tokens_per_second"],
                at_least=0.95,
            ),
            "speed at once/in pieces, by iterations": report.ratio(
                best["in pieces"]["decode_iterations"]
                / best["at once"]["decode_iterations"],
                at_least=0.95,
            ),
            "equal tokens": report.ratio(equal, at_least=EQUAL),
        },
        config=report.config(
            options, "prompts", "samples", "max_tokens", "pieces", "rounds"
        ),
    )
    return 0


def measure(draw: Callable[[], Results], process: daemon.Daemon) -> dict[str, Any]:
    """Returns the caller's seconds, and the daemon's processor seconds and decode
    iterations, for one batch."""
    iterations, cpu = _iterations(process), machine.cpu_seconds(process.pid)
    start = time.perf_counter()
    results = draw()
    seconds = time.perf_counter() - start
    samples = [sample for result in results for sample in result.samples]
    drawn = sum(len(sample.tokens) for sample in samples)
    return {
        "seconds": seconds,
        "cpu_seconds": machine.cpu_seconds(process.pid) - cpu,
        "decode_iterations": _iterations(process) - iterations,
        "drawn_tokens": drawn,
        "tokens_per_second": drawn / seconds,
        "samples": samples,
    }


def _iterations(process: daemon.Daemon) -> int:
    pattern = r"^weft_decode_iterations_total.* (\d+)$"
    counts = re.findall(pattern, process.scrape(), re.M)
    return sum(map(int, counts))


def _expect_same_tokens(runs: dict[str, list[dict[str, Any]]]) -> float:
    """Returns the least share of a run's tokens that equal those of the first run. In
    each sample, only tokens before the first difference count. The logprobs of these
    tokens must be equal up to rounding."""
    first, *others = [run.pop("samples") for own in runs.values() for run in own]
    drawn = sum(len(sample.tokens) for sample in first)
    least = 1.0
    for other in others:
        equal = sum(map(_equal_tokens, other, first))
        least = min(least, equal / drawn)
    if least < EQUAL:
        raise SystemExit(
            f"{least:.3f} of the tokens are equal, and {EQUAL} must be; times mean"
            " nothing"
        )
    return least


def _equal_tokens(ours: weft.Sample, expected: weft.Sample) -> int:
    pairs = zip(ours.tokens, expected.tokens, strict=False)
    equal = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
    if equal == 0:
        return 0
    difference = tolerance.max_difference(
        ours.logprobs[:equal], expected.logprobs[:equal]
    )
    if difference > tolerance.LOGPROBS:
        raise SystemExit(
            f"logprobs of the same tokens differ by {difference:.1e}, more than"
            f" {tolerance.LOGPROBS:.1e}; times mean nothing"
        )
    return equal


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = report.parser("sample_many", __doc__)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8, help="of each prompt")
    parser.add_argument("--max-tokens", type=int, default=256, help="of a sample")
    parser.add_argument(
        "--pieces", type=int, default=16, help="calls in flight of the caller by hand"
    )
    return report.parse_with_model(parser, arguments)
