"""Measures what the log of --state-dir costs for a step of one adapter: bytes on disk,
time of the engine's thread, and time of a sync. Also measures what a snapshot of the
adapter costs.

For comparison, a second adapter whose durability is `memory` takes the same steps, and
so does a model of the Tinker API. They take turns. Their losses must be equal, and the
second adapter must add nothing to the log. Over Tinker a step adds its promise to the
log, and needs a sync for it, too, unless other steps share it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import daemon
import grpc
import inputs
import numpy as np
import report
import shapes
import timing
import tinker_model
from processes import RANK, metric, running, scratch

import weft
from weft import methods
from weft._proto import server_pb2

# The profile spans in which the engine's thread makes records for the log.
SPANS = {"forward_backward": "record batch", "optim_step": "record step"}
# The bytes of a forward_backward and an optim_step over Tinker, relative to gRPC.
MOST_BYTES = 1.15
PROFILE_SECONDS = 300
# Drawing the weights of an 8B shape takes about two minutes.
START_SECONDS = 600.0
# The engine's thread notices a requested profile within this time.
IDLE_SECONDS = 0.5
COUNTS = {
    "log_bytes": "weft_journal_bytes_total",
    "records": "weft_journal_records_total",
    "syncs": "weft_journal_sync_seconds_count",
    "sync_seconds": "weft_journal_sync_seconds_sum",
}


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    with scratch() as work:
        ours = measure(options, work)
    logged = sum(ours[kind]["seconds"] for kind in SPANS)
    unlogged = sum(ours[kind]["unlogged_seconds"] for kind in SPANS)
    recording = sum(ours[kind]["engine_microseconds"] for kind in SPANS) / 1e6
    report.emit_ratios(
        "log_cost",
        options,
        ours=ours,
        ratio={
            "seconds of a step logged/unlogged": report.ratio(logged / unlogged),
            "engine's seconds of recording/of a step": report.ratio(
                recording / unlogged
            ),
            "bytes of a step Tinker/gRPC": report.ratio(
                sum(ours["tinker"][kind]["log_bytes"] for kind in SPANS)
                / sum(ours[kind]["log_bytes"] for kind in SPANS),
                at_most=MOST_BYTES,
            ),
        },
        config={
            "model": options.shape or options.model.name,
            "weights": "int8" if options.shape else "f32",
            "tokens": options.length,
            "rank": RANK,
            "reps": options.reps,
            "threads": options.threads,
        },
    )
    return 0


def measure(options: argparse.Namespace, work: Path) -> dict[str, Any]:
    state = work / "state"
    # Prevents snapshots while the daemon runs. The daemon writes one when it stops.
    flags = ["--state-dir", str(state), "--snapshot-replay-seconds", "86400"]
    address = f"127.0.0.1:{daemon.free_port()}"
    flags += ["--log-format", "json", "--tinker-listen", address]
    flags += ["--model-name", tinker_model.NAME]
    if options.shape:
        daemon.START_SECONDS = START_SECONDS
        options.model = shapes.config_folder(options.shape, work)
        flags += ["--load-format", "dummy", "--weights", "int8"]
    with running(options, work, *flags) as (process, client):
        rows = inputs.rows(options.model, 1, options.length + 1)
        ways = {
            name: over_grpc(client, rows, name, durability)
            for name, durability in (("unlogged", "memory"), ("logged", "step"))
        }
        ways["tinker"] = over_tinker(address, work, rows)
        sides = {name: Steps(process, *way) for name, way in ways.items()}
        _take_turns(sides, 1)  # Warms up.
        for steps in sides.values():
            steps.runs.clear()
        # In each turn, all take a forward_backward and an optim_step.
        with profiled(process, 2 * len(sides) * options.reps) as profile:
            _take_turns(sides, options.reps)
        spans = profile.result()
        # The log has the name of each adapter that it has steps of.
        log = b"".join(file.read_bytes() for file in (state / "log").iterdir())
        if b"unlogged" in log or b"logged" not in log:
            raise SystemExit("a step of durability memory added to the log")
    result = {
        kind: _kind(kind, sides["logged"], sides["unlogged"], spans) for kind in SPANS
    }
    tinker = {
        kind: {
            figure: statistics.mean(sides["tinker"].of(kind, figure))
            for figure in ("log_bytes", "records", "syncs", "seconds")
        }
        for kind in SPANS
    }
    return {**result, "tinker": tinker, "snapshot": _snapshot(process, state)}


# The forward_backward, which returns the loss, and the optim_step of one adapter.
Way = tuple[Callable[[], float], Callable[[], object]]


def over_grpc(client: Any, rows: np.ndarray, name: str, durability: str) -> Way:
    # A record has the adapter's name, so the name is as long as that of a model.
    adapter = client.create_adapter(
        name.ljust(len(f"{0:032}.train.0"), "-"),
        rank=RANK,
        seed=0,
        durability=durability,
    )
    data = [weft.Datum.next_token(rows[0])]
    return (
        lambda: float(adapter.forward_backward(data).metrics["loss:sum"]),
        lambda: adapter.optim_step(learning_rate=1e-4),
    )


def over_tinker(address: str, work: Path, rows: np.ndarray) -> Way:
    model = tinker_model.TinkerModel(address, work, rows)
    return model.forward_backward, model.optim_step


class Steps:
    """Steps of one adapter, with what each added to the log."""

    def __init__(
        self,
        process: daemon.Daemon,
        gradient: Callable[[], float],
        update: Callable[[], object],
    ):
        self._process = process
        self._gradient = gradient
        self._update = update
        self.runs: list[dict[str, Any]] = []

    def take(self) -> None:
        def gradient() -> None:
            run["loss"] = self._gradient()

        run: dict[str, Any] = {}
        run["forward_backward"] = self._counted(gradient)
        run["optim_step"] = self._counted(self._update)
        self.runs.append(run)

    def of(self, kind: str, figure: str) -> list[float]:
        return [run[kind][figure] for run in self.runs]

    def _counted(self, call: Callable[[], object]) -> dict[str, float]:
        before = self._counts()
        seconds = timing.once(call)
        after = self._counts()
        added = {name: after[name] - before[name] for name in COUNTS}
        return {"seconds": seconds, **added}

    def _counts(self) -> dict[str, float]:
        page = self._process.scrape()
        return {name: metric(page, series) for name, series in COUNTS.items()}


@contextmanager
def profiled(process: daemon.Daemon, pieces: int) -> Iterator[Future[Any]]:
    """Profiles the engine's thread for `pieces` pieces of work. After the `with` block,
    the future has the trace's spans, ordered by time."""
    request = server_pb2.ProfileRequest(steps=pieces, seconds=PROFILE_SECONDS)

    def record() -> list[dict[str, Any]]:
        with grpc.insecure_channel(process.address) as channel:
            call = methods.PROFILE.bind(channel)
            parts = call(request, timeout=PROFILE_SECONDS + 60)
            trace = json.loads(b"".join(part.trace for part in parts))
        spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
        return sorted(spans, key=lambda span: float(span["ts"]))

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(record)
        time.sleep(IDLE_SECONDS)
        yield future


