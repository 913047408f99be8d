"""Supervised fine-tuning: an adapter learns the answers in a file."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from weft import data
from weft.adapter import Adapter
from weft.client import Client
from weft.datum import Datum
from weft.recipes import adapters, loop
from weft.recipes.batches import BatchOrder, requests
from weft.recipes.schedule import warn_of_warmup
from weft.recipes.watch import Plot
from weft.types import OptimOptions, ServerInfo

T = TypeVar("T")
SUMMARY = "Train an adapter on chats, prompts with completions, or texts."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `python -m weft sft`."""
    adapters.add_arguments(parser)
    add_data_arguments(parser)
    add_turn_arguments(parser)


def add_data_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of a recipe that learns from a file of examples or pairs."""
    add = parser.add_argument
    add("--data", required=True, help=".jsonl, .parquet or hf:NAME[:SPLIT]")
    add("--eval-data", help="held out; default: a part of --data")
    add(
        "--eval-fraction",
        type=adapters.number(0, 1),
        default=0.1,
        help="of --data, held out",
    )
    add("--epochs", type=adapters.number(0.001), default=1.0)
    add(
        "--steps",
        type=adapters.at_least(1),
        help="optimizer steps; default: by --epochs",
    )
    add("--batch", type=adapters.at_least(1), default=8, help="records in a batch")
    add("--accumulate", type=adapters.at_least(1), default=1, help="batches in a step")
    limit = "of an example; default: the model's context"
    add("--max-tokens", type=adapters.at_least(1), help=limit)
    add("--truncate", choices=("end", "start", "never"), default="end")


def add_turn_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of a recipe that learns from chats."""
    parser.add_argument(
        "--loss-on", choices=("all", "last"), default="all", help="assistant turns"
    )


class Split(NamedTuple, Generic[T]):
    """What is learnt, and what only the evaluation uses."""

    train: list[T]
    held_out: list[T]


def load(options: argparse.Namespace, encode: Callable[[data.Record], T]) -> Split[T]:
    """Reads the files. Raises InvalidArgument if one has no usable record."""

    def read(source: str) -> list[T]:
        dataset = data.Dataset(source, encode)
        examples = dataset.load()
        print(f"{source}: {dataset.num_good} records, {dataset.num_bad} left out")
        return examples

    examples = read(options.data)
    if options.eval_data:
        return Split(examples, read(options.eval_data))
    order = np.random.default_rng(options.seed).permutation(len(examples))
    num_held_out = min(int(len(examples) * options.eval_fraction), len(examples) - 1)
    return Split(
        [examples[i] for i in sorted(order[num_held_out:])],
        [examples[i] for i in sorted(order[:num_held_out])],
    )


def encoder(
    client: Client,
    options: argparse.Namespace,
    info: ServerInfo,
    loss_on: data.LossOn = "all",
) -> data.Encoder:
    """Returns the encoder of the options."""
    context = info.model.context_length
    return data.Encoder(
        adapters.tokenizer(client, options),
        loss_on=loss_on,
        max_tokens=min(options.max_tokens or context, context),
        truncate=options.truncate,
    )


def evaluate(
    adapter: Adapter, examples: Sequence[data.Example], info: ServerInfo
) -> float:
    """Returns the mean loss per learnt token. The call does not train and takes no step
    number."""
    batch = [example.datum() for example in examples]
    sums = [adapter.score(r).metrics["loss:sum"] for r in requests(batch, info)]
    return sum(sums) / sum(example.num_learnt for example in examples)


def weighted(examples: Sequence[data.Example]) -> list[Datum]:
    """Returns training data whose summed loss is the mean over the learnt tokens."""
    weight = 1.0 / sum(example.num_learnt for example in examples)
    return [example.datum(weight) for example in examples]


def batches(batch: Sequence[Datum], size: int) -> list[Sequence[Datum]]:
    """Cuts the data of a step into batches of --batch."""
    return [batch[i : i + size] for i in range(0, len(batch), size)]


def num_steps(options: argparse.Namespace, num_examples: int, per_step: int) -> int:
    """Returns --steps, or the steps of --epochs. Warns of a --warmup beyond them."""
    by_epochs = max(round(options.epochs * num_examples / per_step), 1)
    total = int(options.steps or by_epochs)
    warn_of_warmup(options.warmup, total)
    return total


def run(options: argparse.Namespace) -> None:
    """Trains, evaluates and saves. Raises WeftError if a call fails. After an
    interrupt, saves the current step and raises KeyboardInterrupt."""
    with Client(options.server, timeout=options.timeout) as client:
        info = adapters.server_info(client)
        encode = encoder(client, options, info, options.loss_on)
        examples = load(options, encode.example)
        adapter, done = adapters.open_adapter(client, options, info)
        per_step = options.batch * options.accumulate
        order = BatchOrder(len(examples.train), per_step, options.seed)

        def make_step(step: int, optim: OptimOptions) -> loop.Step:
            batch = weighted([examples.train[i] for i in order.indices(step)])
            parts = batches(batch, options.batch)
            result = adapters.submit_update(
                adapter, parts, info, "cross_entropy", {}, optim
            ).result()
            values = {"loss": result.loss, "grad_norm": result.grad_norm}
            num_tokens = sum(len(datum.tokens) for datum in batch)
            return loop.Step(num_tokens, values)

        def evaluated(_: int) -> dict[str, float]:
            if not examples.held_out:
                return {}
            return {"eval_loss": evaluate(adapter, examples.held_out, info)}

        total = num_steps(options, len(examples.train), per_step)
        title = f"{options.adapter}: loss per learnt token"
        plot = Plot(["loss", "eval_loss"], title, "loss per token (nats)")
        steps = range(done, total)
        loop.train(client, adapter, options, steps, make_step, evaluated, plot)
