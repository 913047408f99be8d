"""Measures what it costs to have each step on disk before its reply. Many small
adapters train at once, with and without --state-dir, in turns. Reports the tokens per
second of both sides, and the bytes and syncs of the log per step. Losses must be equal
up to rounding on both sides."""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import inputs
import report
from processes import RANK, metric, running, scratch

import weft

PER_STEP = {
    "log_bytes": "weft_journal_bytes_total",
    "syncs": "weft_journal_sync_seconds_count",
    "sync_seconds": "weft_journal_sync_seconds_sum",
}


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    sides: dict[str, list[dict[str, Any]]] = {"recorded": [], "forgotten": []}
    with scratch() as work:
        for turn in range(options.rounds):
            for side, runs in sides.items():
                runs.append(measure(options, work / f"{side}{turn}", side))
                print(f"durability: {side} {runs[-1]}", file=sys.stderr)
        _expect_same_losses(sides)
    best = {
        side: max(runs, key=lambda run: float(run["tokens_per_second"]))
        for side, runs in sides.items()
    }
    report.emit_ratios(
        "durability",
        options,
        ours=best,
        ratio={
            "speed recorded/forgotten": report.ratio(
                best["recorded"]["tokens_per_second"]
                / best["forgotten"]["tokens_per_second"],
                at_least=0.97,
            ),
        },
        config=report.config(options, "adapters", tokens=options.length),
    )
    return 0


def measure(options: argparse.Namespace, work: Path, side: str) -> dict[str, Any]:
    """Trains all adapters at once, for `reps` rounds. In a round, each adapter takes a
    forward_backward and an optim_step."""
    work.mkdir(parents=True)
    state = work / "state"
    flags = ["--state-dir", str(state)] if side == "recorded" else []
    rows = inputs.rows(options.model, options.adapters, options.length + 1)
    data = [[weft.Datum.next_token(row)] for row in rows]
    result: dict[str, Any] = {}
    with running(options, work, *flags) as (process, client):
        adapters = [
            client.create_adapter(f"a{i}", rank=RANK, seed=i)
            for i in range(options.adapters)
        ]

        def step(number: int) -> float:
            loss = adapters[number].forward_backward(data[number]).metrics["loss:sum"]
            adapters[number].optim_step(learning_rate=1e-4)
            return float(loss)

        with ThreadPoolExecutor(options.adapters) as pool:
            list(pool.map(step, range(options.adapters)))
            before = process.scrape()
            start = time.perf_counter()
            losses = [
                list(pool.map(step, range(options.adapters)))
                for _ in range(options.reps)
            ]
            seconds = time.perf_counter() - start
            after = process.scrape()
        tokens = options.adapters * options.length * options.reps
        result["tokens_per_second"] = tokens / seconds
        result["losses"] = losses
        steps = 2 * options.adapters * options.reps
        for name, series in PER_STEP.items():
            added = metric(after, series) - metric(before, series)
            result[f"{name}_per_step"] = added / steps
    return result


def _expect_same_losses(sides: dict[str, list[dict[str, Any]]]) -> None:
    runs = [run.pop("losses") for both in sides.values() for run in both]
    for other in runs[1:]:
        for ours, expected in zip(chain(*other), chain(*runs[0]), strict=True):
            report.expect_close("loss", ours, expected, report.LOSS_TOLERANCE)


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = report.parser("durability", __doc__)
    parser.add_argument("--adapters", type=int, default=64)
    parser.add_argument("--length", type=int, default=64, help="tokens of a step")
    return report.parse_with_model(parser, arguments)
