"""Makes token sequences for the tests."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

PASSAGES = (
    "The lighthouse keeper climbed the stairs at dusk, wound the clockwork, and lit"
    " the lamp. Far out, a single ship turned towards the harbour, its sails grey in"
    " the failing light, and he wrote the hour into the book as he had for years.",
    "To sort a list, split it in two, sort each half the same way, and merge the two"
    " sorted halves by always taking the smaller of their first elements.",
    "Water boils at a lower temperature on a mountain because the air presses on it"
    " with less weight.",
    "In 1969 two people walked on the Moon while a third circled above them, alone,"
    " out of reach of every voice each time he passed behind it.",
    "The recipe asks for three eggs, a cup of flour, half a cup of sugar, a pinch of"
    " salt and as much patience as you can find in the kitchen on a Sunday.",
    "A good map leaves out almost everything. What remains is chosen by somebody who"
    " asked what the traveller would need to know and in which order.",
    "She asked the librarian for a book about rivers, and he brought her one about"
    " the sea, saying that all of them were in it.",
    "Prices rise when many people want the same thing and there is little of it; they"
    " fall when the shelves are full and nobody comes.",
)


@cache
def passages(folder: Path) -> list[list[int]]:
    """Returns the passages as tokens of the model in `folder`."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return [list(tokenizer.encode(text).ids) for text in PASSAGES]


def random_tokens(vocab: int, length: int, seed: int) -> list[int]:
    """Returns `length` ids in [3, vocab). All special tokens of a tiny model have
    smaller ids."""
    generator = np.random.default_rng(seed)
    return [int(token) for token in generator.integers(3, vocab, length)]


def sequences(kind: str, folder: Path, vocab: int) -> list[list[int]]:
    """Returns ragged sequences, the shortest of two tokens."""
    if kind.startswith("smollm2"):
        sizes = (33, 2, 17, 20, 2, 9)  # 33 tokens begin a third page.
        return [p[:n] for p, n in zip(passages(folder), sizes, strict=False)]
    lengths = (130, 2, 5, 64, 31, 2, 97)
    return [random_tokens(vocab, n, 100 + i) for i, n in enumerate(lengths)]


def next_token(tokens: list[int], **values: Any) -> Any:
    """Returns a weft.Datum that scores every next token."""
    import weft

    return weft.Datum(tokens[:-1], tokens[1:], **values)
