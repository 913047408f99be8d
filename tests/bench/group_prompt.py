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
import time
from pathlib import Path
from typing import Any

import numpy as np
import machine
import models
import train_step
from daemon import Daemon


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    tokens = _tokens(options)
    sides: dict[str, list[dict[str, Any]]] = {"ours": [], "peer": []}
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as scratch:
        for number in range(options.rounds):
            for side, flag in (("ours", "--share-prompts"), ("peer", "--no-share-prompts")):
                folder = Path(scratch, f"{side}-{number}")
                sides[side].append(_measure(options, tokens, Path(scratch), folder, flag))
            train_step.expect_equal(sides["ours"][-1], sides["peer"][-1])
            print(
                f"round {number + 1}: "
                + ", ".join(f"{s} {sides[s][-1]['seconds']}" for s in sides),
                file=sys.stderr,
            )
    report = _report(options, sides)
    line = json.dumps(report)
    if options.output is not None:
        options.output.write_text(line + "\n", "utf-8")
    print(line)
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


def _measure(
    options: argparse.Namespace,
    tokens: np.ndarray,
    work: Path,
    folder: Path,
    flag: str,
) -> dict[str, Any]:
    import weft

    data = [weft.Datum.next_token(row, prompt_length=options.prompt) for row in tokens]
    daemon = Daemon(options.model, folder, "--threads", str(options.threads), flag)
    daemon.start()
    try:
        with daemon.client(timeout=3600.0) as client:
            adapter = train_step.make_adapter(client, work / "adapter", tokens)
            loss = adapter.forward_backward(data).metrics["loss:sum"]
            norm = adapter.optim_step(learning_rate=0.0).grad_norm
            seconds = []
            for _ in range(options.reps):
                start = time.perf_counter()
                adapter.forward_backward(data)
                seconds.append(time.perf_counter() - start)
        peak = machine.peak_resident_bytes(daemon.pid)
        daemon.stop()
    finally:
        daemon.kill()
    return {
        "seconds": seconds,
        "loss": loss,
        "grad_norm": norm,
        "peak_rss_bytes": peak,
    }


def _report(
    options: argparse.Namespace, sides: dict[str, list[dict[str, Any]]]
) -> dict[str, Any]:
    report: dict[str, Any] = {"bench": "group_prompt"}
    for side, runs in sides.items():
        best = min(second for run in runs for second in run["seconds"])
        report[side] = {
            "seconds": best,
            "all_seconds": [second for run in runs for second in run["seconds"]],
            "peak_rss_bytes": max(run["peak_rss_bytes"] for run in runs),
            "loss": runs[0]["loss"],
            "grad_norm": runs[0]["grad_norm"],
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
