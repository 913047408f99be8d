"""Distillation: a student learns the distributions of a teacher.

The teacher is an adapter that is trained first on the file's answers. It then answers
prompts. The student is an adapter of a lower rank, which trains on these answers in one
of two forms:

    python distill.py --server 127.0.0.1:50051
    python distill.py --server 127.0.0.1:50051 --exact

Without --exact the teacher's likeliest tokens at each position are soft targets of
cross-entropy. With --exact the server compares the whole distributions of the two. At
the end both forms print the KL divergence from the teacher on answers to prompts that
the student has not seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path

import numpy as np
from common import parser

import weft

CHATS = Path(__file__).parent / "data" / "dictionary.jsonl"
TOP = 8  # Targets at each position.
BATCH = 4
HELD_OUT = 8  # Prompts at the file's end for the last line.


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


def replies(
    teacher: weft.Adapter, chats: Sequence[weft.data.Example], seed: int
) -> list[weft.Sample]:
    """Returns the teacher's answer to each prompt."""
    prompts = [chat.tokens[: chat.prompt_length] for chat in chats]
    results = teacher.sample_many(prompts, max_tokens=24, top_logprobs=TOP, seed=seed)
    return [result.samples[0] for result in results]


def main() -> None:
    """Trains the teacher, then the student on the teacher's replies."""
    parse = parser(__doc__, steps=24)
    parse.add_argument("--exact", action="store_true", help="whole distributions")
    options = parse.parse_args()
    with weft.Client(options.server) as client:
        encoder = weft.data.Encoder(client.tokenizer())
        every = weft.data.Dataset(CHATS, encoder.example).load()
        chats = cycle(every[:-HELD_OUT])
        teacher = client.get_or_create("example-teacher", rank=16)
        for _ in range(options.steps):
            batch = list(islice(chats, BATCH))
            weight = 1 / sum(chat.num_learnt for chat in batch)
            teacher.forward_backward([chat.datum(weight) for chat in batch])
            teacher.optim_step(learning_rate=1e-3)
        name = "example-student-exact" if options.exact else "example-student"
        student = client.get_or_create(name, rank=4)
        of_teacher = weft.Teacher(teacher.id)
        for step in range(options.steps):
            samples = replies(teacher, list(islice(chats, BATCH)), step * BATCH)
            num_tokens = sum(len(sample.tokens) for sample in samples)
            if options.exact:
                weight = 1 / num_tokens
                data = [weft.Datum.from_sample(one, weight=weight) for one in samples]
                result = student.forward_backward(
                    data, "forward_kl", teacher=of_teacher
                )
            else:
                data = [soft_datum(sample, num_tokens) for sample in samples]
                result = student.forward_backward(data)
            student.optim_step(learning_rate=1e-3)
            print(f"step {step + 1} loss {result.metrics['loss:sum']:.3f}")
        held_out = replies(teacher, every[-HELD_OUT:], seed=10**6)
        data = [weft.Datum.from_sample(sample) for sample in held_out]
        result = student.score(data, "forward_kl", teacher=of_teacher)
        print(f"held-out KL {result.metrics['kl:mean']:.4f}")


if __name__ == "__main__":
    main()
