"""Shared by all benches: options, turns, checks, and the JSON line."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import machine
import models
import shapes
import tolerance
from peer_options import DTYPES

# One process of one side: its seconds, its memory, and results to check.
Run = dict[str, Any]
Runs = dict[str, list[Run]]
# The best run of each side, as reported.
Sides = Mapping[str, dict[str, Any]]

RANK = 16  # LoRA rank of adapters, on all linear layers.
# Names of a run's memory figures. The device's figures come last.
MEMORY = (
    *("peak_rss_bytes", "extra_rss_bytes"),
    *("extra_allocated_bytes", "extra_device_bytes"),
)
LOSS_TOLERANCE = 1e-5  # Relative. Both losses sum some thousand f32 terms.
NORM_TOLERANCE = 1e-4  # Relative. The oracle tests allow it for a tensor.


@dataclass(frozen=True)
class Work:
    """The work of one timed repetition of a side."""

    tokens: int
    flops: float


def parser(bench: str, description: str | None) -> argparse.ArgumentParser:
    """Returns a parser with the options that every bench has."""
    result = argparse.ArgumentParser(
        prog=f"run.py {bench}",
        description=description,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    result.add_argument("--threads", type=int, default=os.cpu_count())
    result.add_argument("--rounds", type=int, default=2, help="processes of each side")
    result.add_argument("--reps", type=int, default=2, help="timed steps per process")
    result.add_argument("--output", type=Path, help="also write the JSON line here")
    result.set_defaults(device="cpu", rank=RANK)
    return result


def add_device(options_parser: argparse.ArgumentParser) -> None:
    options_parser.add_argument(
        "--device", choices=DTYPES, help="of all sides: f32 on cpu, bf16 on cuda"
    )


def parse_with_model(
    options_parser: argparse.ArgumentParser, arguments: list[str]
) -> argparse.Namespace:
    options_parser.add_argument(
        "--model", type=Path, help="model folder; SmolLM2 by default"
    )
    options = options_parser.parse_args(arguments)
    options.model = options.model or models.demo_model()
    return options


def parse_with_device(
    options_parser: argparse.ArgumentParser, arguments: list[str]
) -> argparse.Namespace:
    """Like parse_with_model, for a bench that runs on any device, with adapters of any
    rank and with the models of shapes.py."""
    add_device(options_parser)
    options_parser.add_argument("--rank", type=int, help="of adapters")
    options_parser.add_argument(
        "--shape",
        choices=shapes.SHAPES,
        default=options_parser.get_default("shape"),
        help="instead of --model: a published model's sizes with random weights",
    )
    options_parser.add_argument("--model", type=Path, help="model folder")
    options = options_parser.parse_args(arguments)
    if options.model is not None and options.shape is not None:
        if options.shape != options_parser.get_default("shape"):
            options_parser.error("--shape and --model exclude each other")
    elif options.shape is not None:
        options.model = shapes.folder(options.shape, options.device)
    options.model = options.model or models.demo_model()
    return options


def take_turns(
    rounds: int,
    sides: Mapping[str, Callable[[], Run]],
    check: Callable[[Run, Run], None] | None = None,
) -> Runs:
    """Returns the runs of every side. Processes run one at a time, and the sides
    alternate.

    `check` raises if a run's results are not those of the first side's run in the
    same round.
    """
    runs: Runs = {side: [] for side in sides}
    for number in range(rounds):
        for side, measure in sides.items():
            runs[side].append(measure())
            seconds = "/".join(f"{second:.2f}" for second in runs[side][-1]["seconds"])
            print(
                f"round {number + 1}: {side} {seconds} s, {_mebibytes(runs[side][-1])}",
                file=sys.stderr,
                flush=True,
            )
            if check is not None:
                check(runs[side][-1], runs[next(iter(sides))][-1])
    return runs


def bounds(dtype: str) -> dict[str, float]:
    """Returns the largest permitted relative difference of loss and gradient norm
    between two sides, if one side computes in `dtype`."""
    if dtype == "f32":
        return {"loss": LOSS_TOLERANCE, "grad_norm": NORM_TOLERANCE}
    return dict.fromkeys(("loss", "grad_norm"), tolerance.summed(dtype, 1))


def equal_steps(options: argparse.Namespace) -> Callable[[Run, Run], None]:
    """Returns a check for take_turns. It ends the bench if loss or gradient norm differ
    between two runs. A run has a "dtype" if its dtype is not the device's usual one."""

    def check(run: Run, reference: Run) -> None:
        dtype = run.get("dtype", DTYPES[options.device])
        for name, bound in bounds(dtype).items():
            expect_close(name, run[name], reference[name], bound)

    return check


def expect_close(name: str, value: float, reference: float, bound: float) -> None:
    """Ends the bench if the relative difference is more than `bound`, because times
    of different work mean nothing."""
    if not abs(value - reference) <= bound * abs(reference):
        raise SystemExit(
            f"{name}: {value!r} is not {reference!r} to within {bound:.0e} of it;"
            " times mean nothing"
        )


