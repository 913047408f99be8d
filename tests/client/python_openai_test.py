"""Tests how the front for OpenAI's API makes texts of tokens."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from pydantic import ValidationError

from weft.data import ModelTokenizer
from weft.openai_front.schema import ChatRequest, CompletionRequest
from weft.openai_front.text import Answer, Decoder, StopCutter

TEXT = "Ein Fuchs 🦊 läuft — schnell. 漢字!\nEnd"


class Bytes:
    """A tokenizer with a token for each byte."""

    def no_padding(self) -> None: ...

    def no_truncation(self) -> None: ...

    def decode(self, tokens: Sequence[int], **_: Any) -> str:
        return bytes(tokens).decode(errors="replace")


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
    """Each costs a thousand times the bytes that cause it."""
    with pytest.raises(ValidationError) as caught:
        CompletionRequest.model_validate({"model": "m", **field})
    assert caught.value.error_count() <= 4
