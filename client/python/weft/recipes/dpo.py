"""DPO: an adapter learns which of two answers is preferred."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from weft import data
from weft.adapter import Adapter
from weft.client import Client
from weft.datum import Datum
from weft.recipes import adapters, loop, sft
from weft.recipes.batches import BatchOrder, requests
from weft.recipes.watch import Plot
from weft.types import FloatArray, OptimOptions, ServerInfo

SUMMARY = "Train an adapter to prefer one answer to another (DPO)."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `python -m weft dpo`."""
    adapters.add_arguments(parser)
    sft.add_data_arguments(parser)
    beta = "how much a gain of log-probability over the base model, or --init, counts"
    parser.add_argument("--beta", type=adapters.number(0), default=0.1, help=beta)


@dataclass(frozen=True)
class Scores:
    """How much more the adapter prefers the chosen answers than its reference does.

    margins: [pairs], beta times the difference of both log-ratios.
    """

    pairs: Sequence[data.Pair]
    margins: FloatArray

    def values(self, prefix: str = "") -> dict[str, float]:
        """Returns the mean loss, and how many pairs are in order."""
        return {
            f"{prefix}loss": float(np.mean(np.logaddexp(0.0, -self.margins))),
            f"{prefix}accuracy": float(np.mean(self.margins > 0)),
            f"{prefix}margin": float(np.mean(self.margins)),
        }

    def gradient(self, beta: float) -> list[Datum]:
        """Returns data whose cross-entropy has the gradient of the mean loss: chosen,
        rejected, chosen, rejected, ...

        The loss of a pair is -log sigmoid(margin), so its gradient by the
        log-probability of a token is -beta sigmoid(-margin) in the chosen answer, and
        the opposite in the rejected one. The weights of a cross-entropy are the
        negative gradient.
        """
        pull = beta / (1.0 + np.exp(self.margins)) / len(self.margins)
        return [
            example.datum(weight)
            for pair, one in zip(self.pairs, pull.tolist(), strict=True)
            for example, weight in ((pair.chosen, one), (pair.rejected, -one))
        ]


def score(
    client: Client,
    adapter: Adapter,
    pairs: Sequence[data.Pair],
    info: ServerInfo,
    beta: float,
) -> Scores:
    """Scores the pairs under the adapter and under its reference. Does not train."""
    batch = [one.datum() for pair in pairs for one in (pair.chosen, pair.rejected)]
    before = adapters.reference(client, adapter, batch, info)
    answers = [adapter.score(part) for part in requests(batch, info)]
    now = [result.logprobs for answer in answers for result in answer.results]
    # Tokens of the prompt have weight 0, and their log-probability is 0.
    gains = np.array([a.sum() - b.sum() for a, b in zip(now, before, strict=True)])
    margins = beta * (gains[0::2] - gains[1::2])
    return Scores(pairs, margins.astype(np.float32))


def run(options: argparse.Namespace) -> None:
    """Trains, evaluates and saves. Raises WeftError if a call fails. After an
    interrupt, saves the current step and raises KeyboardInterrupt."""
    if options.beta == 0:
        print("--beta 0: no pair teaches anything")
    with Client(options.server, timeout=options.timeout) as client:
        info = adapters.server_info(client)
        encode = sft.encoder(client, options, info)
        pairs = sft.load(options, encode.pair)
        adapter, done = adapters.open_adapter(client, options, info)
        per_step = options.batch * options.accumulate
        order = BatchOrder(len(pairs.train), per_step, options.seed)

        def make_step(step: int, optim: OptimOptions) -> loop.Step:
            chosen = [pairs.train[i] for i in order.indices(step)]
            scores = score(client, adapter, chosen, info, options.beta)
            # Two sequences belong to a pair.
            batch = scores.gradient(options.beta)
            batches = sft.batches(batch, 2 * options.batch)
            result = adapters.submit_update(
                adapter, batches, info, "cross_entropy", {}, optim
            ).result()
            values = {**scores.values(), "grad_norm": result.grad_norm}
            num_tokens = sum(len(datum.tokens) for datum in batch)
            return loop.Step(num_tokens, values)

        def evaluated(_: int) -> dict[str, float]:
            if not pairs.held_out:
                return {}
            scores = score(client, adapter, pairs.held_out, info, options.beta)
            return scores.values("eval_")

        total = sft.num_steps(options, len(pairs.train), per_step)
        names = ["loss", "eval_loss", "accuracy", "eval_accuracy"]
        title = f"{options.adapter}: preferences"
        plot = Plot(names, title, "DPO loss (nats), share in order")
        steps = range(done, total)
        loop.train(client, adapter, options, steps, make_step, evaluated, plot)
