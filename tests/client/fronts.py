"""Fronts for OpenAI's API in the test's own process, and small tokenizers for them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import uvicorn
from fastapi.testclient import TestClient
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from weft.channel import Security
from weft.data import ModelTokenizer
from weft.openai_front import server as server_module
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


@contextlib.contextmanager
def running(front: Front) -> Iterator[tuple[int, uvicorn.Server]]:
    """Runs the front's HTTP server in a thread, with a stop after a second. Yields its
    port."""
    settings = server_module.config(make_app(front, 9999), "127.0.0.1", 0)
    # Kubernetes kills a pod that has not stopped after 30 s.
    assert settings.timeout_graceful_shutdown in range(1, 30)
    settings.timeout_graceful_shutdown = 1
    server = uvicorn.Server(settings)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    try:
        yield server.servers[0].sockets[0].getsockname()[1], server
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()
