"""Supervised fine-tuning: an adapter learns the answers in a file."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from weft import data
from weft.adapter import Adapter
from weft.client import Client
from weft.recipes import adapters
from weft.recipes.batches import BatchOrder, requests
from weft.recipes.interrupt import Interrupt
from weft.recipes.watch import Watch
from weft.types import ServerInfo

SUMMARY = "Train an adapter on chats, prompts with completions, or texts."


def fraction(text: str) -> float:
    """Parses an argument that is at least 0 and less than 1."""
    value = float(text)
    if not 0.0 <= value < 1.0:
        raise argparse.ArgumentTypeError(f"{value}: must be in [0, 1)")
    return value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `python -m weft sft`."""
    adapters.add_arguments(parser)
    add = parser.add_argument
    add("--data", required=True, help=".jsonl, .parquet or hf:NAME[:SPLIT]")
    add("--eval-data", help="held out; default: a part of --data")
    add("--eval-fraction", type=fraction, default=0.1, help="of --data, held out")
    add("--epochs", type=float, default=1.0)
    add("--steps", type=adapters.positive, help="optimizer steps; default: by --epochs")
    add("--batch", type=adapters.positive, default=8, help="examples in a batch")
    add("--accumulate", type=adapters.positive, default=1, help="batches in a step")
    add("--loss-on", choices=("all", "last"), default="all", help="assistant turns")
    limit = "of an example; default: the model's context"
    add("--max-tokens", type=adapters.positive, help=limit)
    add("--truncate", choices=("end", "start", "never"), default="end")


class Examples(NamedTuple):
    """The examples that are learnt, and those that only the evaluation uses."""

    train: list[data.Example]
    held_out: list[data.Example]


def load(client: Client, options: argparse.Namespace, context: int) -> Examples:
    """Reads the files. Raises InvalidArgument if one has no usable record."""
    encoder = data.Encoder(
        adapters.tokenizer(client, options),
        loss_on=options.loss_on,
        max_tokens=min(options.max_tokens or context, context),
        truncate=options.truncate,
    )

    def read(source: str) -> list[data.Example]:
        dataset = data.Dataset(source, encoder.example)
        examples = dataset.load()
        print(f"{source}: {dataset.num_good} records, {dataset.num_bad} left out")
        return examples

    examples = read(options.data)
    if options.eval_data:
        return Examples(examples, read(options.eval_data))
    order = np.random.default_rng(options.seed).permutation(len(examples))
    num_held_out = min(int(len(examples) * options.eval_fraction), len(examples) - 1)
    return Examples(
        [examples[i] for i in sorted(order[num_held_out:])],
        [examples[i] for i in sorted(order[:num_held_out])],
    )


def evaluate(
    adapter: Adapter, examples: Sequence[data.Example], info: ServerInfo
) -> float:
    """Returns the mean loss per learnt token. The call does not train and takes no step
    number."""
    batch = [example.datum() for example in examples]
    sums = [adapter.score(r).metrics["loss:sum"] for r in requests(batch, info)]
    return sum(sums) / sum(example.num_learnt for example in examples)


def run(options: argparse.Namespace) -> None:
    """Trains, evaluates and saves. Raises WeftError if a call fails. After an
    interrupt, saves the current step and raises KeyboardInterrupt."""
    with Client(options.server, timeout=options.timeout) as client:
        info = adapters.server_info(client)
        examples = load(client, options, info.model.context_length)
        adapter, done = adapters.open_adapter(client, options)
        per_step = options.batch * options.accumulate
        total = options.steps or max(
            round(options.epochs * len(examples.train) / per_step), 1
        )
        order = BatchOrder(len(examples.train), per_step, options.seed)
        if done and adapters.is_due(done, options.save_every, total):
            adapters.save_missing(client, adapter, done)
        watch = Watch(options.output, total, options.log_format, done=done)
        with watch, Interrupt() as interrupt:
            if examples.held_out and done == 0:
                watch.note(0, "eval_loss", evaluate(adapter, examples.held_out, info))
            for step in range(done, total):
                chosen = [examples.train[i] for i in order.indices(step)]
                # The server sums losses; this weight makes a mean over learnt tokens.
                weight = 1.0 / sum(example.num_learnt for example in chosen)
                batch = [example.datum(weight) for example in chosen]
                optim = adapters.optim_options(options, step, total)
                result = adapters.update(
                    adapter,
                    [
                        batch[i : i + options.batch]
                        for i in range(0, per_step, options.batch)
                    ],
                    info,
                    "cross_entropy",
                    {},
                    optim,
                )
                watch.step(
                    step + 1,
                    sum(len(datum.tokens) for datum in batch),
                    {
                        "loss": result.loss,
                        "grad_norm": result.grad_norm,
                        "lr": optim["learning_rate"],
                    },
                    number=result.number,
                )
                if examples.held_out and adapters.is_due(
                    step + 1, options.eval_every, total
                ):
                    loss = evaluate(adapter, examples.held_out, info)
                    watch.note(step + 1, "eval_loss", loss)
                due = adapters.is_due(step + 1, options.save_every, total)
                if due or interrupt.asked:
                    adapters.save(adapter, step + 1)
                if interrupt.asked:
                    raise KeyboardInterrupt
            watch.plot(["loss", "eval_loss"], f"{options.adapter}: loss per token")
        if options.export:
            adapter.export(options.export)
