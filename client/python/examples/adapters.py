"""Several adapters at once: the server trains them in one batch.

Each adapter learns the same words in its own style. The calls of all adapters are
in flight at the same time, and the server mixes them in its batches. So two adapters
take less than twice the time of one.

    python adapters.py --server 127.0.0.1:50051
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from common import Options, arguments

import weft

CHATS = Path(__file__).parent / "data" / "dictionary.jsonl"
STYLES = {"plain": "{}", "loud": "{}!!!", "polite": "If you please: {}"}
BATCH = 4


def records(style: str) -> list[weft.data.Record]:
    """Returns the file's chats, with the answers in this style."""
    chats = [json.loads(line)["messages"] for line in CHATS.open(encoding="utf-8")]
    return [
        {
            "prompt": chat[:-1],
            "completion": [
                {"role": "assistant", "content": style.format(chat[-1]["content"])}
            ],
        }
        for chat in chats
    ]


async def train(
    client: weft.AsyncClient,
    tokenizer: weft.data.ModelTokenizer,
    name: str,
    options: Options,
) -> str:
    """Trains one adapter and returns its answer to a question."""
    encoder = weft.data.Encoder(tokenizer)
    examples = weft.data.Dataset(records(STYLES[name]), encoder.example).load()
    adapter = await client.get_or_create(f"example-{name}", rank=8)
    for step in range(options.steps):
        first = step * BATCH % len(examples)
        batch = examples[first : first + BATCH]
        weight = 1 / sum(example.num_learnt for example in batch)
        gradient = adapter.submit.forward_backward([e.datum(weight) for e in batch])
        await adapter.submit.optim_step(learning_rate=1e-3)
        loss = (await gradient).metrics["loss:sum"]
        print(f"{name} step {step + 1} loss {loss:.3f}")
    question = [{"role": "user", "content": 'What does "river" mean?'}]
    prompt = tokenizer.chat_prompt(question)
    result = await adapter.sample(prompt, max_tokens=32, temperature=0.0)
    return result.samples[0].text


async def main() -> None:
    """Trains all adapters at once and prints their answers."""
    options = arguments(__doc__, steps=24)
    async with weft.AsyncClient(options.server) as client:
        tokenizer = await client.tokenizer()
        answers = await asyncio.gather(
            *(train(client, tokenizer, name, options) for name in STYLES)
        )
    for name, answer in zip(STYLES, answers, strict=True):
        print(f"{name}: {answer}")


if __name__ == "__main__":
    asyncio.run(main())
