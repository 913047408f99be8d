"""Tests that the commands and code in client/python/README.md work, even when they run
a second time. test_first_minute.py runs those of README.md."""

from __future__ import annotations

import io
import re
import shlex
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from conftest import fixtures

from weft.__main__ import _parser, main

ROOT = Path(__file__).resolve().parents[2]
CLIENT = ROOT / "client" / "python"
SMOLLM2 = fixtures.SHORT_SMOLLM2
ADDRESS = "127.0.0.1:50051"
README = CLIENT / "README.md"
COMMAND = re.compile(r"^python -m weft (?:.*\\\n)*.*$", re.MULTILINE)
# Options that shorten the commands: fewer steps, with less work in each.
SHORTER = {
    "sft": "--steps 2 --batch 1 --eval-fraction 0.005",
    "dpo": "--steps 2 --batch 1 --eval-fraction 0.05",
    "grpo": "--steps 1 --prompts 1 --samples 4 --max-tokens 4 --eval-data topic.jsonl",
    "sample": "--max-tokens 4",
}


class Block(NamedTuple):
    """A fenced block: its language, or "", and its lines."""

    language: str
    text: str


def blocks(path: Path) -> list[Block]:
    fenced = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
    return [Block(*found) for found in fenced.findall(path.read_text("utf-8"))]


def commands(block: Block) -> list[list[str]]:
    """Returns the words of each `python -m weft` command, from the subcommand on."""
    if block.language:
        return []
    lines = (found.replace("\\\n", " ") for found in COMMAND.findall(block.text))
    return [shlex.split(line, comments=True)[3:] for line in lines]


class Reader:
    """Runs blocks in the working directory, a folder that looks like the repository.

    ran: the subcommands of all commands, in order.
    """

    def __init__(self, folder: Path, address: str) -> None:
        self.ran: list[str] = []
        self._address = address
        (folder / "client").symlink_to(ROOT / "client")
        (folder / "texts.jsonl").write_text('{"text": "Rain is water."}\n')
        topics = CLIENT / "examples/data/topics_test.jsonl"
        (folder / "topic.jsonl").write_text(topics.read_text().splitlines()[0])

    def read(self, path: Path) -> None:
        """Runs all blocks of a page in order. They share their Python names."""
        names: dict[str, Any] = {}
        for block in blocks(path):
            if block.language == "python":
                code = block.text.replace(ADDRESS, self._address)
                exec(compile(code, str(path), "exec"), names)
            for words in commands(block):
                self._run(words)

    def _run(self, words: list[str]) -> None:
        """Runs a command as `python -m weft` does, but in this process, which has
        imported what it needs. test_first_minute.py runs commands by themselves."""
        self.ran.append(words[0])
        words = [word.replace(ADDRESS, self._address) for word in words]
        words += shlex.split(SHORTER.get(words[0], ""))
        assert main(words) == 0, shlex.join(words)


def test_the_readmes_lines_run_twice(
    daemon_for: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = daemon_for(SMOLLM2)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WEFT_SERVER", daemon.address)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    reader = Reader(tmp_path, daemon.address)
    for _ in range(2):
        reader.read(README)
    commands = ["sft", "sample", "chat", "dpo", "grpo", "tokenize", "sample"]
    assert reader.ran == commands * 2
    for made in (
        "run/dictionary/peft/adapter_config.json",
        "run/polite/log.jsonl",
        "run/five-words/samples.jsonl",
    ):
        assert (tmp_path / made).is_file()
    with daemon.client() as client:
        assert client.adapter("dictionary").info().optim_steps == 2


def test_a_line_that_works_but_once_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nopen('made', 'x').close()\n```\n")
    monkeypatch.chdir(tmp_path)
    reader = Reader(tmp_path, ADDRESS)
    reader.read(page)
    with pytest.raises(FileExistsError):
        reader.read(page)
    page.write_text(
        "```\n# more\npython -m weft tokenize \\\n  --model-dir none\n```\n"
    )
    with pytest.raises(AssertionError, match="tokenize --model-dir none"):
        reader.read(page)
    assert "none" in capsys.readouterr().err


def test_the_commands_that_do_not_run_here_are_spelt_right() -> None:
    """Those of the examples, and those that work only once (in blocks of `sh`)."""
    pages = [CLIENT / "README.md", CLIENT / "exports.md", CLIENT / "examples/README.md"]
    found = [
        words
        for page in pages
        for block in blocks(page)
        for words in commands(Block("", block.text))
    ]
    assert {words[0] for words in found} >= {"sweep", "export", "grpo"}
    for words in found:
        _parser().parse_args(words)
