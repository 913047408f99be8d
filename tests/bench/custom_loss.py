"""Times five custom losses as the server computes them, in one forward pass, and as
the Tinker SDK does, which takes two.

The unmodified SDK calls forward_backward_custom in both ways in turns, on the same
daemon. It needs build/tinker-venv (deploy/setup.sh --tests).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
from typing import Any

import daemon
import report
import tinker_sdk
from processes import running, scratch

# Of the time that the client's way takes: one forward pass of two, and a backward pass
# of at least the forward pass's products, which is 2/3, and the head's logits again.
MOST_TIME = 0.75
MODEL = "bench"
VOCABULARY = 320  # Ids that every model has.
SCRIPT = daemon.REPOSITORY / "tests" / "tinker" / "custom_losses.py"


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    with scratch() as work:
        address = f"127.0.0.1:{daemon.free_port()}"
        flags = ("--tinker-listen", address, "--model-name", MODEL)
        with running(options, work, *flags):
            losses = _compare(options, f"http://{address}")
    for name, ways in losses.items():
        report.expect_close(
            f"{name}: gradient norm",
            ways["server"]["norm"],
            ways["client"]["norm"],
            report.NORM_TOLERANCE,
        )
    middle = {
        name: {way: statistics.median(of["seconds"]) for way, of in ways.items()}
        for name, ways in losses.items()
    }
    report.emit_ratios(
        "custom_loss",
        options,
        ours={name: ways["server"] for name, ways in losses.items()},
        peer={name: ways["client"] for name, ways in losses.items()},
        ratio={
            f"seconds of {name}, server/client": report.ratio(
                of["server"] / of["client"], at_most=MOST_TIME
            )
            for name, of in middle.items()
        },
        config=report.config(options, "data", "reps", tokens=options.length),
    )
    return 0


def _compare(options: argparse.Namespace, url: str) -> dict[str, Any]:
    sizes = (options.data, options.length, VOCABULARY, options.reps)
    run = subprocess.run(
        [str(tinker_sdk.SDK), str(SCRIPT), MODEL, *map(str, sizes)],
        env=tinker_sdk.environment(url),
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode != 0:
        raise SystemExit(
            f"{SCRIPT.name} ends with {run.returncode}: {run.stderr[-600:]}"
        )
    losses: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return losses


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = report.parser("custom_loss", __doc__)
    parser.add_argument("--data", type=int, default=8, help="of one request")
    parser.add_argument("--length", type=int, default=256, help="tokens of each")
    parser.set_defaults(reps=3)
    return report.parse_with_model(parser, arguments)
