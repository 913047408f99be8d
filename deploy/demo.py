#!/usr/bin/env python3
"""Four tenants train four adapters on one server at the same time.

A pirate, a haiku gardener, a ship's telegraph and a clerk who thinks in JSON
answer the same questions. Each tenant is a client process that trains its own
LoRA adapter over gRPC. The server batches the tenants' steps. The script prints
the losses during training. Then it asks the base model and each adapter a
question that was not in the training data, and prints the answers. It exits
with 1 if any loss fell by less than 30 %.

    deploy/demo.py --server 127.0.0.1:50051
"""

from __future__ import annotations

import argparse
import multiprocessing
import queue
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.queues import Queue
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

import weft

sys.path.insert(0, str(Path(__file__).resolve().parent))
import demo_texts

MODEL = Path(__file__).resolve().parent.parent / "models/smollm2-135m-instruct"
QUESTION = "the sea"  # Not among the training topics.
BATCH = 4
MIN_FALL = 0.30
TIMEOUT = 600.0  # Seconds that one call may take.


@dataclass(frozen=True)
class Tenant:
    """One adapter and what it learns."""

    name: str
    rank: int
    answers: Sequence[str]


TENANTS = (
    Tenant("pirate", 16, demo_texts.PIRATE),
    Tenant("gardener", 8, demo_texts.GARDENER),
    Tenant("ship-log", 4, demo_texts.SHIP_LOG),
    Tenant("clerk", 2, demo_texts.CLERK),
)


@dataclass(frozen=True)
class Step:
    """A report of a tenant's process about one step."""

    tenant: str
    number: int
    loss: float  # Loss per target token.
    num_tokens: int


@dataclass(frozen=True)
class Finished:
    """The last report of a tenant's process."""

    tenant: str
    before: float
    after: float


class Board:
    """A table of losses. A row is printed when its last cell is filled."""

    def __init__(self, columns: Sequence[str], every: int, last: int) -> None:
        self._columns = list(columns)
        self._every = every
        self._last = last
        self._rows: dict[int, dict[str, float]] = {}
        self._tokens = 0
        self._start = time.monotonic()
        print("  step" + "".join(f"{name:>12}" for name in columns) + "   tokens/s")

    def add(self, step: Step) -> None:
        """Records one step of one tenant."""
        self._tokens += step.num_tokens
        row = self._rows.setdefault(step.number, {})
        row[step.tenant] = step.loss
        shown = step.number % self._every == 0 or step.number in (1, self._last)
        if len(row) == len(self._columns) and shown:
            rate = self._tokens / (time.monotonic() - self._start)
            cells = "".join(f"{row[name]:12.3f}" for name in self._columns)
            print(f"{step.number:6d}{cells}{rate:11.0f}", flush=True)


def encode_prompt(tokenizer: Tokenizer, topic: str) -> list[int]:
    """Returns a question's tokens in the chat format, up to the answer."""
    text = f"<|im_start|>user\nTell me about {topic}.<|im_end|>\n"
    return list(tokenizer.encode(text + "<|im_start|>assistant\n").ids)


def make_data(tokenizer: Tokenizer, tenant: Tenant) -> list[weft.Datum]:
    """Returns one datum per answer. The loss covers the answer, not the
    question.
    """
    data = []
    for topic, answer in zip(demo_texts.TOPICS, tenant.answers, strict=True):
        prompt = encode_prompt(tokenizer, topic)
        tokens = prompt + tokenizer.encode(answer + "<|im_end|>").ids
        data.append(weft.Datum.next_token(tokens, prompt_length=len(prompt)))
    return data


def loss_per_token(result: weft.TrainResult, data: Sequence[weft.Datum]) -> float:
    """Returns the mean loss per target token. The service returns the sum."""
    weights = [datum.weights for datum in data if datum.weights is not None]
    return float(result.metrics["loss:sum"]) / float(np.concatenate(weights).sum())


def adapter_id(tenant: Tenant) -> str:
    return f"demo-{tenant.name}"


def new_adapter(client: weft.Client, tenant: Tenant) -> weft.Adapter:
    """Creates the adapter. First deletes the adapter of an earlier run, if any."""
    name = adapter_id(tenant)
    if name in {info.adapter_id for info in client.adapters()}:
        client.delete_adapter(name)
    return client.create_adapter(name, rank=tenant.rank, seed=tenant.rank)


