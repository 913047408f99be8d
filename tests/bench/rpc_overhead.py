"""Measures the cost of calls over gRPC in three ways. Measures the processor time that
a request of a million tokens takes outside the engine's threads. Compares a step of the
daemon with the same step of the engine in its own process. Times the smallest calls on
a tiny model, where nothing else counts."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import daemon
import inputs
import machine
import models
import numpy as np
import report
import timing
from processes import RANK, run_program, running, scratch

import weft

ENGINE_BENCH = daemon.BUILD_DIR / "tests" / "bench" / "engine_bench"
ENGINE_THREADS = "weft-engine"
MOST_CPU_SECONDS = 0.1
MOST_CALL_SECONDS = 3e-3
# The daemon's least speed, as a fraction of the engine's speed in its own process.
LEAST_SPEED = 0.97
WARM_CALLS = 50


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    with scratch() as work:
        sides = {
            "calls": _best([_calls(options, work) for _ in range(options.rounds)]),
            "large request": _best(
                [_large_request(options, work) for _ in range(options.rounds)]
            ),
            **_steps(options, work),
        }
    ratios = {
        f"{name} / {MOST_CALL_SECONDS * 1e3:g} ms": report.ratio(
            seconds / MOST_CALL_SECONDS, at_most=1
        )
        for name, seconds in sides["calls"].items()
    }
    cpu = sides["large request"]["cpu_seconds_outside_engine"]
    ratios["processor time of a large request / limit"] = report.ratio(
        cpu / MOST_CPU_SECONDS * 1e6 / options.tokens, at_most=1
    )
    ratios["speed daemon/engine alone"] = report.ratio(
        min(sides["engine"]["seconds"]) / min(sides["daemon"]["seconds"]),
        at_least=LEAST_SPEED,
    )
    report.emit_ratios(
        "rpc_overhead",
        options,
        ours={k: v for k, v in sides.items() if k != "engine"},
        peer={"engine": sides["engine"]},
        ratio=ratios,
        config=report.config(
            options,
            "tokens",
            "calls",
            "rounds",
            step=[options.sequences, options.length],
        ),
    )
    return 0


def _calls(options: argparse.Namespace, work: Path) -> dict[str, float]:
    """Returns the median seconds of the smallest calls, made one after another."""
    with running(options, work, model=models.tiny_model("llama-tied")) as (_, client):
        adapter = client.create_adapter("bench", rank=8)
        data = [weft.Datum.next_token(np.arange(3, 20))]
        return {
            "forward_backward 1 x 16": _median(
                lambda: adapter.forward_backward(data), options.calls
            ),
            "optim_step": _median(
                lambda: adapter.optim_step(learning_rate=0.0), options.calls
            ),
            "sample 1 x 1": _median(
                lambda: adapter.sample([5], max_tokens=1), options.calls
            ),
        }


def _median(call: Callable[[], Any], count: int) -> float:
    return statistics.median(timing.each(call, WARM_CALLS + count)[WARM_CALLS:])


def _large_request(options: argparse.Namespace, work: Path) -> dict[str, float]:
    """Returns the processor seconds of the daemon's threads other than the
    engine's, for requests of 1/8, 1/4, 1/2 and all of the tokens."""
    model = models.tiny_model("llama-tied")
    length = inputs.config(model)["max_position_embeddings"]
    rows = inputs.rows(model, 8, length + 1)
    result = {}
    with running(options, work, model=model) as (process, client):
        adapter = client.create_adapter("bench", rank=8)
        adapter.forward_backward([weft.Datum.next_token(rows[0])])
        for part in (8, 4, 2, 1):
            count = options.tokens // part // length
            data = [
                weft.Datum(row[:-1], row[1:], weights=np.ones(length, np.float32))
                for row in (rows[i % len(rows)] for i in range(count))
            ]
            before = machine.cpu_seconds(process.pid, besides=ENGINE_THREADS)
            adapter.forward_backward(data)
            spent = machine.cpu_seconds(process.pid, besides=ENGINE_THREADS) - before
            result[f"{count * length} tokens"] = spent
    result["cpu_seconds_outside_engine"] = spent
    return result


def _steps(options: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Runs the same step by the daemon and by the engine alone, in turns."""
    tokens = inputs.rows(options.model, options.sequences, options.length + 1)
    path = work / "tokens.i32"
    tokens.astype(np.int32).tofile(path)
    sizes = (options.sequences, RANK, options.reps, options.threads)
    command = [ENGINE_BENCH, options.model, path, *map(str, sizes), "f32"]
    runs: report.Runs = {"daemon": [], "engine": []}
    for _ in range(options.rounds):
        runs["engine"].append(run_program(command, options.threads))
        runs["daemon"].append(_daemon_steps(options, work, tokens))
    sides = {
        side: {
            "seconds": list(chain.from_iterable(r["seconds"] for r in of)),
            "loss": of[-1]["loss"],
        }
        for side, of in runs.items()
    }
    losses = (sides["daemon"]["loss"], sides["engine"]["loss"])
    report.expect_close("loss", *losses, report.LOSS_TOLERANCE)
    return sides


def _daemon_steps(
    options: argparse.Namespace, work: Path, tokens: np.ndarray
) -> report.Run:
    data = [weft.Datum.next_token(row) for row in tokens]
    with running(options, work) as (_, client):
        adapter = client.create_adapter("bench", rank=RANK)
        loss = adapter.forward_backward(data).metrics["loss:sum"]
        seconds = timing.each(lambda: adapter.forward_backward(data), options.reps)
    return {"seconds": seconds, "loss": loss}


def _best(runs: list[dict[str, float]]) -> dict[str, float]:
    return {name: min(run[name] for run in runs) for name in runs[0]}


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = report.parser("rpc_overhead", __doc__)
    parser.add_argument("--calls", type=int, default=300, help="of each kind")
    parser.add_argument("--tokens", type=int, default=1_000_000, help="large request")
    parser.add_argument("--sequences", type=int, default=4, help="of the step")
    parser.add_argument("--length", type=int, default=256, help="tokens of each")
    return report.parse_with_model(parser, arguments)
