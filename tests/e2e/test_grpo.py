"""The GRPO example against the real daemon, with a tiny model."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

EXAMPLES = Path(__file__).resolve().parents[2] / "client" / "python" / "examples"
sys.path.insert(0, str(EXAMPLES))

import grpo  # noqa: E402

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def tokenizer_folder(tmp_path: Path) -> Path:
    """A tokenizer of single bytes: all its ids are in a tiny model's vocabulary."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(alphabet, start=3)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def run_example(
    daemon: Any, tokenizer_folder: Path, output: Path
) -> list[dict[str, Any]]:
    """Two iterations; the lines of the log."""
    code = grpo.main(
        ["--server", daemon.address, "--model", str(tokenizer_folder)]
        + ["--output", str(output), "--iterations", "2", "--prompts", "2"]
        + ["--group", "4", "--max-tokens", "6", "--rank", "4", "--at-once", "1"]
    )
    assert code == 0
    return [json.loads(line) for line in (output / "log.jsonl").open()]


def fifth(reply: str, finished: bool, topic: str) -> float:
    """A reward that replies of noise differ in."""
    return (len(reply) % 5) / 5


def test_writes_log_plot_and_adapter_and_repeats_itself(
    daemon_for: Any,
    tokenizer_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(grpo, "reward", fifth)
    daemon = daemon_for("llama-tied")
    lines = run_example(daemon, tokenizer_folder, tmp_path / "out")
    assert [line["iteration"] for line in lines] == [1, 2]
    for line in lines:
        assert line["groups_used"] > 0 and line["grad_norm"] > 0
        assert 0 < line["reward"] < 1 and line["tokens"] > 0
        # The sampler's log-probabilities are the trainer's.
        assert abs(line["kl"]) < 1e-5
    assert (tmp_path / "out" / "reward.png").read_bytes().startswith(PNG)
    printed = capsys.readouterr().out
    assert printed.count("tokens/s") == 2 and "Mean reward" in printed
    with daemon.client() as client:
        assert client.adapters() == []

    again = run_example(daemon, tokenizer_folder, tmp_path / "again")
    for line in (*lines, *again):
        del line["seconds"]
    assert again == lines
    first, second = (
        (tmp_path / run / "adapter" / "adapter_model.safetensors").read_bytes()
        for run in ("out", "again")
    )
    assert first == second


def test_groups_of_equal_rewards_train_nothing(
    daemon_for: Any, tokenizer_folder: Path, tmp_path: Path
) -> None:
    daemon = daemon_for("llama-tied")
    # Noise never answers the question: every reward is 0.
    lines = run_example(daemon, tokenizer_folder, tmp_path / "out")
    assert [(line["reward"], line["groups_used"]) for line in lines] == [(0, 0)] * 2
    assert all(line["grad_norm"] == 0 for line in lines)
