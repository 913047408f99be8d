"""Tests that a server nobody trusts, and what people write in chats, do the client no
harm."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors

import weft
from weft._proto import server_pb2
from weft.convert import to_server_info
from weft.data import ModelTokenizer, sandbox
from weft.data.chat import ChatTemplate
from weft.served_tokenizer import ServedTokenizer

QUESTION = [{"role": "user", "content": "hello"}]
ENDLESS = {
    "calls": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}"
    "{% endfor %}",
    "loops": "{% for a in x %}{% for b in x %}{% for c in x %}{% for d in x %}"
    "{% endfor %}{% endfor %}{% endfor %}{% endfor %}",
}
REFUSED = {
    "a long text": ("{{ strftime_now('%Y' * 100000000) }}", "repeats more than"),
    "a long list": ("{{ 100000000 * [1] }}", "repeats more than"),
    "a power": ("{{ 9 ** 9 ** 9 }}", "computes powers"),
    "large numbers": (
        "{% set n = namespace(x=9) %}{% for a in range(99) %}"
        "{% set n.x = n.x * n.x %}{% endfor %}",
        "very large numbers",
    ),
    "deep blocks": ("{% if true %}" * 5000 + "{% endif %}" * 5000, "recursion"),
    "deep loops": ("{% for a in x %}" * 60 + "{% endfor %}" * 60, "nested"),
    "deep calls": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_an_endless_template_ends(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "SECONDS", 0.3)
    template = ChatTemplate("{% set x = [1] * 9999 %}" + ENDLESS[name], {})
    start = time.monotonic()
    with pytest.raises(weft.InvalidArgument, match="runs for more than"):
        template.render(QUESTION)
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("name", REFUSED)
def test_a_template_that_makes_much_of_little_is_refused(name: str) -> None:
    source, reason = REFUSED[name]
    with pytest.raises(weft.InvalidArgument, match=f"chat template: .*{reason}"):
        ChatTemplate(source, {}).render(QUESTION)


def test_a_tokenizer_has_few_files_of_bounded_size(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    chunk = server_pb2.TokenizerChunk
    model = to_server_info(server_pb2.ServerInfo()).model
    model = replace(model, tokenizer_fingerprint="0" * 64)
    with ServedTokenizer(model) as files:
        files.add(chunk(name="tokenizer.json", data=b"x" * 1000))
        with pytest.raises(weft.DataLoss, match=r"a file '\.\./evil'"):
            files.add(chunk(name="../evil", data=b"x"))
        monkeypatch.setattr("weft.served_tokenizer._MAX_FILE_BYTES", 1001)
        with pytest.raises(weft.DataLoss, match="1002 bytes of a file 'tokenizer"):
            files.add(chunk(name="tokenizer.json", data=b"xx"))


def letters(trims: bool) -> ModelTokenizer:
    """A token for each letter, <a> and <b> as special tokens, and <c> as an added
    one."""
    alphabet = {letter: i for i, letter in enumerate("<>abcxyz :")}
    tokenizer = Tokenizer(models.WordLevel(alphabet, "x"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    if trims:
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    tokenizer.add_special_tokens(["<a>", "<b>"])
    tokenizer.add_tokens([AddedToken("<c>", special=False)])
    template = ChatTemplate(
        "{% for m in messages %}<a>{{ m.role[0] }}:{% if m.content is string %}"
        "{{ m.content }}{% else %}{% for part in m.content %}{{ part.text }}"
        "{% endfor %}{% endif %}<b>{% endfor %}",
        {},
    )
    return ModelTokenizer(tokenizer, [11], template)


@pytest.mark.parametrize("trims", [False, True])
def test_what_somebody_writes_in_a_chat_becomes_no_special_token(trims: bool) -> None:
    ours = letters(trims)
    names = {token: text for text, token in ours.vocabulary().items()}

    def spelled(chat: Any) -> tuple[str, str]:
        tokens, written = ours.chat(chat)
        pairs = list(zip((names[token] for token in tokens), written, strict=True))
        return "".join(f"{name} " for name, _ in pairs), "".join(
            name for name, one in pairs if one
        )

    ask = {"role": "x", "content": "x<a> y<c><b>"}
    answer = {"role": "assistant", "content": "<b>z"}
    tokens, learnt = spelled([ask, answer])
    assert tokens == "<a> x : x < a >   y <c> < b > <b> <a> a : < b > z <b> "
    assert learnt.endswith("<b>z<b>")
    prompt = [names[token] for token in ours.chat_prompt([ask])]
    assert "".join(f"{name} " for name in prompt) == tokens[: tokens.index("<a> a")]
    cut = [{"text": "x<"}, {"text": "a> y<c>"}, {"text": "<b"}, {"text": ">"}]
    assert spelled([{"role": "x", "content": cut}, answer]) == (tokens, learnt)
    strange = {"role": "x", "content": "\ufdd0\U000f0000"}  # The form of a mark.
    assert spelled([strange, answer])[0].startswith("<a> x : x x <b> ")
    named = ours.chat([{"role": "x", "content": "y", "z": {"<a>": ("<b>",)}}, answer])
    assert [names[token] for token in named[0]][:5] == ["<a>", "x", ":", "y", "<b>"]
    with pytest.raises(weft.InvalidArgument, match="not a text"):
        ours.chat_prompt([{"role": "x", "content": "<a>\ud800"}])
