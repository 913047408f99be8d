"""Measures how long a client waits while its adapter moves between the logs of two
daemons with one state in a SeaweedFS: the longest time of a round of training (gradient
and optimizer step) during a move, less that of a usual round. An equal adapter, trained
afterwards without moves, must have the same losses, and gives the usual time."""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import daemon
import inputs
import numpy as np
import report
from processes import metric, running, scratch

import weft

sys.path.append(str(Path(__file__).resolve().parents[1] / "fleet"))

import stores

ROUNDS_BETWEEN = 3  # Of training between two moves.
LEFT = 'weft_log_moves_total{result="left"}'


class Trainer:
    """Trains an adapter with one row after another, and notes losses and ends."""

    def __init__(self, client: Any, name: str, rank: int, rows: np.ndarray) -> None:
        self._data = [weft.Datum.next_token(row) for row in rows]
        self.adapter = client.create_adapter(name, rank=rank, seed=1)
        self.losses: list[float] = []
        self.ends: list[float] = []

    def round(self) -> None:
        datum = self._data[len(self.losses) % len(self._data)]
        step = self.adapter.forward_backward([datum])
        self.adapter.optim_step(learning_rate=1e-4)
        self.losses.append(float(step.metrics["loss:sum"]))
        self.ends.append(time.monotonic())

    @contextmanager
    def training(self) -> Iterator[None]:
        """Trains beside what is inside."""
        done = threading.Event()
        errors: list[Exception] = []

        def train() -> None:
            try:
                while not done.is_set():
                    self.round()
            except weft.WeftError as error:
                errors.append(error)

        thread = threading.Thread(target=train)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
        if errors:
            raise errors[0]

    def wait_for_rounds(self, count: int) -> None:
        before = len(self.ends)
        daemon.wait_until(lambda: len(self.ends) >= before + count)

    def longest_round(self, begin: float, end: float) -> float:
        """Returns the longest round that overlaps the time from `begin` to `end`."""
        return max(b - a for a, b in pairwise(self.ends) if b > begin and a < end)


def measure(options: argparse.Namespace, work: Path) -> dict[str, Any]:
    rows: np.ndarray = inputs.rows(options.model, options.rows, options.length + 1)
    with ExitStack() as stack:
        store = stack.enter_context(stores.seaweedfs(work / "seaweedfs"))
        os.environ.update(store.environment())
        flags = ("--state", store.url, "--logs", "2", "--instance")
        daemons = [
            stack.enter_context(running(options, work, *flags, name))
            for name in ("a", "b")
        ]
        addresses = ",".join(process.address for process, _ in daemons)
        client = stack.enter_context(weft.Client(addresses, timeout=600.0))
        moved = Trainer(client, "moved", options.rank, rows)
        log = 0  # Of the daemon that is called first.
        moves = []
        with moved.training():
            moved.wait_for_rounds(ROUNDS_BETWEEN)
            for number in range(options.reps):
                log = 1 - log
                begin = time.monotonic()
                client.move_adapter("moved", log)
                moves.append((begin, time.monotonic()))
                moved.wait_for_rounds(ROUNDS_BETWEEN)
                pause = moved.longest_round(*moves[-1])
                print(f"move_pause: {number + 1}: {pause:.2f} s", file=sys.stderr)
        left = sum(metric(process.scrape(), LEFT) for process, _ in daemons)
        if left != options.reps:
            raise SystemExit(f"{left:g} of {options.reps} moves; times mean nothing")
        parameters = moved.adapter.info().num_parameters
        calm = Trainer(client, "calm", options.rank, rows)
        for loss in moved.losses:
            calm.round()
            report.expect_close("loss", loss, calm.losses[-1], report.LOSS_TOLERANCE)
    usual = statistics.median(b - a for a, b in pairwise(calm.ends))
    return {
        "pauses": sorted(moved.longest_round(*move) - usual for move in moves),
        "moves": sorted(end - begin for begin, end in moves),
        "round": usual,
        "rounds": len(moved.losses),
        "equal_losses": sum(
            a == b for a, b in zip(moved.losses, calm.losses, strict=True)
        ),
        "parameters": parameters,
    }


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    with scratch() as work:
        ours = measure(options, work)
    report.emit_ratios(
        "move_pause",
        options,
        ours=ours,
        ratio={
            "seconds that a client waits for a move, median": report.ratio(
                statistics.median(ours["pauses"]), at_most=options.target
            ),
            "the same, most": report.ratio(max(ours["pauses"])),
            "seconds of a move, median": report.ratio(statistics.median(ours["moves"])),
        },
        config=report.config(options, "length", "reps", store="SeaweedFS"),
    )
    return 0


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = report.parser("move_pause", __doc__)
    parser.set_defaults(reps=20)
    parser.add_argument("--length", type=int, default=64, help="tokens of a step")
    parser.add_argument("--rows", type=int, default=16, help="of different tokens")
    parser.add_argument(
        "--target", type=float, default=3.0, help="seconds, of the median pause"
    )
    return report.parse_with_device(parser, arguments)
