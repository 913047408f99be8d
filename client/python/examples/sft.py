"""SFT in twenty lines: an adapter learns the answers of a chat file.

`python -m weft sft` is the same with schedules, evaluation, a log and a plot.

    python sft.py --server 127.0.0.1:50051
"""

from __future__ import annotations

from itertools import cycle, islice
from pathlib import Path

from common import arguments

import weft

CHATS = Path(__file__).parent / "data" / "dictionary.jsonl"


def main() -> None:
    """Trains, then asks for the meaning of a word that is not in the file."""
    options = arguments(__doc__, steps=20)
    with weft.Client(options.server) as client:
        tokenizer = client.tokenizer()
        chats = weft.data.Dataset(CHATS, weft.data.Encoder(tokenizer).example).load()
        adapter = client.get_or_create("example-sft", rank=16)
        stream = cycle(chats)
        for step in range(options.steps):
            batch = list(islice(stream, 8))
            num_learnt = sum(chat.num_learnt for chat in batch)
            # The loss is a sum. This weight makes it a mean over the learnt tokens.
            data = [chat.datum(1 / num_learnt) for chat in batch]
            gradient = adapter.submit.forward_backward(data)
            adapter.submit.optim_step(learning_rate=1e-3).result()
            print(f"step {step + 1} loss {gradient.result().metrics['loss:sum']:.3f}")
        adapter.save("last", overwrite=True)
        question = [{"role": "user", "content": 'What does "river" mean?'}]
        prompt = tokenizer.chat_prompt(question)
        sample = adapter.sample(prompt, max_tokens=32, temperature=0.0).samples[0]
        print(sample.text, f"({sample.finish_reason})")


if __name__ == "__main__":
    main()
