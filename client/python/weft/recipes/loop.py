"""The loop of every recipe: steps, evaluations, checkpoints and the log."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from weft.adapter import Adapter
from weft.client import Client
from weft.recipes import adapters, runs
from weft.recipes.interrupt import Interrupt
from weft.recipes.watch import Plot, Watch
from weft.types import OptimOptions


@dataclass(frozen=True)
class Step:
    """What a recipe did for one step of the run."""

    num_tokens: int
    values: Mapping[str, float]  # For the log.
    lines: Sequence[str] = ()  # Printed below the values.


# Makes step n, counted from 0, with these settings of AdamW.
MakeStep = Callable[[int, OptimOptions], Step]
# Returns values for the log behind step n. It does not train.
Evaluate = Callable[[int], Mapping[str, float]]


def train(
    client: Client,
    adapter: Adapter,
    options: argparse.Namespace,
    steps: range,
    make_step: MakeStep,
    evaluate: Evaluate,
    plot: Plot,
    *,
    within_step: bool = False,
) -> None:
    """Makes the steps, evaluates, saves, logs and exports.

    steps: from the number of steps that are done to the number of all steps.
    within_step: the adapter has a part of the step behind those. Raises WeftError if a
    call fails. After an interrupt, saves the current step and raises KeyboardInterrupt.
    """
    done, total = steps.start, steps.stop
    is_due = adapters.is_due(done, options.save_every, total)
    if done and is_due and not within_step:
        adapters.save_missing(client, adapter, done)
    if not steps:
        print(f"nothing left to do: {adapter.id} is behind step {done} of {total}")
    watch = Watch(
        options.output,
        total,
        options.log_format,
        done=done,
        plot=plot,
        settings=runs.settings(options),
        adapters=[adapter],
    )
    with watch, Interrupt() as interrupt:

        def note(step: int) -> None:
            for name, value in evaluate(step).items():
                watch.note(step, name, value)

        if done == 0:
            note(0)
        for step in steps:
            optim = adapters.optim_options(options, step, total)
            made = make_step(step, optim)
            values = {**made.values, "lr": optim["learning_rate"]}
            watch.step(step + 1, made.num_tokens, values)
            for line in made.lines:
                print(line, flush=True)
            if adapters.is_due(step + 1, options.eval_every, total):
                note(step + 1)
            due = adapters.is_due(step + 1, options.save_every, total)
            if due or interrupt.asked:
                adapters.save(adapter, step + 1)
            if interrupt.asked:
                raise KeyboardInterrupt
    if options.export:
        adapters.export(client, adapter, options.export, options)
