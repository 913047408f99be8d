"""Measures what it costs to have each step on disk before its reply, and what it costs
to mix durabilities, because adapters of durability `step` and adapters of durability
`memory` share no batch. Many small adapters train at once.

One server has no --state-dir (forgotten). In another one, which has it, three sides
take turns: all adapters have `step`, all have `memory`, or every second one has each
(half). Losses must be equal up to rounding on all sides.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import daemon
import report
from processes import Trainee, expect_same_losses, metric, resident, running, scratch

PER_STEP = {
    "log_bytes": "weft_journal_bytes_total",
    "syncs": "weft_journal_sync_seconds_count",
    "sync_seconds": "weft_journal_sync_seconds_sum",
}
DURABILITIES = ("step", "memory")


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    runs: dict[str, list[dict[str, float]]] = {}
    with scratch() as work:
        for turn in range(options.rounds):
            forgotten = _forgotten(options, work, runs)
            for adapters in _recorded(options, work, turn, runs):
                expect_same_losses(adapters, forgotten)
    best = {
        side: max(of, key=lambda run: run["tokens_per_second"])
        for side, of in runs.items()
    }
    speed = {side: run["tokens_per_second"] for side, run in best.items()}
    # If mixing cost nothing, `half` would take the mean of the times of both.
    mean = 2 / (1 / speed["step"] + 1 / speed["memory"])
    report.emit_ratios(
        "durability",
        options,
        ours=best,
        ratio={
            "speed step/forgotten": report.ratio(
                speed["step"] / speed["forgotten"], at_least=0.97
            ),
            "speed step/memory": report.ratio(speed["step"] / speed["memory"]),
            "speed half/mean of both": report.ratio(speed["half"] / mean),
        },
        config=report.config(
            options, "adapters", "rounds", "reps", tokens=options.length
        ),
    )
    return 0


def _forgotten(
    options: argparse.Namespace, work: Path, runs: dict[str, list[dict[str, float]]]
) -> list[Trainee]:
    """Returns the adapters, which have taken all their steps."""
    flags = resident(options, 2 * options.adapters)
    with running(options, work, *flags) as (process, client):
        adapters = Trainee.several(options, client, options.adapters)
        _train(options, process, adapters)  # Warms up.
        runs.setdefault("forgotten", []).append(_train(options, process, adapters))
    return adapters


def _recorded(
    options: argparse.Namespace,
    work: Path,
    turn: int,
    runs: dict[str, list[dict[str, float]]],
) -> tuple[list[Trainee], list[Trainee]]:
    """Returns the adapters of either durability, which have taken at least as many
    steps as those of `_forgotten`."""
    slots = resident(options, 2 * options.adapters)
    flags = ("--state-dir", str(work / f"state{turn}"), *slots)
    with running(options, work, *flags) as (process, client):
        step, memory = (
            Trainee.several(options, client, options.adapters, durability)
            for durability in DURABILITIES
        )
        half = [(memory if i % 2 else step)[i] for i in range(options.adapters)]
        sides = {"step": step, "half": half, "memory": memory}
        for adapters in sides.values():
            _train(options, process, adapters)
        # Every second round runs the sides in reverse order, so that drift cancels out.
        for side in list(sides)[:: -1 if turn % 2 else 1]:
            runs.setdefault(side, []).append(_train(options, process, sides[side]))
            print(f"durability: {side} {runs[side][-1]}", file=sys.stderr)
    return step, memory


def _train(
    options: argparse.Namespace, process: daemon.Daemon, adapters: Sequence[Trainee]
) -> dict[str, float]:
    """Trains all adapters at once, for `reps` rounds."""
    before = process.scrape()
    start = time.perf_counter()
    with ThreadPoolExecutor(options.adapters) as pool:
        for _ in range(options.reps):
            list(pool.map(Trainee.step, adapters))
    seconds = time.perf_counter() - start
    after = process.scrape()
    rounds = options.adapters * options.reps
    result = {"tokens_per_second": rounds * options.length / seconds}
    for name, series in PER_STEP.items():
        added = metric(after, series) - metric(before, series)
        result[f"{name}_per_step"] = added / (2 * rounds)
    return result


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = report.parser("durability", __doc__)
    parser.add_argument("--adapters", type=int, default=64)
    parser.add_argument("--length", type=int, default=64, help="tokens of a step")
    return report.parse_with_model(parser, arguments)
