"""Four adapters at once: the server trains them in one batch.

A pirate, a haiku gardener, a ship's telegraph and a clerk who thinks in JSON answer
the same questions, so all that an adapter can learn is how its owner talks. The calls
of all adapters are in flight at the same time, and the server mixes them in its
batches. Then the base model and each adapter answer a question that was not in the
training data.

    python adapters.py --server 127.0.0.1:50051
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from common import Options, arguments

import weft

TEXTS = Path(__file__).parent / "data" / "voices.jsonl"
RANKS = {"pirate": 16, "gardener": 8, "ship-log": 4, "clerk": 2}
QUESTION = "Tell me about {topic}.\n"
BATCH = 4


def records(voice: str) -> list[weft.data.Record]:
    """Returns the questions with this voice's answers."""
    texts = [json.loads(line) for line in TEXTS.open(encoding="utf-8")]
    return [
        {"prompt": QUESTION.format_map(text), "completion": text[voice]}
        for text in texts
    ]


async def train(
    client: weft.AsyncClient,
    tokenizer: weft.data.ModelTokenizer,
    voice: str,
    options: Options,
) -> weft.AsyncAdapter:
    """Trains one adapter, and prints its loss per token."""
    encoder = weft.data.Encoder(tokenizer)
    examples = weft.data.Dataset(records(voice), encoder.example).load()
    rank = RANKS[voice]
    adapter = await client.get_or_create(f"example-{voice}", rank=rank, seed=rank)
    for step in range(options.steps):
        first = step * BATCH % len(examples)
        batch = examples[first : first + BATCH]
        weight = 1 / sum(example.num_learnt for example in batch)
        gradient = adapter.submit.forward_backward([e.datum(weight) for e in batch])
        await adapter.submit.optim_step(learning_rate=1e-3)
        loss = (await gradient).metrics["loss:sum"]
        print(f"{voice:<9} step {step + 1} loss {loss:.3f}", flush=True)
    return adapter


async def answer(
    source: weft.AsyncClient | weft.AsyncAdapter, prompt: list[int]
) -> str:
    result = await source.sample(prompt, max_tokens=48, temperature=0.5, seed=7)
    return result.samples[0].text.strip()


async def main() -> None:
    """Trains all adapters at once and prints their answers."""
    options = arguments(__doc__, steps=12)
    async with weft.AsyncClient(options.server) as client:
        tokenizer = await client.tokenizer()
        adapters = await asyncio.gather(
            *(train(client, tokenizer, voice, options) for voice in RANKS)
        )
        question = QUESTION.format(topic="the sea")
        prompt = tokenizer.encode(question)
        sources: list[weft.AsyncClient | weft.AsyncAdapter] = [client, *adapters]
        answers = await asyncio.gather(*(answer(s, prompt) for s in sources))
    print(f"\n{question}")
    for name, text in zip(("base model", *RANKS), answers, strict=True):
        print(f"[{name}]\n{text}\n")


if __name__ == "__main__":
    asyncio.run(main())
