"""Tests how the front for OpenAI's API decodes tokens, and how it parses requests."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from fake_weftd import FakeWeftd
from fastapi.testclient import TestClient
from grpc import StatusCode
from pydantic import ValidationError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from weft.channel import Security
from weft.data import ModelTokenizer
from weft.openai_front.answers import Scored
from weft.openai_front.app import Front, make_app
from weft.openai_front.schema import ChatRequest, CompletionRequest
from weft.openai_front.text import Answer, Decoder, StopCutter

TEXT = "Ein Fuchs 🦊 läuft — schnell. 漢字!\nEnd"


class Bytes:
    """A tokenizer with a token for each byte."""

    def no_padding(self) -> None: ...

    def no_truncation(self) -> None: ...

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


def byte_fallback() -> Tokenizer:
    """A tokenizer of the SentencePiece kind, with two words."""
    pieces = [f"<0x{byte:02X}>" for byte in range(256)] + ["a", "b"]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


@pytest.fixture
def tokenizer() -> ModelTokenizer:
    return ModelTokenizer(Bytes())  # type: ignore[arg-type]


def test_a_character_comes_with_its_last_byte(tokenizer: ModelTokenizer) -> None:
    decoder = Decoder(tokenizer)
    pieces = [decoder.add(byte) for byte in TEXT.encode()]
    assert "".join(pieces) + decoder.finish() == TEXT
    assert not any("\ufffd" in piece for piece in pieces)
    assert [piece for piece in pieces if piece] == list(TEXT)


def test_a_character_without_its_last_byte_comes_at_the_end(
    tokenizer: ModelTokenizer,
) -> None:
    decoder = Decoder(tokenizer)
    assert [decoder.add(byte) for byte in "🦊".encode()[:3]] == ["", "", ""]
    assert "\ufffd" in decoder.finish()
    assert decoder.finish() == ""


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_tokens_of_a_character_have_their_own_bytes(
    make: Callable[[], Tokenizer],
) -> None:
    tokenizer = ModelTokenizer(make())
    text = "a🦊b \ufffd漢"
    tokens = tokenizer.encode(text)
    found = [tokenizer.token_bytes(token) for token in tokens]
    assert b"".join(found) == text.encode()
    assert b"\xf0" in found and b"a" in found
    entries = Scored(tokenizer, tokens, [0.0] * len(tokens), []).as_chat()["content"]
    assert [bytes(entry["bytes"]) for entry in entries] == found


def test_special_tokens_have_the_bytes_of_their_text() -> None:
    tokenizer = ModelTokenizer(byte_level())
    (end,) = tokenizer.encode("<end>")
    assert tokenizer.token_bytes(end) == b"<end>"


@pytest.mark.parametrize("sizes", [(1,), (2, 3), (7,), (1000,)])
@pytest.mark.parametrize(
    ("stops", "wanted"),
    [
        ([], TEXT),
        (["schnell"], "Ein Fuchs 🦊 läuft — "),
        (["End", "漢"], "Ein Fuchs 🦊 läuft — schnell. "),
        (["Enden", "zzz"], TEXT),
        (["Ein"], ""),
        (["EEnd", "\nEnd"], "Ein Fuchs 🦊 läuft — schnell. 漢字!"),
    ],
)
def test_the_cut_depends_on_no_piece(
    tokenizer: ModelTokenizer, sizes: Any, stops: list[str], wanted: str
) -> None:
    answer = Answer(tokenizer, stops)
    tokens = list(TEXT.encode())
    text = ""
    for size in itertools.cycle(sizes):
        if not tokens:
            break
        text += answer.add(tokens[:size])
        assert wanted.startswith(text)
        tokens = tokens[size:]
    assert text + answer.finish() == wanted


def test_what_may_be_a_stop_waits() -> None:
    cutter = StopCutter(["</end>"])
    assert [cutter.add(t) for t in ("a<", "/e", "x", "</end", ">b")] == [
        *("a", "", "</ex", "", "")
    ]
    assert cutter.stopped and cutter.add("more") == cutter.finish() == ""


def test_a_full_queue_delays_answers_and_refuses_streams(
    tokenizer: ModelTokenizer,
) -> None:
    body = {"model": "toy", "prompt": [5, 6], "max_tokens": 2}
    with (
        FakeWeftd() as server,
        TestClient(
            make_app(Front(server.target, tokenizer, Security()), 9999)
        ) as front,
    ):
        assert front.post("/v1/completions", json=body).status_code == 200
        server.retry_hint(1500)
        for rpc in ("Sample", "SampleStream"):
            server.refuse(rpc, StatusCode.RESOURCE_EXHAUSTED, "the queue is full")
        refused = front.post("/v1/completions", json={**body, "stream": True})
        assert refused.status_code == 429 and refused.headers["Retry-After"] == "2"
        assert "the queue is full" in refused.json()["error"]["message"]
        assert front.post("/v1/completions", json=body).status_code == 200
        assert [rpc for rpc, _ in server.arrived()].count("Sample") == 3


def test_forms_of_a_prompt() -> None:
    def prompts(prompt: object) -> list[Any]:
        return CompletionRequest.model_validate(
            {"model": "m", "prompt": prompt}
        ).prompts()

    assert prompts("a") == ["a"]
    assert prompts(["a", "b"]) == ["a", "b"]
    assert prompts([1, 2]) == [[1, 2]]
    assert prompts([[1], [2, 3]]) == [[1], [2, 3]]


def test_fields_that_change_nothing_are_taken() -> None:
    messages = [{"role": "user", "content": "a"}]
    common = {"model": "m", "user": "me", "presence_penalty": 0.0, "logit_bias": {}}
    chat = ChatRequest.model_validate(
        {**common, "messages": messages, "tool_choice": "none", "tools": []}
    )
    assert chat.stops() == []
    whole = CompletionRequest.model_validate(
        {**common, "prompt": "a", "n": 2, "best_of": 2, "stop": "x"}
    )
    assert whole.stops() == ["x"]


@pytest.mark.parametrize(
    "field",
    [
        {"prompt": [None] * 10_000},
        {"prompt": [[None]] * 10_000},
        {"prompt": "a", "stop": [1] * 10_000},
        {"prompt": "a", "stop_token_ids": [""] * 10_000},
        {"prompt": "a", **{f"a{n}": 1 for n in range(10_000)}},
    ],
)
def test_a_request_has_few_errors(field: Any) -> None:
    """One error costs a thousand times the bytes of the bad entry that it describes. So
    a request with many bad entries gets only a few errors."""
    with pytest.raises(ValidationError) as caught:
        CompletionRequest.model_validate({"model": "m", **field})
    assert caught.value.error_count() <= 4
