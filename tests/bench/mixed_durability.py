"""Measures the cost of mixing durabilities. Mixing may cost time, because adapters of
durability `step` and adapters of durability `memory` share no batch. In one server many
small adapters train at once. Three sides take turns: all adapters have `step`, all have
`memory`, or half have `step` and half `memory`. Losses must be equal up to rounding,
whatever the durability."""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import inputs
import report
from processes import RANK, resident, running, scratch

import weft

SIDES = ("step", "half", "memory")


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    with scratch() as work:
        seconds = measure(options, work)
    tokens = options.adapters * options.length
    best = {side: min(times) for side, times in seconds.items()}
    report.emit_ratios(
        "mixed_durability",
        options,
        ours={
            side: {"tokens_per_second": tokens / best[side], "all_seconds": times}
            for side, times in seconds.items()
        },
        ratio={
            # If mixing cost nothing, `half` would take the mean of the other times.
            "speed half/mean of both": report.ratio(
                (best["step"] + best["memory"]) / 2 / best["half"]
            ),
            "speed step/memory": report.ratio(best["memory"] / best["step"]),
        },
        config=report.config(options, "adapters", "rounds", tokens=options.length),
    )
    return 0


def measure(options: argparse.Namespace, work: Path) -> dict[str, list[float]]:
    """Returns the seconds of each round, by side. In a round, every adapter of the side
    takes a forward_backward and an optim_step."""
    count = options.adapters
    rows = inputs.rows(options.model, count, options.length + 1)
    data = [[weft.Datum.next_token(row)] for row in rows]
    flags = ("--state-dir", str(work / "state"), *resident(options, 2 * count))
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    with (
        running(options, work, *flags) as (_, client),
        ThreadPoolExecutor(count) as pool,
    ):
        runs = {
            durability: [
                Run(client, f"{durability}{i}", durability, data[i], seed=i)
                for i in range(count)
            ]
            for durability in ("step", "memory")
        }
        mixed = [runs["memory" if i % 2 else "step"][i] for i in range(count)]
        sides = {"step": runs["step"], "half": mixed, "memory": runs["memory"]}
        for number in range(options.rounds + 1):
            # Every second round runs the sides in reverse order, so that drift cancels
            # out.
            for side in SIDES[:: -1 if number % 2 else 1]:
                start = time.perf_counter()
                list(pool.map(Run.take, sides[side]))
                seconds[side].append(time.perf_counter() - start)
                print(
                    f"mixed_durability: round {number} of {options.rounds}, {side}:"
                    f" {seconds[side][-1]:.2f} s",
                    file=sys.stderr,
                )
        for logged, unlogged in zip(runs["step"], runs["memory"], strict=True):
            for ours, expected in zip(logged.losses, unlogged.losses, strict=False):
                report.expect_close("loss", ours, expected, report.LOSS_TOLERANCE)
    # The first round warms up and does not count.
    return {side: times[1:] for side, times in seconds.items()}


class Run:
    """Trains one adapter step by step and keeps the losses."""

    def __init__(
        self, client: Any, name: str, durability: str, data: Any, seed: int
    ) -> None:
        self._adapter = client.create_adapter(
            name, rank=RANK, seed=seed, durability=durability
        )
        self._data = data
        self.losses: list[float] = []

    def take(self) -> None:
        loss = self._adapter.forward_backward(self._data).metrics["loss:sum"]
        self._adapter.optim_step(learning_rate=1e-4)
        self.losses.append(float(loss))


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = report.parser("mixed_durability", __doc__)
    parser.add_argument("--adapters", type=int, default=64)
    parser.add_argument("--length", type=int, default=64, help="tokens of a step")
    parser.set_defaults(rounds=5)
    return report.parse_with_model(parser, arguments)
