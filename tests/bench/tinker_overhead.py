"""Times a ForwardBackward of many short data over the Tinker front and over gRPC.

Both send the same data to the same daemon, in turns. The times include serializing
the request and parsing the result at the client.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import daemon
import inputs
import numpy as np
import report
import timing
from processes import RANK, running, scratch
from tinker_model import NAME, TinkerModel

import weft

MOST_COST = 0.10  # Extra time over Tinker, as a fraction of the time over gRPC.


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    rows = inputs.rows(options.model, options.data, options.length + 1)
    with scratch() as work:
        runs = [_round(options, work, rows) for _ in range(options.rounds)]
    sides = {
        side: {
            "seconds": [seconds for run in runs for seconds in run[side]["seconds"]],
            "loss": runs[-1][side]["loss"],
        }
        for side in ("tinker", "grpc")
    }
    losses = (sides["tinker"]["loss"], sides["grpc"]["loss"])
    report.expect_close("loss", *losses, report.LOSS_TOLERANCE)
    middle = {side: statistics.median(of["seconds"]) for side, of in sides.items()}
    ratio = middle["tinker"] / middle["grpc"]
    report.emit_ratios(
        "tinker_overhead",
        options,
        ours={"tinker": sides["tinker"]},
        peer={"grpc": sides["grpc"]},
        ratio={"seconds tinker/grpc": report.ratio(ratio, at_most=1 + MOST_COST)},
        config=report.config(options, "data", "rounds", tokens=options.length),
    )
    return 0


def _round(
    options: argparse.Namespace, work: Path, rows: np.ndarray
) -> dict[str, report.Run]:
    address = f"127.0.0.1:{daemon.free_port()}"
    flags = ("--tinker-listen", address, "--model-name", NAME)
    with running(options, work, *flags) as (_, client):
        adapter = client.create_adapter("bench", rank=RANK)
        ones = np.ones(options.length, np.float32)
        data = [weft.Datum(row[:-1], row[1:], weights=ones) for row in rows]
        tinker = TinkerModel(address, work, rows)
        ways = {
            "grpc": lambda: adapter.forward_backward(data).metrics["loss:sum"],
            "tinker": tinker.forward_backward,
        }
        result: dict[str, report.Run] = {}
        for side, way in ways.items():
            loss = way()
            result[side] = {"loss": loss, "seconds": []}
        for _ in range(options.reps):
            for side, way in ways.items():
                result[side]["seconds"] += timing.each(way, 1)
        return result


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = report.parser("tinker_overhead", __doc__)
    parser.add_argument("--data", type=int, default=1024, help="of one request")
    parser.add_argument("--length", type=int, default=16, help="tokens of each")
    return report.parse_with_model(parser, arguments)
