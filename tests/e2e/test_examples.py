"""Runs the examples with the real daemon and the demo model."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import fixtures

ROOT = Path(__file__).resolve().parents[2]
CLIENT = ROOT / "client" / "python"
EXAMPLES = CLIENT / "examples"
SMOLLM2 = fixtures.SHORT_SMOLLM2

sys.path.insert(0, str(EXAMPLES))


def losses(printed: str) -> list[float]:
    return [float(text) for text in re.findall(r"loss ([\d.]+)", printed)]


@pytest.mark.parametrize(
    ("name", "steps"), [("sft", 2), ("dpo", 2), ("distill", 1), ("adapters", 1)]
)
def test_an_example_runs(
    name: str,
    steps: int,
    daemon_for: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    daemon = daemon_for(SMOLLM2)
    options = ["--server", daemon.address, "--steps", str(steps)]
    monkeypatch.setattr(sys, "argv", [name, *options])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    found = losses(capsys.readouterr().out)
    assert len(found) == (3 if name == "adapters" else steps)
    if name == "dpo":
        assert found[0] == pytest.approx(0.693, abs=2e-3)
    elif name == "sft":
        assert found[1] < found[0]


def test_the_verifier_scores_replies_of_the_model(
    daemon_for: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from weft.__main__ import main

    arguments = ["--server", daemon_for(SMOLLM2).address]
    arguments += ["--reward", str(EXAMPLES / "five_words.py"), "--adapter", "words"]
    arguments += ["--data", str(EXAMPLES / "data/topics.jsonl"), "--steps", "1"]
    arguments += ["--prompts", "2", "--samples", "4", "--max-tokens", "12"]
    assert main(["grpo", *arguments, "--output", str(tmp_path)]) == 0
    assert "step 1/1  reward" in capsys.readouterr().out
