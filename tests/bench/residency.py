"""Trains many adapters in turn. Compares the steps per second with all adapters
resident on the device, and with a few slots that all adapters share. Every adapter's
steps must give the same losses on both sides."""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import machine
import report
from processes import Trainee, expect_same_losses, running, scratch


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    points = []
    with scratch() as work:
        for count in options.adapters:
            expected, all_resident = measure(options, work, count, count)
            adapters, paged = measure(options, work, count, options.slots)
            expect_same_losses(adapters, expected)
            points.append({"adapters": count, "resident": all_resident, "paged": paged})
            print(f"residency: {points[-1]}", file=sys.stderr)
    report.emit_ratios(
        "residency",
        options,
        ours={"points": points},
        ratio={
            f"speed paged/resident, {point['adapters']} adapters": report.ratio(
                point["paged"]["steps_per_second"]
                / point["resident"]["steps_per_second"]
            )
            for point in points
        },
        config=report.config(options, "slots", "clients", tokens=options.length),
    )
    return 0


def measure(
    options: argparse.Namespace, work: Path, count: int, slots: int
) -> tuple[list[Trainee], dict[str, Any]]:
    """Runs `rounds` steps (forward_backward and optim_step) of each adapter.
    Clients take the adapters in turn."""
    flags = ("--max-resident-adapters", str(slots))
    with running(options, work, *flags) as (process, client):
        adapters = Trainee.several(options, client, count)
        memory = machine.PeakMemory(process.pid)
        with ThreadPoolExecutor(options.clients) as pool:
            list(pool.map(Trainee.step, adapters))
            start = time.perf_counter()
            for _ in range(options.rounds):
                list(pool.map(Trainee.step, adapters))
            seconds = time.perf_counter() - start
        return adapters, {
            "steps_per_second": count * options.rounds / seconds,
            **memory.read(),
        }


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = report.parser("residency", __doc__)
    parser.add_argument("--adapters", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--slots", type=int, default=8, help="resident at a time")
    parser.add_argument("--length", type=int, default=64, help="tokens of a step")
    parser.add_argument("--clients", type=int, default=4)
    return report.parse_with_model(parser, arguments)
