"""Distillation by soft targets: a student learns a teacher's likeliest tokens.

The teacher is an adapter that is trained first on the file's answers. It then answers
prompts and returns the probabilities of its likeliest tokens at each position. The
student is an adapter of a lower rank. It trains with cross-entropy, and all the
likeliest tokens of the teacher are its targets.

    python distill.py --server 127.0.0.1:50051
"""

from __future__ import annotations

from itertools import cycle, islice
from pathlib import Path

import numpy as np
from common import arguments

import weft

CHATS = Path(__file__).parent / "data" / "dictionary.jsonl"
TOP = 8  # Targets at each position.
BATCH = 4


def soft_datum(sample: weft.Sample, num_tokens: int) -> weft.Datum:
    """Returns the training data of a reply. The targets at each position are the
    teacher's likeliest tokens, weighted by their probabilities. Positions of the prompt
    have no targets. num_tokens: the number of reply tokens in the batch. The weights
    are divided by this number, so that the summed loss is a mean."""
    tokens = [*sample.prompt, *sample.tokens]
    unscored: list[list[int]] = [[] for _ in sample.prompt[1:]]
    targets = [[token for token, _ in top] for top in sample.top_logprobs]
    logprobs = [[logprob for _, logprob in top] for top in sample.top_logprobs]
    weights = [(np.exp(row) / num_tokens).tolist() for row in logprobs]
    return weft.Datum(tokens[:-1], unscored + targets, [*unscored, *weights])


def main() -> None:
    """Trains the teacher, then the student on the teacher's replies."""
    options = arguments(__doc__, steps=24)
    with weft.Client(options.server) as client:
        encoder = weft.data.Encoder(client.tokenizer())
        chats = cycle(weft.data.Dataset(CHATS, encoder.example).load())
        teacher = client.get_or_create("example-teacher", rank=16)
        for _ in range(options.steps):
            batch = list(islice(chats, BATCH))
            weight = 1 / sum(chat.num_learnt for chat in batch)
            teacher.forward_backward([chat.datum(weight) for chat in batch])
            teacher.optim_step(learning_rate=1e-3)
        student = client.get_or_create("example-student", rank=4)
        for step in range(options.steps):
            prompts = [
                chat.tokens[: chat.prompt_length] for chat in islice(chats, BATCH)
            ]
            replies = teacher.sample_many(
                prompts, max_tokens=24, top_logprobs=TOP, seed=step * BATCH
            )
            samples = [reply.samples[0] for reply in replies]
            num_tokens = sum(len(sample.tokens) for sample in samples)
            data = [soft_datum(sample, num_tokens) for sample in samples]
            loss = student.forward_backward(data).metrics["loss:sum"]
            student.optim_step(learning_rate=1e-3)
            print(f"step {step + 1} loss {loss:.3f}")


if __name__ == "__main__":
    main()
