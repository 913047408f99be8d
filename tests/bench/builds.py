"""Makes the same calls to several builds of weftd, in turns. The calls show what a
change did to the speed of a training step, of many adapters, of sampling, and of
the smallest calls.

The daemons of all builds stay up and take turns, one call at a time. So other load on
the machine affects all builds. Losses must be equal up to rounding, and tokens equal.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import daemon
import inputs
import machine
import models
import numpy as np
import report
import timing
import torch
from processes import RANK, scratch

import weft

# Number of small calls that are timed together. A single one takes about a millisecond.
SMALL_CALLS = 50
Result = float | list[list[int]]
Call = Callable[[], Result]
Runs = dict[str, list[dict[str, float]]]


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    # Waiting threads must sleep, because another daemon needs the core.
    os.environ["OMP_WAIT_POLICY"] = "passive"
    with scratch() as work, contextlib.ExitStack() as stack:
        sides = {
            str(build): stack.enter_context(_side(options, work / str(i), build))
            for i, build in enumerate(options.build)
        }
        runs = measure(sides, options.rounds)
    before, *others = runs
    report.emit_ratios(
        "builds",
        options,
        ours={side: _best(runs[side]) for side in others},
        peer={before: _best(runs[before])},
        ratio={
            f"speed {side}/{before}, {name}": report.ratio(value)
            for side in others
            for name, value in _ratios(runs[before], runs[side]).items()
        },
        config=report.config(options, "batch", "length", "tokens", "rounds"),
    )
    return 0


def measure(sides: dict[str, Calls], rounds: int) -> Runs:
    """Returns the seconds and processor seconds of each call of each side, by
    round."""
    runs: Runs = {side: [] for side in sides}
    names = list(next(iter(sides.values())).calls)
    for number in range(rounds + 1):
        for name in names:
            wanted: Result | None = None
            for side, calls in sides.items():
                figures, result = calls.run(name)
                wanted = result if wanted is None else wanted
                _expect_same(f"{name} of {side}", result, wanted)
                if number == 0:  # The first round warms up and does not count.
                    continue
                if len(runs[side]) < number:
                    runs[side].append({})
                runs[side][-1].update(figures)
                print(f"round {number}: {side} {figures}", file=sys.stderr, flush=True)
    return runs


class Calls:
    """The timed calls of one build, by name. Calls whose name starts with `small` use a
    tiny model, so that only the cost of a call counts. The others use options.model."""

    def __init__(
        self,
        options: argparse.Namespace,
        large: tuple[int, weft.Client],
        tiny: tuple[int, weft.Client],
    ):
        self._options = options
        self._pids = {True: tiny[0], False: large[0]}
        self._client = large[1]
        self._tokens = inputs.rows(options.model, options.batch, options.length + 1)
        self._adapters = [
            large[1].create_adapter(f"a{i}", rank=RANK, seed=i)
            for i in range(options.adapters)
        ]
        self._small = tiny[1].create_adapter("small", rank=8, seed=1)
        row = inputs.rows(models.tiny_model("llama-tied"), 1, 17)[0]
        self._datum = weft.Datum.next_token(row)
        self._unweighted = weft.Datum(row[:-1], row[1:])
        self._custom = weft.trace_loss(_surrogate)
        self._pool = ThreadPoolExecutor(max(options.adapters, options.batch))
        self.calls: dict[str, Call] = {
            "train step": self._train,
            "custom loss": self._train_custom,
            "many adapters": self._train_many,
            "sample 1": partial(self._sample, 1),
            f"sample {options.batch}": partial(self._sample, options.batch),
            "small forward_backward": self._small_gradient,
            "small forward_backward and optim_step": self._small_step,
            "small custom loss": self._small_custom,
            "small sample": self._small_sample,
        }

    def run(self, name: str) -> tuple[dict[str, float], Result]:
        """Makes one call. Returns its seconds, the daemon's processor seconds, and
        its result."""
        results: list[Result] = []
        pid = self._pids[name.startswith("small")]
        before = machine.cpu_seconds(pid)
        seconds = timing.once(lambda: results.append(self.calls[name]()))
        spent = machine.cpu_seconds(pid) - before
        return {name: seconds, f"{name}, processor": spent}, results[0]

    def _train(self) -> Result:
        return self._loss(self._adapters[0], self._tokens)

    def _train_custom(self) -> Result:
        data = [weft.Datum(row[:-1], row[1:]) for row in self._tokens]
        return self._custom_loss(self._adapters[0], data)

    def _custom_loss(self, adapter: weft.Adapter, data: list[weft.Datum]) -> float:
        result = adapter.forward_backward(data, "custom", custom_loss=self._custom)
        adapter.optim_step(learning_rate=0.0)
        return float(result.metrics["loss:sum"])

    def _train_many(self) -> Result:
        share = np.array_split(self._tokens, len(self._adapters))
        return float(sum(self._pool.map(self._loss, self._adapters, share)))

    @staticmethod
    def _loss(adapter: weft.Adapter, rows: np.ndarray) -> float:
        """Returns the summed loss. Then clears the gradient by a step with learning
        rate 0, which changes no weights."""
        data = [weft.Datum.next_token(row) for row in rows]
        loss = float(adapter.forward_backward(data).metrics["loss:sum"])
        adapter.optim_step(learning_rate=0.0)
        return loss

    def _sample(self, count: int) -> Result:
        def draw(row: np.ndarray) -> list[int]:
            result = self._client.sample(
                row[:64], max_tokens=self._options.tokens, temperature=0.0
            )
            return [int(token) for token in result.samples[0].tokens]

        return list(self._pool.map(draw, self._tokens[:count]))

    def _small_gradient(self) -> Result:
        for _ in range(SMALL_CALLS):
            result = self._small.forward_backward([self._datum])
        return float(result.metrics["loss:sum"])

    def _small_step(self) -> Result:
        for _ in range(SMALL_CALLS):
            self._small.forward_backward([self._datum])
            self._small.optim_step(learning_rate=0.0)
        return 0.0

    def _small_custom(self) -> Result:
        for _ in range(SMALL_CALLS):
            loss = self._custom_loss(self._small, [self._unweighted])
        return loss

    def _small_sample(self) -> Result:
        for _ in range(SMALL_CALLS):
            self._small.sample([1, 2, 3], max_tokens=1, temperature=0.0)
        return 0.0


def _surrogate(logprobs: Any) -> tuple[Any, dict[str, Any]]:
    """A clipped ratio of probabilities, as PPO has it."""
    ratio = (logprobs - logprobs.detach()).exp()
    loss = -torch.minimum(ratio, ratio.clamp(0.8, 1.2))
    return loss.sum(), {"custom/ratio:mean": ratio.mean()}


@contextlib.contextmanager
def _side(options: argparse.Namespace, work: Path, build: Path) -> Iterator[Calls]:
    program = build / "server" / "weftd"
    flags = ("--threads", str(options.threads))
    with contextlib.ExitStack() as stack:
        started = []
        for model in (options.model, models.tiny_model("llama-tied")):
            process = daemon.Daemon(model, work / model.name, *flags, program=program)
            process.start()
            stack.callback(process.stop)
            client = stack.enter_context(process.client(timeout=3600.0))
            started.append((process.pid, client))
        yield Calls(options, *started)


def _best(runs: list[dict[str, float]]) -> dict[str, float]:
    return {name: min(run[name] for run in runs) for name in runs[0]}


def _ratios(
    before: list[dict[str, float]], after: list[dict[str, float]]
) -> dict[str, float]:
    """Returns the speedup of each call: its seconds in `before` divided by its seconds
    in `after`, as the median over the rounds."""
    return {
        name: statistics.median(
            one[name] / other[name] for one, other in zip(before, after, strict=True)
        )
        for name in before[0]
    }


def _expect_same(name: str, result: Result, wanted: Result) -> None:
    if isinstance(result, float) and isinstance(wanted, float):
        report.expect_close(name, result, wanted, report.LOSS_TOLERANCE)
    elif result != wanted:
        raise SystemExit(f"{name}: other tokens were drawn; times mean nothing")


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = report.parser("builds", __doc__)
    parser.add_argument(
        "build",
        type=Path,
        nargs="+",
        help="build folders, the one to compare with first",
    )
    parser.add_argument("--batch", type=int, default=8, help="sequences")
    parser.add_argument("--length", type=int, default=512, help="tokens of each")
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64, help="that are drawn")
    return report.parse_with_model(parser, arguments)
