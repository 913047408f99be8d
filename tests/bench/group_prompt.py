"""forward_backward of a group of completions of one prompt: the prompt run once
against the prompt repeated, both by Weft, in one run.

Each measurement has a fresh daemon, is warmed up, and has the machine to itself;
the sides alternate, and the best repetition counts. Loss and gradient norm must
be the same before a time counts.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import machine
import models
import train_step
import weft


FLAGS = {"ours": "--share-prompts", "peer": "--no-share-prompts"}


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    tokens = _tokens(options)
    data = [weft.Datum.next_token(row, prompt_length=options.prompt) for row in tokens]
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in FLAGS}
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as scratch:
        for number in range(options.rounds):
            for side, flag in FLAGS.items():
                name = f"{side}-{number}"
                runs[side].append(
                    train_step.time_weft(options, tokens, data, Path(scratch), name, flag)
                )
            train_step.expect_equal(runs["ours"][-1], runs["peer"][-1])
            times = ", ".join(f"{side} {runs[side][-1]['seconds']}" for side in FLAGS)
            print(f"round {number + 1}: {times}", file=sys.stderr)
    train_step.emit(_report(options, runs), options.output)
    return 0


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="run.py group_prompt",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--model", type=Path, help="model folder; SmolLM2 by default")
    parser.add_argument("--group", type=int, default=8, help="completions")
    parser.add_argument("--prompt", type=int, default=512, help="tokens")
    parser.add_argument("--completion", type=int, default=64, help="tokens of each")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rounds", type=int, default=2, help="daemons of each side")
    parser.add_argument("--reps", type=int, default=3, help="timed steps per daemon")
    parser.add_argument("--output", type=Path, help="also write the JSON line here")
    options = parser.parse_args(arguments)
    options.model = options.model or models.demo_model()
    return options


def _tokens(options: argparse.Namespace) -> np.ndarray:
    """[group, prompt + completion + 1] seeded ids, equal over the prompt."""
    config = json.loads((options.model / "config.json").read_text("utf-8"))
    generator = np.random.default_rng(7)
    prompt = generator.integers(0, config["vocab_size"], options.prompt)
    tails = generator.integers(
        0, config["vocab_size"], (options.group, options.completion + 1)
    )
    return np.concatenate([np.tile(prompt, (options.group, 1)), tails], axis=1)


def _report(
    options: argparse.Namespace, runs: dict[str, list[dict[str, Any]]]
) -> dict[str, Any]:
    report: dict[str, Any] = {"bench": "group_prompt"}
    for side, measured in runs.items():
        best = min(second for run in measured for second in run["seconds"])
        report[side] = {
            "seconds": best,
            "all_seconds": [second for run in measured for second in run["seconds"]],
            "peak_rss_bytes": max(run["peak_rss_bytes"] for run in measured),
            "loss": measured[0]["loss"],
            "grad_norm": measured[0]["grad_norm"],
        }
    report["ratio"] = report["peer"]["seconds"] / report["ours"]["seconds"]
    report["config"] = {
        "peer": "weftd --no-share-prompts",
        "model": options.model.name,
        "group": options.group,
        "prompt": options.prompt,
        "completion": options.completion,
        "rank": train_step.RANK,
        "dtype": "f32",
        "threads": options.threads,
        "rounds": options.rounds,
        "reps": options.reps,
    }
    report["machine"] = machine.describe()
    return report
