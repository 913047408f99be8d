"""DPO by a custom loss: an adapter learns which of two answers is preferred.

The loss is torch code that runs in this process. The server computes the
log-probabilities and receives the gradients. The reference policy is the base model.

    python dpo.py --server 127.0.0.1:50051
"""

from __future__ import annotations

from itertools import cycle, islice
from pathlib import Path

import torch
from common import arguments

import weft

PAIRS = Path(__file__).parent / "data" / "preferences.jsonl"
BETA = 0.1
BATCH = 4


def dpo(references: list[float]) -> weft.LossFn:
    """Returns the loss of a batch that lists chosen, rejected, chosen, rejected, ...

    references: the reference policy's log-probability of each answer. Tokens of the
    prompt have weight 0. The server returns 0 as their log-probabilities, so they add
    nothing to the sums.
    """

    def loss(logprobs: list[torch.Tensor]) -> torch.Tensor:
        answers = torch.stack([one.sum() for one in logprobs])
        gains = answers - torch.tensor(references)
        margins = BETA * (gains[0::2] - gains[1::2])
        return -torch.nn.functional.logsigmoid(margins).mean()

    return weft.torch_loss(loss)


def main() -> None:
    """Trains. Prints the loss, which starts at log 2, and the number of pairs in which
    the chosen answer gained more log-probability than the rejected one."""
    options = arguments(__doc__, steps=12)
    with weft.Client(options.server) as client:
        encoder = weft.data.Encoder(client.tokenizer())
        pairs = weft.data.Dataset(PAIRS, encoder.pair).load()
        stream = cycle(pairs)
        adapter = client.get_or_create("example-dpo", rank=16)
        for step in range(options.steps):
            data = [
                example.datum()
                for pair in islice(stream, BATCH)
                for example in (pair.chosen, pair.rejected)
            ]
            scores = [float(r.logprobs.sum()) for r in client.forward(data).results]
            result = adapter.forward_backward_custom(data, dpo(scores))
            adapter.optim_step(learning_rate=2e-4)
            sums = [float(r.logprobs.sum()) for r in result.results]
            gains = [now - before for now, before in zip(sums, scores, strict=True)]
            right = sum(a > b for a, b in zip(gains[::2], gains[1::2], strict=True))
            loss = result.metrics["loss:sum"]
            print(f"step {step + 1} loss {loss:.3f} in order {right}/{BATCH}")


if __name__ == "__main__":
    main()
