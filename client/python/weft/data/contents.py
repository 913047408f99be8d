"""Keeps what somebody writes in a chat from becoming control tokens.

While the chat template runs, a character of private use stands for each text of a
special token in the messages. So such a text is told from those of the template, and is
spelled out in ordinary tokens.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Value = TypeVar("Value")

_FIRST_MARK = 0xF0000


@dataclass(frozen=True)
class Tokens:
    """The tokens of a text. offsets: the characters [begin, end) of each, of a marked
    text those before the marks were replaced."""

    ids: list[int]
    offsets: list[tuple[int, int]]

    def char_to_token(self, char: int) -> int | None:
        """Returns the first token of a character; None if it has none."""
        at = bisect_left(self.offsets, char + 1, key=lambda offset: offset[1])
        found = at < len(self.ids) and self.offsets[at][0] <= char
        return at if found else None


class Contents:
    """Marks the special tokens' texts in messages, and encodes the rendered chat."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        added = tokenizer.get_added_tokens_decoder().values()
        texts = sorted((t.content for t in added if t.special), key=len, reverse=True)
        self._marks = {text: chr(_FIRST_MARK + i) for i, text in enumerate(texts)}
        self._texts = {mark: text for text, mark in self._marks.items()}
        self._special = re.compile("|".join(map(re.escape, texts)) or r"(?!)")
        self._any_mark = re.compile(f"[{''.join(self._texts)}]" if texts else r"(?!)")
        self._tokenizer = tokenizer
        self._speller: Tokenizer | None = None

    def mark(self, value: Value) -> Value:
        """Returns a message, or what messages consist of, with marked texts."""
        marked: object = value
        if isinstance(value, str):
            marked = self._special.sub(lambda found: self._marks[found[0]], value)
        elif isinstance(value, Mapping):
            marked = {self.mark(key): self.mark(each) for key, each in value.items()}
        elif isinstance(value, list | tuple):
            marked = [self.mark(each) for each in value]
        return marked  # type: ignore[return-value]

    def encode(self, text: str) -> Tokens | None:
        """Returns the tokens of a rendered chat; None if it has no mark."""
        if not self._any_mark.search(text):
            return None
        tokens, begin = Tokens([], []), 0
        for part in self._parts(text):
            # Of each character that is encoded, its place in the marked text.
            places = [
                begin + place
                for place, char in enumerate(part)
                for _ in self._texts.get(char, char)
            ]
            plain = self._any_mark.sub(lambda found: self._texts[found[0]], part)
            tokenizer = self._tokenizer if plain == part else self._spelling()
            encoding = tokenizer.encode(plain, add_special_tokens=False)
            tokens.ids.extend(encoding.ids)
            tokens.offsets.extend(
                (places[a], places[b - 1] + 1) if a < b else (begin, begin)
                for a, b in encoding.offsets
            )
            begin += len(part)
        return tokens

    def _parts(self, text: str) -> Iterator[str]:
        """Yields stretches with marks between two special tokens, and all others."""
        begin = 0
        for first, last in _gaps(self._special.finditer(text), len(text)):
            if self._any_mark.search(text, first, last):
                yield from filter(None, (text[begin:first], text[first:last]))
                begin = last
        yield text[begin:]

    def _spelling(self) -> Tokenizer:
        if self._speller is None:
            self._speller = type(self._tokenizer).from_str(self._tokenizer.to_str())
            self._speller.encode_special_tokens = True
        return self._speller


def _gaps(found: Iterable[re.Match[str]], end: int) -> Iterator[tuple[int, int]]:
    begin = 0
    for match in found:
        yield begin, match.start()
        begin = match.end()
    yield begin, end
