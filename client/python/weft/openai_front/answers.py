"""Answers of OpenAI's API as JSON."""

from __future__ import annotations

import functools
import io
import json
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any

from weft.data import ModelTokenizer
from weft.types import FloatArray

Json = dict[str, Any]
Top = Sequence[Sequence[tuple[int, float]]]  # (token, logprob) pairs of each position.
_BLOCK = 1 << 16


@functools.lru_cache(1 << 16)
def _text(tokenizer: ModelTokenizer, token: int) -> str:
    return tokenizer.decode([token], special=True)


@functools.lru_cache(1 << 16)
def _bytes(tokenizer: ModelTokenizer, token: int) -> bytes:
    return tokenizer.token_bytes(token)


def _finite(logprob: float) -> float:
    """Returns a logprob that JSON can hold. OpenAI's API has this number for a token
    that is very unlikely; the server has -inf for one that cannot be drawn."""
    return max(-9999.0, float(logprob))


def dumps(value: object, depth: int = 5) -> Iterator[str]:
    """Yields the parts of JSON without numbers that JSON lacks. An iterator becomes a
    list.

    Goes `depth` levels down step by step, because one long step would keep all other
    threads waiting."""
    if depth and isinstance(value, dict):
        separator = "{"
        for key, entry in value.items():
            yield f"{separator}{json.dumps(key)}:"
            yield from dumps(entry, depth - 1)
            separator = ","
        yield "}" if value else "{}"
    elif depth and isinstance(value, (list, Iterator)):
        separator = "["
        for entry in value:
            yield separator
            yield from dumps(entry, depth - 1)
            separator = ","
        yield "]" if separator == "," else "[]"
    else:
        yield json.dumps(value, allow_nan=False, separators=(",", ":"))


def in_blocks(parts: Iterable[str]) -> Iterator[bytes]:
    """Joins the parts to blocks of at least _BLOCK bytes."""
    block = io.StringIO()
    for part in parts:
        block.write(part)
        if block.tell() >= _BLOCK:
            yield block.getvalue().encode()
            block = io.StringIO()
    yield block.getvalue().encode()


class Scored:
    """Tokens with their logprobs, and with the likeliest tokens at each position.
    A position without a logprob (the first of a prompt) has None."""

    def __init__(
        self,
        tokenizer: ModelTokenizer,
        tokens: Sequence[int],
        logprobs: Sequence[float | None] | FloatArray,
        top: Top,
    ) -> None:
        self._tokenizer = tokenizer
        self._tokens = tokens
        self._logprobs = [None if p is None else _finite(p) for p in logprobs]
        self._top = top

    def _text(self, token: int) -> str:
        return _text(self._tokenizer, token)

    def as_completion(self, offset: int = 0) -> Json:
        """Returns the logprobs in the format of /v1/completions. offset: the number of
        characters before the first token."""
        texts = [self._text(token) for token in self._tokens]
        offsets = [*accumulate(map(len, texts), initial=offset)][:-1]
        # Tokens that are parts of characters have the same text. The reversed order
        # keeps the likeliest token of each text.
        top: list[dict[str, float] | None] = [
            {self._text(token): _finite(p) for token, p in reversed(entries)} or None
            for entries in self._top
        ]
        return {
            "tokens": texts,
            "token_logprobs": self._logprobs,
            "top_logprobs": top if any(top) else None,
            "text_offset": offsets,
        }

    def as_chat(self) -> Json:
        """Returns the logprobs in the format of /v1/chat/completions. The content is an
        iterator, because all of it at once would take much memory."""

        def entry(token: int, logprob: float | None) -> Json:
            return {
                "token": self._text(token),
                "logprob": logprob,
                "bytes": list(_bytes(self._tokenizer, token)),
            }

        top = list(self._top) or [[] for _ in self._tokens]
        return {
            "content": (
                {
                    **entry(token, logprob),
                    "top_logprobs": [entry(t, _finite(p)) for t, p in likely],
                }
                for token, logprob, likely in zip(
                    self._tokens, self._logprobs, top, strict=True
                )
            ),
            "refusal": None,
        }


class Envelope:
    """The fields that all parts of one answer share."""

    def __init__(self, kind: str, model: str) -> None:
        prefix = "cmpl" if kind == "text_completion" else "chatcmpl"
        self._fields: Json = {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, choices: list[Json], usage: Json) -> Json:
        return {**self._fields, "choices": choices, "usage": usage}

    def chunk(self, choices: list[Json], usage: Json | None = None) -> Json:
        """Returns a part of a stream."""
        kind = self._fields["object"].removesuffix(".chunk")
        if kind == "chat.completion":
            kind = "chat.completion.chunk"
        fields = {**self._fields, "object": kind, "choices": choices}
        return fields if usage is None else {**fields, "usage": usage}


def usage(prompt_tokens: int, completion_tokens: int) -> Json:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