def _take_turns(sides: dict[str, Steps], reps: int) -> None:
    for number in range(reps):
        for steps in sides.values():
            steps.take()
        unlogged, logged, tinker = (steps.runs[-1] for steps in sides.values())
        for run in (logged, tinker):
            report.expect_close(
                "loss", run["loss"], unlogged["loss"], report.LOSS_TOLERANCE
            )
        seconds = ", ".join(f"{kind} {logged[kind]['seconds']:.3f} s" for kind in SPANS)
        print(f"log_cost: step {number + 1} of {reps}: {seconds}", file=sys.stderr)


def _kind(
    kind: str, logged: Steps, unlogged: Steps, spans: list[dict[str, Any]]
) -> dict[str, float]:
    """Returns what a step of this kind costs: medians for the times of the engine and
    of the step, and means for the rest."""
    recorded = [span["dur"] for span in spans if span["name"] == SPANS[kind]]
    if len(recorded) != 3 * len(logged.runs):
        raise SystemExit(
            f"a profile of {PROFILE_SECONDS} s has {len(recorded)} of"
            f" {3 * len(logged.runs)} spans; take fewer --reps"
        )
    syncs = sum(logged.of(kind, "syncs"))
    return {
        "log_bytes": statistics.mean(logged.of(kind, "log_bytes")),
        "records": statistics.mean(logged.of(kind, "records")),
        "syncs": syncs / len(logged.runs),
        # They take turns, and the logged adapter comes second.
        "engine_microseconds": statistics.median(recorded[1::3]),
        "sync_seconds": sum(logged.of(kind, "sync_seconds")) / syncs,
        "seconds": statistics.median(logged.of(kind, "seconds")),
        "unlogged_seconds": statistics.median(unlogged.of(kind, "seconds")),
    }


def _snapshot(process: daemon.Daemon, state: Path) -> dict[str, float]:
    """Returns the bytes of the logged adapter's image, and the seconds from the
    beginning of its snapshot until it was on disk."""
    lines = map(json.loads, process.log_path.read_text("utf-8").splitlines())
    stamps = {line["msg"]: datetime.fromisoformat(line["ts"]) for line in lines}
    begin = stamps.get("writing a last snapshot")
    if begin is None:
        raise SystemExit("the stop wrote no snapshot; take more --reps")
    image = next((state / "images").iterdir())
    end = stamps["snapshot written, log cut"]
    return {
        "image_bytes": image.stat().st_size,
        "seconds": (end - begin).total_seconds(),
    }


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = report.parser("log_cost", __doc__)
    parser.add_argument("--length", type=int, default=64, help="tokens of a step")
    parser.add_argument(
        "--shape",
        choices=shapes.SHAPES,
        help="instead of --model: a published model's sizes, random weights in int8",
    )
    parser.set_defaults(reps=20)
    return report.parse_with_model(parser, arguments)
