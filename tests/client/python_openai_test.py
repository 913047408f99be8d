"""Tests how the front for OpenAI's API decodes tokens, and how it parses requests."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
from fake_weftd import FakeWeftd
from fronts import Bytes, byte_level, front_of
from grpc import StatusCode
from pydantic import ValidationError
from small_server import SmallServer
from tokenizers import Tokenizer, decoders, models

from weft.data import ModelTokenizer
from weft.data.chat import ChatTemplate
from weft.openai_front.answers import Scored
from weft.openai_front.schema import ChatRequest, CompletionRequest
from weft.openai_front.text import Answer, Decoder, StopCutter
from weft.types import ALL_THAT_FIT

TEXT = "Ein Fuchs 🦊 läuft — schnell. 漢字!\nEnd"


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


@pytest.mark.parametrize(
    ("stops", "min_tokens", "wanted"),
    [
        (["abc"], 0, ""),
        (["abc"], 2, ""),
        (["abc"], 3, "abc"),
        (["abc"], 5, "abc"),
        (["abc"], 6, "abcabcxab"),
        (["a", "abcabcx~"], 1, "abc"),  # The first "a" is still held back then.
    ],
)
def test_a_stop_text_within_min_tokens_does_not_count(
    tokenizer: ModelTokenizer, stops: list[str], min_tokens: int, wanted: str
) -> None:
    for size in (1, 9):
        answer = Answer(tokenizer, stops, min_tokens)
        tokens = list(b"abcabcxab")
        pieces = [answer.add(tokens[i : i + size]) for i in range(0, 9, size)]
        assert "".join(pieces) + answer.finish() == wanted


def test_a_full_queue_delays_answers_and_refuses_streams(
    tokenizer: ModelTokenizer,
) -> None:
    body = {"model": "toy", "prompt": [5, 6], "max_tokens": 2}
    with FakeWeftd() as server, front_of(server.target, tokenizer) as front:
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


NEUTRAL = {
    "top_k": -1,
    "repetition_penalty": 1.0,
    "length_penalty": 1.0,
    "min_p": 0,
    "best_of": 1,
    "ignore_eos": False,
    "skip_special_tokens": True,
    "chat_template_kwargs": {},
}
MESSAGES = [{"role": "user", "content": "a"}]


def test_fields_that_change_nothing_are_taken() -> None:
    common = {"model": "m", "user": "me", "presence_penalty": 0.0, "logit_bias": {}}
    chat = ChatRequest.model_validate(
        {**common, **NEUTRAL, "messages": MESSAGES, "tool_choice": "none", "tools": []}
    )
    assert chat.stops() == []
    whole = CompletionRequest.model_validate(
        {**common, **NEUTRAL, "prompt": "a", "n": 2, "best_of": 2, "stop": "x"}
    )
    assert whole.stops() == ["x"]
    CompletionRequest.model_validate({**common, **NEUTRAL, "prompt": "a", "n": 2})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_k", -2),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"5": "1"}),
        ("min_tokens", -1),
        ("allowed_token_ids", ["a"]),
        ("length_penalty", 0.5),
        ("best_of", 3),
        ("ignore_eos", True),
        ("skip_special_tokens", False),
        ("chat_template_kwargs", {"enable_thinking": [False]}),
    ],
)
def test_their_other_values_are_refused_by_name(name: str, value: object) -> None:
    fields = {"model": "m", **NEUTRAL, name: value}
    for request in (
        lambda: ChatRequest.model_validate({**fields, "messages": MESSAGES}),
        lambda: CompletionRequest.model_validate({**fields, "prompt": "a"}),
    ):
        with pytest.raises(ValidationError, match=name):
            request()


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "user"}, "messages[1].content is missing"),
        ({"role": "user", "content": None}, "messages[1].content is missing"),
        ({"role": "user", "contents": "a"}, "messages[1].content is missing"),
        ({"role": "assistant", "tool_calls": []}, "messages[1].content is missing"),
        ({"role": "user", "content": 5}, "messages[1].content is not a text"),
        (
            {"role": "user", "content": [{"text": 5}]},
            "messages[1].content is not a text",
        ),
        ({"content": "a"}, "messages[1].role is missing"),
        ({"role": None, "content": "a"}, "messages[1].role is missing"),
        ({"role": "tool", "content": "a"}, "messages[1].role is 'tool', must follow"),
    ],
)
def test_a_message_without_a_text_is_refused_by_name(message: Any, words: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(words)):
        ChatRequest.model_validate({"model": "m", "messages": [*MESSAGES, message]})


@pytest.mark.parametrize("without", [{}, {"content": None}], ids=["absent", "null"])
def test_calls_of_tools_need_no_content(without: Any) -> None:
    called = {"role": "assistant", "tool_calls": [{"id": "1"}], **without}
    parts = {"role": "user", "content": [{"text": "a"}, {"text": "b"}]}
    request = ChatRequest.model_validate({"model": "m", "messages": [called, parts]})
    assert request.messages[0] == {**called, "content": ""}
    assert request.messages[1]["content"] == "a\nb"


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


# Shows no tools and no calls of tools, and reads one switch.
CHATML = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}quiet{% endif %}"
)


def test_a_chat_without_max_tokens_gets_what_fits() -> None:
    template = ChatTemplate(CHATML, {})
    tokenizer = ModelTokenizer(byte_level(), template=template)
    chat = {"model": "toy", "messages": MESSAGES}
    with SmallServer() as server, front_of(server.target, tokenizer) as front:
        for fields in ({}, {"max_tokens": 5}, {"max_completion_tokens": 6}):
            sent = front.post("/v1/chat/completions", json={**chat, **fields})
            assert sent.status_code == 200, sent.text
        kept = [asked.config.max_tokens for asked in server.asked]
        assert kept == [ALL_THAT_FIT, 5, 6]


@pytest.mark.parametrize("stream", [False, True])
def test_what_no_wait_cures_is_no_429(tokenizer: ModelTokenizer, stream: bool) -> None:
    body = {"model": "toy", "prompt": [5], "stream": stream}
    with SmallServer() as server, front_of(server.target, tokenizer) as front:
        server.refusal = StatusCode.RESOURCE_EXHAUSTED, "the request is too large"
        refused = front.post("/v1/completions", json=body)
        assert refused.status_code == 400 and "Retry-After" not in refused.headers
        assert refused.json()["error"]["type"] == "invalid_request_error"


def test_a_history_with_tools_needs_a_template_that_shows_them() -> None:
    calls = [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]
    chat = {
        "model": "toy",
        "messages": [
            *MESSAGES,
            {"role": "assistant", "tool_calls": calls},
            {"role": "tool", "tool_call_id": "1", "content": "b"},
        ],
    }
    shown = CHATML.replace("m.content", "m.content ~ m.tool_calls|string")
    with SmallServer() as server:
        for source, status in ((CHATML, 400), (shown, 200)):
            tokenizer = ModelTokenizer(byte_level(), template=ChatTemplate(source, {}))
            with front_of(server.target, tokenizer) as front:
                reply = front.post("/v1/chat/completions", json=chat)
            assert reply.status_code == status, reply.text
            if status == 400:
                assert "messages[1] has tool_calls" in reply.json()["error"]["message"]


def test_the_switches_of_a_template_are_offered() -> None:
    tokenizer = ModelTokenizer(byte_level(), template=ChatTemplate(CHATML, {}))
    chat: dict[str, Any] = {"model": "toy", "messages": MESSAGES}
    prompts = []
    with SmallServer() as server, front_of(server.target, tokenizer) as front:
        for switches in ({}, {"enable_thinking": False}, {"enable_thinking": True}):
            chat["chat_template_kwargs"] = switches
            reply = front.post("/v1/chat/completions", json=chat)
            assert reply.status_code == 200, reply.text
            prompts.append(tokenizer.decode(server.asked[-1].prompt))
        for name in ("thinking", "messages"):
            chat["chat_template_kwargs"] = {name: True}
            reply = front.post("/v1/chat/completions", json=chat)
            assert reply.status_code == 400
            error = reply.json()["error"]["message"]
            assert name in error and "its switches: enable_thinking" in error
    assert prompts == ["user:a;", "user:a;quiet", "user:a;"]


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"tools": [{}]}, "tools", "unsupported_parameter"),
        ({"suffix": "a"}, "suffix", "unknown_parameter"),
        ({"reasoning_effort": "low"}, "reasoning_effort", "unknown_parameter"),
        ({"ignore_eos": True}, "ignore_eos", "unsupported_parameter"),
        ({"stream_options": {}}, "stream_options", "invalid_value"),
        ({"messages": [{"role": "user"}]}, "messages", "invalid_value"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "invalid_value"),
        ({"temperature": "hot"}, "temperature", None),
    ],
)
def test_an_error_names_its_field(
    tokenizer: ModelTokenizer, fields: Any, param: str, code: str | None
) -> None:
    body = {"model": "toy", "messages": MESSAGES, **fields}
    with SmallServer() as server, front_of(server.target, tokenizer) as front:
        reply = front.post("/v1/chat/completions", json=body)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert (error["param"], error["code"]) == (param, code)
    assert param in error["message"]
