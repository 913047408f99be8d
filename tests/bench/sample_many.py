"""Draws a batch of reinforcement learning by one `sample_many`, and the same
prompts by a caller who offers them in pieces and replaces each piece that has
ended. Both sides must draw the same tokens, because these depend on the seed and
not on the batch."""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import daemon
import inputs
import machine
import report
from processes import RANK, running, scratch

import weft

SEED = 11
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
    _expect_same_tokens(runs)
    best = {
        side: min(own, key=lambda run: float(run["seconds"]))
        for side, own in runs.items()
    }
    result = {
        "bench": "sample_many",
        "ours": best,
        "peer": {},
        "ratio": {
            "speed at once/in pieces": _ratio(best, "seconds"),
            "speed at once/in pieces, by iterations": _ratio(best, "decode_iterations"),
        },
        "config": {
            "model": options.model.name,
            "prompts": options.prompts,
            "samples": options.samples,
            "max_tokens": options.max_tokens,
            "pieces": options.pieces,
            "rank": RANK,
            "threads": options.threads,
            "rounds": options.rounds,
        },
    }
    report.emit_ratios(result, options.output)
    return 0


def measure(draw: Callable[[], Results], process: daemon.Daemon) -> dict[str, Any]:
    """Returns the caller's seconds, and the daemon's processor seconds and decode
    iterations, for one batch."""
    iterations, cpu = _iterations(process), machine.cpu_seconds(process.pid)
    start = time.perf_counter()
    results = draw()
    seconds = time.perf_counter() - start
    tokens = [[list(s.tokens) for s in result.samples] for result in results]
    drawn = sum(len(sample) for group in tokens for sample in group)
    return {
        "seconds": seconds,
        "cpu_seconds": machine.cpu_seconds(process.pid) - cpu,
        "decode_iterations": _iterations(process) - iterations,
        "drawn_tokens": drawn,
        "tokens_per_second": drawn / seconds,
        "tokens": tokens,
    }


def _iterations(process: daemon.Daemon) -> int:
    pattern = r"^weft_decode_iterations_total.* (\d+)$"
    counts = re.findall(pattern, process.scrape(), re.M)
    return sum(map(int, counts))


def _ratio(best: dict[str, dict[str, Any]], name: str) -> dict[str, Any]:
    value = best["in pieces"][name] / best["at once"][name]
    return report.ratio(value, at_least=0.95)


def _expect_same_tokens(runs: dict[str, list[dict[str, Any]]]) -> None:
    drawn = [run.pop("tokens") for own in runs.values() for run in own]
    for other in drawn[1:]:
        if other != drawn[0]:
            raise SystemExit("the sides drew different tokens; times mean nothing")


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = report.parser("sample_many", __doc__)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8, help="of each prompt")
    parser.add_argument("--max-tokens", type=int, default=256, help="of a sample")
    parser.add_argument(
        "--pieces", type=int, default=16, help="calls in flight of the caller by hand"
    )
    return report.parse_with_model(parser, arguments)
