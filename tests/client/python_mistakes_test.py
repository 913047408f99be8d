"""Each line of mistakes.jsonl is a mistake of a user, as an expression or as the words
after `python -m weft`, and the words that its message must have: field, value, limit
and the way out. The message comes within 3 seconds."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import TEMPLATE, WORDS, Capture, Logs, Patch, closed_port, save_tokenizer
from fake_weftd import FakeWeftd
from tokenizers import Tokenizer, models

import weft
from weft.__main__ import main

SECONDS = 3.0
FILE = Path(__file__).with_name("mistakes.jsonl")
MISTAKES = [json.loads(line) for line in FILE.read_text("utf-8").splitlines()]


def sample(**fields: Any) -> weft.Sample:
    """Returns a sample of two tokens behind three, with these fields replaced."""
    made = weft.Sample([7, 8], np.array([-0.5, -0.25]), "stop", [], prompt=[4, 5, 6])
    return replace(made, **fields)


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """The names that a line may use: a client of a server with the adapter "mine"."""
    model = tmp_path_factory.mktemp("model")
    config = {"eos_token": "end", "chat_template": TEMPLATE}
    save_tokenizer(model, WORDS, "end", config)
    with (
        pytest.MonkeyPatch.context() as patch,
        FakeWeftd(f"--model={model}") as server,
        closed_port() as closed,
    ):
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        with weft.Client(server.target) as client:
            yield {
                "weft": weft,
                "target": server.target,
                "closed": closed,
                "client": client,
                "adapter": client.create_adapter("mine", rank=4),
                "DATUM": weft.Datum.next_token([1, 2, 3]),
                "SAMPLE": sample,
            }


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: Patch) -> Path:
    """The present folder, with the files that the lines name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "records.jsonl").write_text(
        '{"tokens": [1, 500]}\n{"question": "w1"}\n'
    )
    (tmp_path / "other").mkdir()
    other = Tokenizer(models.WordLevel({"x": 0}, unk_token="x"))
    other.save(str(tmp_path / "other" / "tokenizer.json"))
    return tmp_path


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    "mistake", MISTAKES, ids=lambda one: one.get("do", one.get("run"))
)
def test_a_mistake_has_a_message(
    mistake: dict[str, Any], names: dict[str, Any], capsys: Capture, caplog: Logs
) -> None:
    begin = time.monotonic()
    if "do" in mistake:
        number = names["adapter"].next_step
        with pytest.raises((weft.WeftError, TypeError)) as caught:
            eval(mistake["do"], names)
        message = str(caught.value)
        if "cannot be sent" in mistake["says"]:
            assert names["adapter"].next_step == number
    else:
        words = shlex.split(mistake["run"].format_map(names))
        try:
            assert main(words) == 1
        except SystemExit as wrong_usage:
            assert wrong_usage.code == 2
        message = capsys.readouterr().err + caplog.text
    assert time.monotonic() - begin < SECONDS
    for words in mistake["says"]:
        assert words in message