def train(
    tenant: Tenant, options: argparse.Namespace, reports: Queue[Step | Finished]
) -> None:
    """Runs all steps of one tenant, in its own process."""
    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    data = make_data(tokenizer, tenant)
    with weft.Client(options.server, timeout=TIMEOUT) as client:
        adapter = new_adapter(client, tenant)
        losses = []
        for number in range(1, options.steps + 1):
            first = (number - 1) * BATCH % len(data)
            batch = data[first : first + BATCH]
            # Sends both requests before waiting for a reply, so that the server
            # is not idle between them.
            gradient = adapter.submit.forward_backward(batch)
            update = adapter.submit.optim_step(learning_rate=options.learning_rate)
            losses.append(loss_per_token(gradient.result(), batch))
            update.result()
            num_tokens = sum(len(datum.tokens) for datum in batch)
            reports.put(Step(tenant.name, number, losses[-1], num_tokens))
        # The first step's loss is that of the same data before any training.
        after = loss_per_token(adapter.forward(data[:BATCH]), data[:BATCH])
    reports.put(Finished(tenant.name, losses[0], after))


def train_all(options: argparse.Namespace) -> dict[str, tuple[float, float]]:
    """Trains all tenants at once, each in its own process."""
    context = multiprocessing.get_context("spawn")
    reports = context.Queue()
    processes = [
        context.Process(target=train, args=(tenant, options, reports), daemon=True)
        for tenant in TENANTS
    ]
    for process in processes:
        process.start()
    board = Board([t.name for t in TENANTS], options.every, options.steps)
    losses: dict[str, tuple[float, float]] = {}
    while len(losses) < len(TENANTS):
        try:
            report = reports.get(timeout=1.0)
        except queue.Empty:
            if any(process.exitcode not in (None, 0) for process in processes):
                sys.exit("A tenant's process failed; its error is above.")
            continue
        if isinstance(report, Step):
            board.add(report)
        else:
            losses[report.tenant] = (report.before, report.after)
    for process in processes:
        process.join()
    return {tenant.name: losses[tenant.name] for tenant in TENANTS}


def show_samples(client: weft.Client, tokenizer: Tokenizer) -> None:
    """Asks the base model and each adapter one unseen question."""
    prompt = encode_prompt(tokenizer, QUESTION)
    print(f'\nAsked "Tell me about {QUESTION}.", which none was trained on:')
    sources: dict[str, weft.Client | weft.Adapter] = {"base model": client}
    for tenant in TENANTS:
        sources[tenant.name] = client.adapter(adapter_id(tenant))
    # All are drawn at the same time.
    samples = {
        name: source.submit.sample(prompt, max_tokens=48, temperature=0.5, seed=7)
        for name, source in sources.items()
    }
    for name, sample in samples.items():
        # Leaves out special tokens.
        text = tokenizer.decode(sample.result().samples[0].tokens)
        print(f"\n[{name}]\n  " + text.strip().replace("\n", "\n  "))


def report(losses: dict[str, tuple[float, float]]) -> bool:
    """Prints the losses before and after training. Returns whether every loss fell
    far enough.
    """
    print("\nLoss per token over the first four answers:")
    good = True
    for name, (before, after) in losses.items():
        fall = 1.0 - after / before
        good &= fall >= MIN_FALL
        print(f"  {name:<10}{before:8.3f} -> {after:.3f}   ({fall:.0%} lower)")
    if not good:
        print(f"A loss fell by less than {MIN_FALL:.0%}.", file=sys.stderr)
    return good


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--server", default="127.0.0.1:50051")
    parser.add_argument("--model", type=Path, default=MODEL, help="for the tokenizer")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--every", type=int, default=1, help="steps per printed row")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    options = parser.parse_args()

    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    with weft.Client(options.server, timeout=TIMEOUT) as client:
        info = client.info()
        print(
            f"weftd {info.version} on {info.device}: {info.model.name}, "
            f"{info.model.num_parameters / 1e6:.0f} M frozen parameters\n"
            f"{len(TENANTS)} tenants train at once, ranks "
            f"{', '.join(str(tenant.rank) for tenant in TENANTS)}; loss per token:\n"
        )
        losses = train_all(options)
        show_samples(client, tokenizer)
    return 0 if report(losses) else 1


if __name__ == "__main__":
    sys.exit(main())
