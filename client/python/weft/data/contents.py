"""Keeps what somebody writes in a chat from becoming control tokens.

While the chat template runs, two characters stand for each text of a special token in
the messages: a mark. So such a text is told from those of the template, and is spelled
out in ordinary tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from weft.errors import InvalidArgument

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

Value = TypeVar("Value")

_LONG_TEXT = 1 << 14  # Characters.
_ESCAPE = "\ufdd0"  # Never a character, says Unicode.
_FIRST = 0xF0000


def encode_text(tokenizer: Tokenizer, text: str, special: bool = False) -> Encoding:
    """Returns the encoding of a text. Raises InvalidArgument for a string that is no
    valid text."""
    try:
        if len(text) > _LONG_TEXT:
            # Other threads run meanwhile. `encode` would stop them for seconds.
            batch = tokenizer.encode_batch([text], add_special_tokens=special)
            return batch[0]
        return tokenizer.encode(text, add_special_tokens=special)
    except (TypeError, UnicodeEncodeError) as error:
        raise InvalidArgument(f"not a text: {error}") from None


@dataclass(frozen=True)
class Tokens:
    """The tokens of a marked text. offsets: the characters [begin, end) of each."""

    ids: list[int] = field(default_factory=list)
    offsets: list[tuple[int, int]] = field(default_factory=list)
    _first: dict[int, int] = field(default_factory=dict)

    def add(self, token: int, begin: int, end: int) -> None:
        for char in range(begin, end):
            self._first.setdefault(char, len(self.ids))
        self.ids.append(token)
        self.offsets.append((begin, end))

    def char_to_token(self, char: int) -> int | None:
        """Returns the first token of a character; None if it has none."""
        return self._first.get(char)


class Contents:
    """Marks the special tokens' texts in messages, and encodes the rendered chat."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        added = tokenizer.get_added_tokens_decoder().values()
        texts = [token.content for token in added if token.special]
        # A text may also be cut into parts of a message, which the template joins: the
        # first character of a part's end that begins a special token is marked, too.
        starts = {text[0] for text in texts}
        self._ends = {text[:end] for text in texts for end in range(1, len(text))}
        self._longest_end = max(map(len, self._ends), default=0)
        self._texts = dict(enumerate([*texts, *sorted(starts - {*texts}), _ESCAPE]))
        self._marks = {
            text: f"{_ESCAPE}{chr(_FIRST + number)}"
            for number, text in self._texts.items()
        }
        self._special = _any_of(texts)
        self._written = _any_of([*texts, _ESCAPE])
        last = chr(_FIRST + len(self._texts) - 1)
        self._mark = re.compile(f"{_ESCAPE}[{chr(_FIRST)}-{last}]")
        self._tokenizer = tokenizer
        self._speller: Tokenizer | None = None

    def mark(self, value: Value) -> Value:
        """Returns a message, or what messages consist of, with marked texts."""
        marked: object = value
        if isinstance(value, str):
            text = self._written.sub(lambda found: self._marks[found[0]], value)
            marked = self._with_marked_end(text)
        elif isinstance(value, Mapping):
            marked = {self.mark(key): self.mark(each) for key, each in value.items()}
        elif isinstance(value, list | tuple):
            marked = [self.mark(each) for each in value]
        return marked  # type: ignore[return-value]

    def encode(self, text: str) -> Tokens | None:
        """Returns the tokens of a rendered chat; None if it has no mark."""
        if not self._mark.search(text):
            return None
        tokens, begin = Tokens(), 0
        for part in self._parts(text):
            plain, places = self._unmarked(part, begin)
            tokenizer = self._tokenizer if plain == part else self._spelling()
            encoding = encode_text(tokenizer, plain)
            for token, (a, b) in zip(encoding.ids, encoding.offsets, strict=True):
                # Some tokens have no character, such as blanks that were trimmed.
                end = places[b - 1][1] if a < b else places[a][0]
                tokens.add(token, places[a][0], end)
            begin += len(part)
        return tokens

    def _with_marked_end(self, text: str) -> str:
        for begin in range(max(0, len(text) - self._longest_end), len(text)):
            if text[begin:] in self._ends:
                return text[:begin] + self._marks[text[begin]] + text[begin + 1 :]
        return text

    def _unmarked(self, part: str, begin: int) -> tuple[str, list[tuple[int, int]]]:
        """Returns the text that somebody wrote, and for each of its characters, and its
        end, the characters [begin, end) of the marked text."""
        pieces: list[str] = []
        places: list[tuple[int, int]] = []
        at = 0
        for piece in self._mark.split(part):
            places += [(begin + i, begin + i + 1) for i in range(at, at + len(piece))]
            at += len(piece)
            pieces.append(piece)
            if at < len(part):
                text = self._texts[ord(part[at + 1]) - _FIRST]
                places += [(begin + at, begin + at + 2)] * len(text)
                pieces.append(text)
                at += 2
        return "".join(pieces), [*places, (begin + at, begin + at)]

    def _parts(self, text: str) -> Iterator[str]:
        """Yields stretches with marks between two special tokens, and all others."""
        begin = 0
        for first, last in _gaps(self._special.finditer(text), len(text)):
            if self._mark.search(text, first, last):
                yield from filter(None, (text[begin:first], text[first:last]))
                begin = last
        yield text[begin:]

    def _spelling(self) -> Tokenizer:
        if self._speller is None:
            speller = type(self._tokenizer).from_str(self._tokenizer.to_str())
            speller.encode_special_tokens = True
            self._speller = speller
        return self._speller


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _gaps(found: Iterable[re.Match[str]], end: int) -> Iterator[tuple[int, int]]:
    begin = 0
    for match in found:
        yield begin, match.start()
        begin = match.end()
    yield begin, end
