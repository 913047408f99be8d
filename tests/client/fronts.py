"""Fronts for OpenAI's API in the test's own process, and small tokenizers for them."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from fastapi.testclient import TestClient
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from weft.channel import Security
from weft.data import ModelTokenizer
from weft.openai_front.app import Front, make_app


class Bytes:
    """A tokenizer with a token for each byte."""

    def no_padding(self) -> None: ...

    def no_truncation(self) -> None: ...

    def encode(self, text: str, **_: Any) -> Any:
        return SimpleNamespace(special_tokens_mask=[0] * len(text))

    def get_vocab(self, **_: Any) -> dict[str, int]:
        return {"byte": 0}

    def decode(self, tokens: Sequence[int], **_: Any) -> str:
        return bytes(tokens).decode(errors="replace")


def byte_level() -> Tokenizer:
    """A tokenizer of the GPT-2 kind, with a token for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


def front_of(
    target: str,
    tokenizer: ModelTokenizer | None,
    max_body_bytes: int = 9999,
    **names: Any,
) -> TestClient:
    front = Front(target, tokenizer, Security())
    app = make_app(front, max_body_bytes, **names)
    return TestClient(app, base_url="http://localhost")
