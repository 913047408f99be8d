"""Turns drawn tokens into the text of an answer, piece by piece.

Whole and streamed answers use the same steps, so their texts are equal.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.data import ModelTokenizer
from weft.data.tokenizer import HALF

# In a text, a character ends at the end of at least one of so many tokens. To wait for
# more would take quadratic time.
_MOST_UNDECIDED = 16


class Decoder:
    """Decodes tokens one by one. A character waits until all its bytes are there."""

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        # The text of the tokens before `_shown` has been returned. Tokens from
        # `_begin` on are decoded together with the next ones, because some tokenizers
        # drop the space before a text's first word.
        self._begin = 0
        self._shown = 0

    def add(self, token: int) -> str:
        """Adds a token and returns the text that the token completes."""
        self._tokens.append(token)
        return self._next(whole=False)

    def finish(self) -> str:
        """Returns the remaining text, even if its last character is incomplete."""
        return self._next(whole=True)

    def _next(self, whole: bool) -> str:
        end = len(self._tokens)
        decided = whole or end - self._shown >= _MOST_UNDECIDED
        before = self._tokenizer.decode(self._tokens[self._begin : self._shown])
        now = self._tokenizer.decode(self._tokens[self._begin :])
        if now.endswith(HALF) and not whole:
            if not decided:
                return ""
            end -= 3  # These may still become a character, which has four bytes.
            now = self._tokenizer.decode(self._tokens[self._begin : end])
        if len(now) <= len(before):
            if decided:
                del self._tokens[self._shown : end]
            return ""
        self._begin, self._shown = self._shown, end
        return now[len(before) :]


class StopCutter:
    """Cuts a text before the first stop text. Holds back text that may be the beginning
    of a stop text."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.stopped = False  # A stop text was found, so the text has ended.

    def add(self, text: str, may_stop: bool = True) -> str:
        """Adds text and returns the text that cannot belong to a stop text. may_stop:
        a stop text that ends in the added text counts."""
        if self.stopped:
            return ""
        old = len(self._held)
        self._held += text
        places = [
            at
            for stop in self._stops
            if (at := self._held.find(stop, max(0, old - len(stop) + 1))) >= 0
        ]
        if places and may_stop:
            self.stopped = True
            return self._held[: min(places)]
        keep = max((self._begun(stop) for stop in self._stops), default=0)
        certain = len(self._held) - keep
        done, self._held = self._held[:certain], self._held[certain:]
        return done

    def finish(self) -> str:
        """Returns the text that was held back, unless a stop text was found."""
        done, self._held = ("" if self.stopped else self._held), ""
        return done

    def _begun(self, stop: str) -> int:
        """Returns how many of the last held characters may begin this stop text."""
        most = min(len(stop) - 1, len(self._held))
        return next((n for n in range(most, 0, -1) if self._held.endswith(stop[:n])), 0)


class Answer:
    """The text of one sample. A stop text counts only if it ends after the first
    min_tokens tokens, as for the server."""

    def __init__(
        self, tokenizer: ModelTokenizer, stops: Sequence[str], min_tokens: int = 0
    ) -> None:
        self._decoder = Decoder(tokenizer)
        self._cutter = StopCutter(stops)
        self._early = min_tokens  # How many of the next tokens do not stop the text.

    def add(self, tokens: Sequence[int]) -> str:
        """Returns the text that these tokens complete."""
        done = []
        for token in tokens:
            done.append(self._cutter.add(self._decoder.add(token), self._early <= 0))
            self._early -= 1
        return "".join(done)

    def finish(self) -> str:
        """Returns the rest of the text, after the last token."""
        rest = self._cutter.add(self._decoder.finish(), self._early < 0)
        return rest + self._cutter.finish()
