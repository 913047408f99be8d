"""Times samples of one sequence beside busy processes, and under quotas of processor
time, with the default number of threads and with each fixed number, in turns. The
default must come near the best fixed number, which nobody knows beforehand."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import daemon
import quota
import report
from processes import scratch

LEAST_BESIDE_NEIGHBOURS = 0.7
LEAST_UNDER_QUOTA = 0.9
PROMPT = list(range(100, 140))


@dataclass(frozen=True)
class Surroundings:
    name: str
    neighbours: int = 0
    quota: float | None = None  # In processors.

    @property
    def least(self) -> float:
        return LEAST_BESIDE_NEIGHBOURS if self.quota is None else LEAST_UNDER_QUOTA


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    cores = len(os.sched_getaffinity(0))
    fixed = sorted({1 << i for i in range(cores.bit_length())} | {cores})
    sides: dict[str, tuple[str, ...]] = {"default": ()}
    sides |= {f"{count} threads": ("--threads", str(count)) for count in fixed}
    rates: dict[str, dict[str, float]] = {}
    ratios = {}
    for case in _cases(options, cores):
        rates[case.name] = _measure(options, case, sides)
        best = max(rate for side, rate in rates[case.name].items() if side != "default")
        ratios[f"{case.name}: default/best fixed"] = report.ratio(
            rates[case.name]["default"] / best, at_least=case.least
        )
        print(f"busy: {case.name}: {rates[case.name]}", file=sys.stderr)
    report.emit_ratios(
        "busy",
        options,
        ours={name: rate["default"] for name, rate in rates.items()},
        peer={
            side: {name: rate[side] for name, rate in rates.items()}
            for side in sides
            if side != "default"
        },
        ratio=ratios,
        config=report.config(options, "tokens", "rounds", unit="tokens per second"),
    )
    return 0


def _cases(options: argparse.Namespace, cores: int) -> Iterator[Surroundings]:
    yield Surroundings("idle")
    for count in options.neighbours or sorted({1, 3 * cores}):
        yield Surroundings(f"{count} busy", neighbours=count)
    with quota.group() as group:
        if group is None:
            print("busy: no quotas: cannot make control groups", file=sys.stderr)
            return
    for processors in options.quotas:
        yield Surroundings(f"quota {processors:g}", quota=processors)


def _measure(
    options: argparse.Namespace, case: Surroundings, sides: dict[str, tuple[str, ...]]
) -> dict[str, float]:
    """Returns the best tokens per second of each side."""
    with ExitStack() as stack:
        work = stack.enter_context(scratch())
        draws: dict[str, Callable[[], Any]] = {}
        for side, flags in sides.items():
            process = daemon.Daemon(options.model, work / side, *flags)
            if case.quota is None:
                process.start()
            else:
                group = stack.enter_context(quota.group())
                assert group is not None
                group.limit(case.quota)
                process.start_with(*group.launcher)
            stack.callback(process.kill)
            client = stack.enter_context(process.client(timeout=3600.0))
            draws[side] = _draw(client, options.tokens)
        tokens = {side: draw() for side, draw in draws.items()}
        if any(drawn != tokens["default"] for drawn in tokens.values()):
            raise SystemExit("busy: the sides drew different tokens")
        rates = dict.fromkeys(sides, 0.0)
        for _ in range(options.rounds):
            for side, draw in draws.items():
                with _neighbours(case.neighbours):
                    start = time.monotonic()
                    draw()
                    seconds = time.monotonic() - start
                rates[side] = max(rates[side], options.tokens / seconds)
        return rates


def _draw(client: Any, count: int) -> Callable[[], Any]:
    def draw() -> Any:
        result = client.sample(
            PROMPT, max_tokens=count, ignore_eos=True, temperature=0.0
        )
        return list(result.samples[0].tokens)

    return draw


@contextmanager
def _neighbours(count: int) -> Iterator[None]:
    """Keeps `count` processes busy."""
    processes = [
        subprocess.Popen(["sh", "-c", "while :; do :; done"]) for _ in range(count)
    ]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = report.parser("busy", __doc__)
    parser.add_argument("--tokens", type=int, default=64, help="of a sample")
    parser.add_argument(
        "--neighbours",
        type=int,
        nargs="*",
        help="busy processes; by default 1, and 3 for each processor",
    )
    parser.add_argument("--quotas", type=float, nargs="*", default=[0.5, 1.0])
    return report.parse_with_model(parser, arguments)