def ratio(
    value: float, *, at_least: float | None = None, at_most: float | None = None
) -> dict[str, Any]:
    """Returns a figure of the report, with its target if it has one."""
    result: dict[str, Any] = {"value": value}
    if at_least is not None:
        result.update(target=f">= {at_least:g}", met=value >= at_least)
    if at_most is not None:
        result.update(target=f"<= {at_most:g}", met=value <= at_most)
    return result


def make(
    bench: str,
    options: argparse.Namespace,
    runs: Runs,
    *,
    peers: Collection[str],
    work: Mapping[str, Work],
    config: dict[str, Any],
    ratios: Callable[[Sides], dict[str, Any]],
) -> dict[str, Any]:
    """Returns the report. `peers` are the sides other than Weft's."""
    rate = gemm_rate(runs, peers)
    sides = {side: _summary(runs[side], work[side], rate) for side in runs}
    return {
        "bench": bench,
        "ours": {side: sides[side] for side in sides if side not in peers},
        "peer": {side: sides[side] for side in sides if side in peers},
        "ratio": ratios(sides),
        "config": {
            **config,
            "device": options.device,
            "dtype": DTYPES[options.device],
            "threads": options.threads,
            "rounds": options.rounds,
            "reps": options.reps,
            "peer_allocator": "tcmalloc" if machine.tcmalloc() else "glibc",
            "peer_versions": runs[next(iter(peers))][0]["versions"],
        },
        "gemm_gflops": rate / 1e9,
    }


def gemm_rate(runs: Runs, peers: Collection[str]) -> float:
    """Returns the best rate that torch reached, in floating-point operations per
    second."""
    rates = [run["gemm_flops_per_second"] for peer in peers for run in runs[peer]]
    return float(max(rates))


def emit(report: dict[str, Any], output: Path | None) -> None:
    """Prints a sentence to stderr, and the JSON line to stdout and, if wanted, to a
    file."""
    print(sentence(report), file=sys.stderr)
    _write(report, output)


def config(options: argparse.Namespace, *names: str, **more: object) -> dict[str, Any]:
    """Returns what a report says of its measurement: the model, the adapters' rank, the
    threads, the options with these names, and `more`."""
    return {
        "model": options.model.name,
        **{name: getattr(options, name) for name in names},
        "rank": options.rank,
        "threads": options.threads,
        **more,
    }


def emit_ratios(
    bench: str,
    options: argparse.Namespace,
    *,
    ours: dict[str, Any],
    ratio: dict[str, Any],
    config: dict[str, Any],
    peer: dict[str, Any] | None = None,
    **more: object,
) -> None:
    """Like emit, for a report whose sides have no common figures: prints a sentence
    for each ratio."""
    report: dict[str, Any] = {
        "bench": bench,
        "ours": ours,
        "peer": peer or {},
        "ratio": ratio,
        "config": config,
        **more,
    }
    for part in _ratio_parts(report):
        print(f"{bench}: {part}", file=sys.stderr)
    _write(report, options.output)


def _write(report: dict[str, Any], output: Path | None) -> None:
    """Prints the JSON line, with the command and the machine of the measurement."""
    device = report["config"].get("device", "cpu")
    described = {"command": sys.argv, "machine": machine.describe(device)}
    line = json.dumps({**report, **described})
    if output is not None:
        output.write_text(line + "\n", "utf-8")
    print(line)


def sentence(report: dict[str, Any]) -> str:
    parts = [
        f"{name} {side['tokens_per_second']:.0f} tok/s ({side['seconds']:.2f} s,"
        f" {side['fraction_of_gemm_rate']:.0%} of the GEMM rate,"
        f" {_mebibytes(side)})"
        for name, side in {**report["ours"], **report["peer"]}.items()
    ]
    return f"{report['bench']}: {'; '.join(parts + _ratio_parts(report))}"


def _mebibytes(side: Mapping[str, Any]) -> str:
    """Returns the memory used: the device's if there is a device."""
    used = next(side[name] for name in reversed(MEMORY) if name in side)
    return f"{used / 2**20:.0f} MiB"


def _ratio_parts(report: dict[str, Any]) -> list[str]:
    parts = []
    for name, entry in report["ratio"].items():
        target = f" (target {entry['target']})" if "target" in entry else ""
        parts.append(f"{name} {entry['value']:.3g}{target}")
    return parts


def _summary(runs: list[Run], work: Work, gemm_rate: float) -> dict[str, Any]:
    seconds = [second for run in runs for second in run["seconds"]]
    rate = work.flops / min(seconds)
    results = ("loss", "grad_norm", "logprobs_error", "dhidden_error")
    return {
        "seconds": min(seconds),
        "all_seconds": seconds,
        "tokens_per_second": work.tokens / min(seconds),
        "gflops": rate / 1e9,
        "fraction_of_gemm_rate": rate / gemm_rate,
        **{name: max(run[name] for run in runs) for name in MEMORY if name in runs[0]},
        **{name: runs[0][name] for name in results if name in runs[0]},
    }
