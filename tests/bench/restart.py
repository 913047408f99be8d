"""Measures how long weftd takes to start and to restore all adapters of --state-dir.
One start follows a clean stop. Another follows SIGKILL, and some steps are then in the
log but in no snapshot. A start ends when all adapters are restored. The adapters' steps
and versions must be the same as before the start."""

from __future__ import annotations

import argparse
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import report
from processes import Trainee, running, running_until_killed, scratch

Positions = dict[str, tuple[int, int]]


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    with scratch() as work:
        ours = measure(options, work)
    report.emit_ratios(
        "restart",
        options,
        ours=ours,
        ratio={
            "seconds of a start after a stop": report.ratio(
                ours["start_after_stop"], at_most=30
            ),
            # This time has no target. --snapshot-replay-seconds bounds it.
            "seconds of a start after a kill": report.ratio(ours["start_after_kill"]),
        },
        config=report.config(
            options, "adapters", "resident", "unsaved", tokens=options.length
        ),
    )
    return 0


def measure(options: argparse.Namespace, work: Path) -> dict[str, Any]:
    resident = ("--max-resident-adapters", str(options.resident))
    flags = ("--state-dir", str(work / "state"), *resident)
    result: dict[str, Any] = {}
    with running(options, work, *flags) as (_, client):
        adapters = Trainee.several(options, client, options.adapters)
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(Trainee.step, adapters))
        known = _positions(client)
        begin = time.perf_counter()
    result["stop_seconds"] = time.perf_counter() - begin
    begin = time.perf_counter()
    with running_until_killed(options, work, *flags) as (_, client):
        result["start_after_stop"] = time.perf_counter() - begin
        _expect_same(_positions(client), known)
        for adapter in adapters[: options.unsaved]:
            adapter.reopen(client)
            adapter.step()
        known = _positions(client)
    begin = time.perf_counter()
    with running(options, work, *flags) as (_, client):
        result["start_after_kill"] = time.perf_counter() - begin
        _expect_same(_positions(client), known)
    return result


def _positions(client: Any) -> Positions:
    return {a.adapter_id: (a.last_step, a.version) for a in client.adapters()}


def _expect_same(positions: Positions, known: Positions) -> None:
    if positions != known:
        raise AssertionError("a start did not put all adapters back")


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = report.parser("restart", __doc__)
    parser.add_argument("--adapters", type=int, default=100)
    parser.add_argument(
        "--resident", type=int, default=0, help="as --max-resident-adapters of weftd"
    )
    parser.add_argument("--length", type=int, default=16, help="tokens of a step")
    parser.add_argument(
        "--unsaved", type=int, default=10, help="adapters with steps in the log alone"
    )
    return report.parse_with_model(parser, arguments)
