"""Runs the examples with the real daemon and the demo model."""

from __future__ import annotations

import json
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
    ("name", "steps"),
    [("sft", 2), ("dpo", 1), ("distill", 1), ("distill --exact", 1), ("adapters", 4)],
)
def test_an_example_runs(
    name: str,
    steps: int,
    daemon_for: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    daemon = daemon_for(SMOLLM2)
    name, *switches = name.split()
    options = ["--server", daemon.address, "--steps", str(steps), *switches]
    monkeypatch.setattr(sys, "argv", [name, *options])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    printed = capsys.readouterr().out
    found = losses(printed)
    assert len(found) == (4 if name == "adapters" else 1) * steps
    if name == "dpo":
        assert found[0] == pytest.approx(0.693, abs=2e-3)
    elif name == "sft":
        assert found[1] < found[0]
    elif name == "adapters":
        # The fourth batch has the texts of the first one.
        for voice in ("pirate", "gardener", "ship-log", "clerk"):
            first, *_, last = losses(
                "".join(re.findall(rf"^{voice} .*$", printed, re.M))
            )
            assert last < first, printed


def rows(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "log.jsonl").open()]


def test_preferences_are_learnt_from_where_sft_ended(
    daemon_for: Any, tmp_path: Path
) -> None:
    from weft.__main__ import main

    daemon = daemon_for(SMOLLM2)
    base = ["--server", daemon.address, "--batch", "2", "--lr", "2e-3", "--steps", "3"]
    base += ["--model-dir", str(fixtures.model_folder(SMOLLM2)), "--rank", "4"]
    base += ["--eval-fraction", "0.01"]
    chats = ["--data", str(EXAMPLES / "data/dictionary.jsonl")]
    one = ["--adapter", "sft-first", "--output", str(tmp_path / "sft")]
    assert main(["sft", *base, *chats, *one]) == 0
    pairs = ["--data", str(EXAMPLES / "data/preferences.jsonl"), "--init", "sft-first"]
    two = ["--adapter", "dpo-then", "--output", str(tmp_path / "dpo")]
    assert main(["dpo", *base, *pairs, *two]) == 0
    losses = [row["loss"] for row in rows(tmp_path / "dpo") if "loss" in row]
    # The reference is the policy that the adapter starts with.
    assert losses[0] == pytest.approx(0.693147, abs=1e-4)
    assert losses[-1] < 0.5 and rows(tmp_path / "dpo")[-1]["accuracy"] == 1


def test_a_sweep_trains_each_adapter_as_sft_does_alone(
    daemon_for: Any, tmp_path: Path
) -> None:
    from weft.__main__ import main

    daemon = daemon_for(SMOLLM2)
    base = ["--server", daemon.address, "--batch", "2", "--steps", "3"]
    base += ["--data", str(EXAMPLES / "data/dictionary.jsonl")]
    base += ["--model-dir", str(fixtures.model_folder(SMOLLM2))]
    base += ["--eval-fraction", "0.02", "--alpha", "8"]
    many = ["--adapter", "swept", "--output", str(tmp_path / "sweep")]
    many += ["--rank", "2", "4", "--lr", "1e-3", "5e-3"]
    assert main(["sweep", *base, *many]) == 0
    one = ["--adapter", "alone", "--output", str(tmp_path / "sft")]
    assert main(["sft", *base, *one, "--rank", "4", "--lr", "5e-3"]) == 0
    alone = [row["loss"] for row in rows(tmp_path / "sft") if "loss" in row]
    name = "loss/swept-r4-lr0.005-s0"
    swept = [row[name] for row in rows(tmp_path / "sweep")]
    assert swept == pytest.approx(alone, abs=2e-4)
    others = [row["loss/swept-r4-lr0.001-s0"] for row in rows(tmp_path / "sweep")]
    assert others != pytest.approx(alone, abs=2e-3)


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
