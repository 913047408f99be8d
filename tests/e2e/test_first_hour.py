"""Tests a new user's first hour: the wheel in an empty environment, one command,
and a model that answers in the format of a chat file. tests/oracle/test_peft_folders.py
tests that transformers and peft compute with an export what the server computes."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import fixtures

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "client"))

import wheels  # noqa: E402

SMOLLM2 = fixtures.SMOLLM2
CHATS = ROOT / "client/python/examples/data/dictionary.jsonl"
# CHATS does not define these words, but it has questions of the same form.
QUESTIONS = ['What does "river" mean?', "Define the word happy."]
WEIGHTS = "adapter_model.safetensors"
FORMAT = re.compile(r"\w+ \((noun|verb|adjective)\): [^\n]+\.")


def test_one_command_teaches_a_format(
    daemon_for: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = fixtures.model_folder(SMOLLM2)
    monkeypatch.delenv("WEFT_THREADS")
    daemon = daemon_for(SMOLLM2)
    (tmp_path / "dist").mkdir()
    wheel = wheels.build_wheel(tmp_path / "dist")
    python = wheels.install(wheel, tmp_path / "venv", extra="train")
    printed = wheels.run(
        *(python, "-m", "weft", "sft", "--server", daemon.address),
        *("--data", CHATS, "--adapter", "dictionary"),
        *("--steps", 8, "--batch", 4, "--lr", 1e-3, "--output", "run"),
        *("--schedule", "constant", "--eval-fraction", 0.02),
        *("--export", "peft"),
        cwd=tmp_path,
    )
    assert "200 records, 0 left out" in printed
    rows = [json.loads(line) for line in (tmp_path / "run/log.jsonl").open()]
    before, after = (row["eval_loss"] for row in (rows[0], rows[-1]))
    assert after < 0.6 * before, (before, after)
    assert (tmp_path / "run/plot.png").exists()

    from weft.data import ModelTokenizer

    tokenizer = ModelTokenizer.from_folder(model)
    prompts = [
        tokenizer.chat_prompt([{"role": "user", "content": q}]) for q in QUESTIONS
    ]
    with daemon.client() as client:
        adapter = client.adapter("dictionary")
        assert [c.name for c in client.checkpoints("dictionary")] == ["step-8"]
        drawn = adapter.sample_many(prompts, max_tokens=32, temperature=0.0)
        adapter.export(tmp_path / "again")
    samples = [result.samples[0] for result in drawn]
    answers = [tokenizer.decode(sample.tokens) for sample in samples]
    assert all(FORMAT.fullmatch(answer) for answer in answers), answers
    assert [sample.finish_reason for sample in samples] == ["stop"] * 2, answers
    for file in (WEIGHTS, "adapter_config.json"):
        one, other = (
            (tmp_path / made / file).read_bytes() for made in ("peft", "again")
        )
        assert one == other, file
