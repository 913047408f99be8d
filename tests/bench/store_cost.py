"""Measures what a state in an object store costs beside one on a local disk: one daemon
with --state-dir and one with --state in a SeaweedFS on this machine. They take turns.

Many clients train small adapters, and the throughput of the two is compared. Then one
client takes steps alone, over gRPC and over Tinker's API, and its wait is compared with
the time of a PUT, which the daemon measures. Losses must be equal.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import daemon
import inputs
import numpy as np
import report
import timing
import tinker_model
from log_cost import over_tinker
from processes import metric, running, scratch

import weft

sys.path.append(str(Path(__file__).resolve().parents[1] / "fleet"))

import stores

THREADS = 8  # Of clients. Each trains its share of the adapters.
LEAST_THROUGHPUT = 0.97
MOST_PUTS = {"gRPC": 1.5, "Tinker": 3.0}
PUT_SUM = 'weft_store_request_seconds_sum{operation="create"}'
PUT_COUNT = 'weft_store_request_seconds_count{operation="create"}'


class Side:
    """A daemon with adapters that train."""

    def __init__(
        self, process: Any, client: Any, address: str, work: Path, rows: Any, rank: int
    ) -> None:
        self.process = process
        self._data = [weft.Datum.next_token(row) for row in rows]
        names = [f"a{number}" for number in range(len(rows))]
        self._adapters = [client.create_adapter(n, rank=rank, seed=0) for n in names]
        self._tinker = over_tinker(address, work, rows)
        self.rates: list[float] = []
        self.waits: dict[str, list[float]] = {"gRPC": [], "Tinker": []}
        self.losses: list[float] = []

    def train_all(self, steps: int) -> None:
        """Trains all adapters, and notes steps a second."""

        def share(first: int) -> list[float]:
            losses = []
            for _ in range(steps):
                for number in range(first, len(self._adapters), THREADS):
                    losses.append(self._step(number))
            return losses

        start = time.monotonic()
        with ThreadPoolExecutor(THREADS) as pool:
            losses = list(pool.map(share, range(THREADS)))
        seconds = time.monotonic() - start
        self.rates.append(steps * len(self._adapters) / seconds)
        self.losses = [loss for part in losses for loss in part]

    def step_alone(self) -> None:
        """Takes a step over gRPC and one over Tinker, and notes the waits for both."""
        gradient, update = self._tinker
        gradient()
        self.waits["Tinker"].append(timing.once(update))
        self._adapters[0].forward_backward(self._data[:1])
        update_grpc = self._adapters[0].optim_step
        self.waits["gRPC"].append(timing.once(lambda: update_grpc(learning_rate=1e-4)))

    def _step(self, number: int) -> float:
        adapter = self._adapters[number]
        step = adapter.forward_backward([self._data[number]])
        adapter.optim_step(learning_rate=1e-4)
        return float(step.metrics["loss:sum"])

    def put_seconds(self) -> tuple[float, float]:
        page = self.process.scrape()
        return metric(page, PUT_SUM), metric(page, PUT_COUNT)


def measure(options: argparse.Namespace, work: Path) -> dict[str, Any]:
    rows: np.ndarray = inputs.rows(options.model, options.adapters, options.length + 1)
    with ExitStack() as stack:
        store = stack.enter_context(stores.seaweedfs(work / "seaweedfs"))
        os.environ.update(store.environment())
        places = {
            "disk": ("--state-dir", str(work / "state")),
            "store": ("--state", store.url),
        }
        sides = {}
        for name, place in places.items():
            address = f"127.0.0.1:{daemon.free_port()}"
            flags = [*place, "--tinker-listen", address]
            flags += ["--model-name", tinker_model.NAME, "--max-adapters", "1000"]
            process, client = stack.enter_context(running(options, work, *flags))
            folder = work / name
            folder.mkdir()
            sides[name] = Side(process, client, address, folder, rows, options.rank)
        for side in sides.values():  # Warms up.
            side.train_all(1)
            side.rates.clear()
        for number in range(options.reps):
            # Whoever comes second would pay for what the first has left behind.
            for name in sorted(sides, reverse=number % 2 == 1):
                sides[name].train_all(options.steps)
            report.expect_close(
                "loss",
                sum(sides["store"].losses),
                sum(sides["disk"].losses),
                report.LOSS_TOLERANCE,
            )
            rates = ", ".join(f"{n} {s.rates[-1]:.1f}" for n, s in sides.items())
            print(f"store_cost: {number + 1}: steps a second: {rates}", file=sys.stderr)
        before = sides["store"].put_seconds()
        for _ in range(options.alone):
            for side in sides.values():
                side.step_alone()
        after = sides["store"].put_seconds()
    put = (after[0] - before[0]) / (after[1] - before[1])
    return {
        **{f"{n}_steps_per_second": max(s.rates) for n, s in sides.items()},
        "put_seconds": put,
        **{
            f"{way}_added_seconds": statistics.median(sides["store"].waits[way])
            - statistics.median(sides["disk"].waits[way])
            for way in MOST_PUTS
        },
    }


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    if not stores.is_installed():
        raise SystemExit("store_cost: no build/store-venv: run deploy/setup.sh --tests")
    with scratch() as work:
        ours = measure(options, work)
    report.emit_ratios(
        "store_cost",
        options,
        ours=ours,
        ratio={
            "throughput store/disk": report.ratio(
                ours["store_steps_per_second"] / ours["disk_steps_per_second"],
                at_least=LEAST_THROUGHPUT,
            ),
            **{
                f"added wait of a step over {way}, in PUTs": report.ratio(
                    ours[f"{way}_added_seconds"] / ours["put_seconds"], at_most=most
                )
                for way, most in MOST_PUTS.items()
            },
        },
        config={
            "model": options.model.name,
            "adapters": options.adapters,
            "tokens": options.length,
            "rank": options.rank,
            "steps": options.steps,
            "reps": options.reps,
            "threads": options.threads,
        },
    )
    return 0


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = report.parser("store_cost", __doc__)
    parser.add_argument("--length", type=int, default=64, help="tokens of a step")
    parser.add_argument("--adapters", type=int, default=64)
    parser.add_argument("--rank", type=int, default=4, help="of the adapters")
    parser.add_argument("--steps", type=int, default=3, help="of each adapter a turn")
    parser.add_argument("--alone", type=int, default=30, help="steps of one client")
    parser.set_defaults(reps=5)
    return report.parse_with_model(parser, arguments)
