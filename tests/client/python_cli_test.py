"""Tests `python -m weft` with a word-level tokenizer."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_weftd import FakeWeftd
from tokenizers import Tokenizer, models, pre_tokenizers

import weft
from weft.__main__ import main

WORDS = ["zero", "one", "two", "three", "four", "five", "six"]
TEMPLATE = "{% for m in messages %}{{ m.content }} {% endfor %}"


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    vocabulary = {word: index for index, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="zero"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = {"eos_token": "six", "chat_template": TEMPLATE}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def test_tokenizes_texts_and_prompts(
    model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = model_dir / "texts.jsonl"
    records = [
        {"text": "one two"},
        {"prompt": "one", "completion": "two three"},
        {"tokens": [5, 6]},
    ]
    texts.write_text("\n".join(map(json.dumps, records)) + "\n\n")
    output = model_dir / "tokens.jsonl"
    base = ["tokenize", "--model-dir", str(model_dir)]
    assert main([*base, "--input", str(texts), "--output", str(output)]) == 0
    made = [json.loads(line) for line in output.read_text().splitlines()]
    assert made == [
        {"tokens": [1, 2, 6], "prompt_length": 0},
        {"tokens": [1, 2, 3, 6], "prompt_length": 1},
        {"tokens": [5, 6], "prompt_length": 0},
    ]
    assert main([*base, "--no-eos", "--input", str(texts)]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert json.loads(first) == {"tokens": [1, 2], "prompt_length": 0}


def test_tokenizes_what_a_pipe_brings(model_dir: Path) -> None:
    made = subprocess.run(
        [sys.executable, "-m", "weft", "tokenize", "--model-dir", str(model_dir)],
        input='{"text": "one"}\n',
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(made.stdout)["tokens"] == [1, 6]


@pytest.mark.parametrize("line", ["{}", "[1]", "{"])
def test_bad_records_fail(
    model_dir: Path, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = model_dir / "texts.jsonl"
    texts.write_text(line + "\n" + '{"text": "one"}\n')
    base = ["tokenize", "--model-dir", str(model_dir)]
    # The good record is written nevertheless.
    assert main([*base, "--input", str(texts)]) == 1
    printed = capsys.readouterr()
    assert f"{texts}: 1 records left out" in printed.err
    assert json.loads(printed.out)["tokens"] == [1, 6]


def test_samples_texts_and_chats(
    server: FakeWeftd,
    client: weft.Client,
    model_dir: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    client.create_adapter("a")
    sample = ["sample", "--model-dir", str(model_dir), "--server", server.target]
    sample += ["--prompt", "one", "--max-tokens", "3", "--adapter", "a"]
    for chat in ([], ["--chat"]):
        assert main([*sample, *chat]) == 0
        assert "two three four" in capsys.readouterr().out


def test_missing_files_and_servers_are_said(
    tmp_path: Path, model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    arguments = ["--model-dir", str(empty), "--prompt", "one"]
    assert main(["sample", *arguments]) == 1
    assert "tokenizer.json" in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        main(["sample"])
    assert caught.value.code == 2


def test_a_chat_goes_on_until_its_input_ends(
    server: FakeWeftd,
    client: weft.Client,
    model_dir: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client.create_adapter("a").snapshot("s")
    lines = ["/retry", "one", "/retry", "", "two", "/clear", "three", "/help"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
    asked: list[list[int]] = []
    stream = weft.Adapter.sample_stream

    def noted(adapter: weft.Adapter, prompt: list[int], **options: Any) -> Any:
        asked.append(prompt)
        assert options["snapshot"] == "s"
        return stream(adapter, prompt, **options)

    monkeypatch.setattr(weft.Adapter, "sample_stream", noted)
    chat = ["chat", "--model-dir", str(model_dir), "--server", server.target]
    chat += ["--adapter", "a@s", "--max-tokens", "3", "--system", "five"]
    assert main(chat) == 0
    assert asked == [
        [5, 1],
        [5, 1],
        [5, 1, 2, 3, 4, 2],  # The first answer is a part of the second prompt.
        [5, 3],
    ]
    printed = capsys.readouterr().out
    assert "there is no answer yet" in printed
    assert printed.count("two three four") == 2
    assert printed.count("Ctrl-D ends") == 2
