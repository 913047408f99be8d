"""Provides tokens of real English, so that numbers have realistic sizes. Random ids
would be noise that no model has seen, with gradients that are many times too large."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

SEED = 7


def config(model: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((model / "config.json").read_text("utf-8"))
    return values


def rows(model: Path, count: int, length: int) -> np.ndarray:
    """Returns [count, length] passages that do not overlap, chosen by the seed."""
    stream = _stream(model, count * length)
    passages = len(stream) // length
    if passages < count:
        raise SystemExit(
            f"{count} x {length} tokens > the {len(stream)} that there are"
        )
    chosen = np.random.default_rng(SEED).choice(passages, count, replace=False)
    return np.stack([stream[i * length : (i + 1) * length] for i in chosen])


def group(model: Path, count: int, prompt: int, completion: int) -> np.ndarray:
    """Returns [count, prompt + completion] passages that begin with the same `prompt`
    tokens."""
    passages = rows(model, count, prompt + completion)
    passages[:, :prompt] = passages[0, :prompt]
    return passages


def questions(model: Path, count: int) -> list[list[int]]:
    """Returns [count] prompts of a chat in the model's template. For a model
    without a tokenizer they are passages of 32 tokens."""
    if not (model / "tokenizer.json").exists():
        return [list(map(int, row)) for row in rows(model, count, 32)]
    from pydoc_data.topics import topics

    from weft import data

    encoder = data.Encoder(data.ModelTokenizer.from_folder(str(model)), eos=False)
    asked = [f"Explain {name} in Python." for name in sorted(topics)[:count]]
    if len(asked) < count:
        raise SystemExit(f"{count} questions > the {len(asked)} that there are")
    return [
        encoder.prompt({"messages": [{"role": "user", "content": question}]})
        for question in asked
    ]


def _stream(model: Path, wanted: int) -> np.ndarray:
    """Returns the tokens of the reference manual that comes with Python. For a
    model without a tokenizer, returns `wanted` random ids."""
    if not (model / "tokenizer.json").exists():
        vocab = config(model)["vocab_size"]
        return np.random.default_rng(SEED).integers(3, vocab, wanted)
    from pydoc_data.topics import topics

    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    text = "".join(topics[name] for name in sorted(topics))
    return np.asarray(tokenizer.encode(text).ids, dtype=np.int64)
