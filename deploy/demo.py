#!/usr/bin/env python3
"""Four tenants train four adapters on one server at the same time.

A pirate, a haiku gardener, a ship's telegraph and a clerk who thinks in JSON
answer the same questions (demo_texts.jsonl), so all that an adapter can learn is
how its tenant talks. The server batches the tenants' steps. The script prints
the losses during training. Then it asks the base model and each adapter a
question that was not in the training data, and prints the answers. It exits
with 1 if any loss fell by less than 30 %.

    deploy/demo.py --server 127.0.0.1:50051
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

import weft

FOLDER = Path(__file__).resolve().parent
MODEL = FOLDER.parent / "models/smollm2-135m-instruct"
RANKS = {"pirate": 16, "gardener": 8, "ship-log": 4, "clerk": 2}
QUESTION = "the sea"  # Not among the training topics.
BATCH = 4
MIN_FALL = 0.30
TIMEOUT = 600.0  # Seconds that one call may take.

Data = list[weft.Datum]


def encode_prompt(tokenizer: Tokenizer, topic: str) -> list[int]:
    """Returns a question's tokens in the chat format, up to the answer."""
    text = f"<|im_start|>user\nTell me about {topic}.<|im_end|>\n"
    return list(tokenizer.encode(text + "<|im_start|>assistant\n").ids)


def make_data(tokenizer: Tokenizer) -> dict[str, Data]:
    """Returns the data of each tenant, one datum per answer. The loss covers the
    answer, not the question."""
    data: dict[str, Data] = {tenant: [] for tenant in RANKS}
    for line in (FOLDER / "demo_texts.jsonl").read_text().splitlines():
        texts = json.loads(line)
        prompt = encode_prompt(tokenizer, texts["topic"])
        for tenant, own in data.items():
            tokens = prompt + tokenizer.encode(texts[tenant] + "<|im_end|>").ids
            own.append(weft.Datum.next_token(tokens, prompt_length=len(prompt)))
    return data


def loss_per_token(result: weft.TrainResult, data: Sequence[weft.Datum]) -> float:
    """Returns the mean loss per target token. The service returns the sum."""
    weights = [datum.weights for datum in data if datum.weights is not None]
    return float(result.metrics["loss:sum"]) / float(np.concatenate(weights).sum())


def new_adapter(client: weft.Client, tenant: str) -> weft.Adapter:
    """Creates the adapter. First deletes the adapter of an earlier run, if any."""
    name = f"demo-{tenant}"
    if name in {info.adapter_id for info in client.adapters()}:
        client.delete_adapter(name)
    return client.create_adapter(name, rank=RANKS[tenant], seed=RANKS[tenant])


def train_step(
    adapters: dict[str, weft.Adapter], batches: dict[str, Data], learning_rate: float
) -> dict[str, float]:
    """Trains all adapters at once: sends every request before it waits for a
    reply. Returns the losses."""
    steps = {
        tenant: (
            adapter.submit.forward_backward(batches[tenant]),
            adapter.submit.optim_step(learning_rate=learning_rate),
        )
        for tenant, adapter in adapters.items()
    }
    losses = {}
    for tenant, (gradient, update) in steps.items():
        losses[tenant] = loss_per_token(gradient.result(), batches[tenant])
        update.result()
    return losses


def train(
    adapters: dict[str, weft.Adapter],
    data: dict[str, Data],
    options: argparse.Namespace,
) -> dict[str, tuple[float, float]]:
    """Prints a row of losses per step. Returns each tenant's loss over its first
    answers, before and after."""
    print("  step" + "".join(f"{name:>12}" for name in adapters) + "   tokens/s")
    losses = []
    for number in range(options.steps):
        start = time.monotonic()
        first = number * BATCH % len(data["pirate"])
        batches = {name: own[first : first + BATCH] for name, own in data.items()}
        losses.append(train_step(adapters, batches, options.learning_rate))
        tokens = sum(len(datum.tokens) for own in batches.values() for datum in own)
        cells = "".join(f"{loss:12.3f}" for loss in losses[-1].values())
        rate = tokens / (time.monotonic() - start)
        print(f"{number + 1:6d}{cells}{rate:11.0f}", flush=True)
    return {
        name: (
            losses[0][name],
            loss_per_token(adapter.forward(data[name][:BATCH]), data[name][:BATCH]),
        )
        for name, adapter in adapters.items()
    }


def show_samples(
    client: weft.Client, adapters: dict[str, weft.Adapter], tokenizer: Tokenizer
) -> None:
    """Asks the base model and each adapter one unseen question."""
    prompt = encode_prompt(tokenizer, QUESTION)
    print(f'\nAsked "Tell me about {QUESTION}.", which none was trained on:')
    sources: dict[str, weft.Client | weft.Adapter] = {"base model": client, **adapters}
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
    far enough."""
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
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    options = parser.parse_args()

    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    with weft.Client(options.server, timeout=TIMEOUT) as client:
        info = client.info()
        print(
            f"weftd {info.version} on {info.device}: {info.model.name}, "
            f"{info.model.num_parameters / 1e6:.0f} M frozen parameters\n"
            f"{len(RANKS)} tenants train at once, ranks "
            f"{', '.join(map(str, RANKS.values()))}; loss per token:\n"
        )
        adapters = {tenant: new_adapter(client, tenant) for tenant in RANKS}
        losses = train(adapters, make_data(tokenizer), options)
        show_samples(client, adapters, tokenizer)
    return 0 if report(losses) else 1


if __name__ == "__main__":
    sys.exit(main())
