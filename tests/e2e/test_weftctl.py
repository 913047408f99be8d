"""weftctl against the real daemon: what an operator types."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import daemon as daemon_module
from texts import random_tokens

VOCAB = 320
WEFTCTL = daemon_module.BUILD_DIR / "client" / "weftctl" / "weftctl"


def weftctl(daemon: Any, *words: str) -> str:
    command = [str(WEFTCTL), *words, "--server", daemon.address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_trains_samples_saves_and_exports(
    daemon_for: Any, unique: Any, tmp_path: Path
) -> None:
    daemon, name = daemon_for("llama-tied"), unique("typed")
    assert "llama" in weftctl(daemon, "info")
    data = tmp_path / "data.jsonl"
    rows = [[int(t) for t in random_tokens(VOCAB, 24, seed)] for seed in range(4)]
    data.write_text("".join(json.dumps({"tokens": row}) + "\n" for row in rows))
    flags = ("--steps", "12", "--batch", "4", "--rank", "4", "--lr", "2e-2", "-o", "json")
    lines = weftctl(daemon, "train", name, "--data", str(data), *flags).splitlines()
    losses = [json.loads(line)["loss_per_token"] for line in lines]
    assert len(losses) == 12 and losses[-1] < losses[0]

    sample = ("sample", "--adapter", name, "--prompt-tokens", "5,6,7", "--max-tokens", "6")
    first = weftctl(daemon, *sample, "--seed", "3")
    assert first == weftctl(daemon, *sample, "--seed", "3")
    assert 1 <= len(first.strip().split(",")) <= 6

    weftctl(daemon, "checkpoints", "save", name, "kept")
    assert "kept" in weftctl(daemon, "checkpoints", "list", name)
    weftctl(daemon, "export", name, str(tmp_path / "peft"))
    assert (tmp_path / "peft" / "adapter_model.safetensors").stat().st_size > 0
    assert name in weftctl(daemon, "adapters", "list")
    weftctl(daemon, "adapters", "delete", name)
    assert name not in weftctl(daemon, "adapters", "list")


def test_tells_a_refusal_from_a_wrong_command(daemon_for: Any) -> None:
    daemon = daemon_for("llama-tied")
    for words, code in (
        (("adapters", "get", "nobody"), 1),
        (("adapters", "got"), 2),
        (("sample", "--prompt-tokens", "x"), 2),
    ):
        command = [str(WEFTCTL), *words, "--server", daemon.address]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == code, (words, done.returncode, done.stderr)
        assert done.stderr
