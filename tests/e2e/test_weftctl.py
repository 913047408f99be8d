"""Runs weftctl with the real daemon, as an operator would."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import daemon as daemon_module
import numpy as np
import pytest
from models import tiny_model
from safetensors.numpy import load_file
from texts import next_token, random_tokens

VOCAB = 320
WEFTCTL = daemon_module.BUILD_DIR / "client" / "weftctl" / "weftctl"


def weftctl(daemon: Any, *words: str) -> str:
    command = [str(WEFTCTL), *words, "--server", daemon.address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_creates_samples_saves_and_exports(
    daemon_for: Any, unique: Any, tmp_path: Path
) -> None:
    daemon, name = daemon_for("llama-tied"), unique("typed")
    assert "llama" in weftctl(daemon, "info")
    weftctl(daemon, "adapters", "create", name, "--rank", "4")
    with daemon.client() as client:
        adapter = client.adapter(name)
        adapter.forward_backward([next_token(random_tokens(VOCAB, 24, seed=0))])
        adapter.optim_step(learning_rate=2e-2)

    sample = (
        "sample",
        "--adapter",
        name,
        "--prompt-tokens",
        "5,6,7",
        "--max-tokens",
        "6",
    )
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
    assert first == weftctl(daemon, *sample, "--seed", "3", "--checkpoint", "kept")


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


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [str(WEFTCTL), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("kind", ["llama-tied", "llama-untied", "gemma3-wrapped"])
def test_copies_a_models_head_and_nothing_else(kind: str, tmp_path: Path) -> None:
    """The models are stored as one safetensors file or as shards. The copied tensors
    have canonical names, and the safetensors library can read them."""
    source = tiny_model(kind)
    inspected = run("weights", "inspect", str(source), "-o", "json")
    assert inspected.returncode == 0, inspected.stderr
    report = json.loads(inspected.stdout)
    assert report["problems"] == []
    done = run("weights", "head", str(source), "-o", str(tmp_path / "head"))
    assert done.returncode == 0, done.stderr
    copied = load_file(tmp_path / "head" / "model.safetensors")
    tensors: dict[str, np.ndarray] = {}
    for file in source.glob("*.safetensors"):
        tensors |= load_file(file)
    names = ["model.embed_tokens.weight"]
    if not report["tied_embeddings"]:
        names.append("lm_head.weight")
    assert sorted(copied) == sorted(names)
    for name, values in copied.items():
        stem = name.removeprefix("model.")
        (expected,) = [v for n, v in tensors.items() if n.endswith(stem)]
        np.testing.assert_array_equal(values, expected)
    assert report["head_bytes"] == sum(values.nbytes for values in copied.values())
    bytes_read = int(done.stdout.split(" bytes read")[0].split()[-1])
    headers = 1_000_000 * report["num_files"]
    assert bytes_read <= report["head_bytes"] + headers
    config = (tmp_path / "head" / "config.json").read_bytes()
    assert config == (source / "config.json").read_bytes()


def test_says_why_a_model_cannot_be_served(tmp_path: Path) -> None:
    source = tiny_model("llama-tied")
    config = json.loads((source / "config.json").read_text("utf-8"))
    config["quantization_config"] = {"quant_method": "gptq"}
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    (tmp_path / "model.safetensors").symlink_to(source / "model.safetensors")
    done = run("weights", "inspect", str(tmp_path))
    assert done.returncode == 1
    assert "unsupported: " in done.stdout and "quantization_config" in done.stdout
    assert "model.layers.*.mlp.up_proj.weight" in done.stdout


def test_refuses_a_head_that_no_model_has(tmp_path: Path) -> None:
    """The file is sparse, so that it can have the terabytes that its header declares
    for one row."""
    source = tiny_model("llama-tied")
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    size = 1 << 42
    tensor = {"dtype": "F32", "shape": [1, size // 4], "data_offsets": [0, size]}
    header = json.dumps({"model.embed_tokens.weight": tensor}).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)
    done = run("weights", "head", str(tmp_path), "-o", str(tmp_path / "out"))
    assert done.returncode == 1
    assert "'model.embed_tokens.weight' has shape [1, " in done.stderr
    assert not (tmp_path / "out").exists()


def test_inspects_what_is_not_text(tmp_path: Path) -> None:
    folder = os.fsencode(tmp_path) + b"/a\xff\x9b"
    os.mkdir(folder)
    command = [os.fsencode(WEFTCTL), b"weights", b"inspect", folder, b"-o", b"json"]
    done = subprocess.run(command, capture_output=True, timeout=60)
    assert done.returncode == 1
    assert len(json.loads(done.stdout)["problems"]) == 2
