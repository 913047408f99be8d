"""Tests starts, refused starts, and the answers of the command line."""

from __future__ import annotations

import json
import os
import resource
import shutil
import struct
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from daemon import DEVICE, DTYPE, WEFTD, Daemon, running
from models import tiny_model

import weft

START_SECONDS = 60.0
# The most seconds from an error to the end of the process while other tests run. A
# server that polled before its end would take two seconds. test_stop_time has the bound
# for an idle machine.
FAILED_START_SECONDS = 1.7
# CPU time, which does not depend on the machine's load.
HELP_SECONDS = 0.050


def _edit_config(**changes: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "config.json"
        config = json.loads(path.read_text("utf-8"))
        config.update(changes)
        path.write_text(json.dumps(config), "utf-8")

    return edit


def _first_shard(folder: Path) -> Path:
    return sorted(folder.glob("*.safetensors"))[0]


def _truncate(folder: Path) -> None:
    path = _first_shard(folder)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 100)


def _damage_header(folder: Path) -> None:
    with _first_shard(folder).open("r+b") as file:
        file.write(struct.pack("<Q", 2**40))


def _remove_shard(folder: Path) -> None:
    _first_shard(folder).unlink()


def _empty_shard(folder: Path) -> None:
    _first_shard(folder).write_bytes(b"")


def _drop_from_index(folder: Path) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text("utf-8"))
    index["weight_map"].pop("model.norm.weight")
    path.write_text(json.dumps(index), "utf-8")


def _escape_folder(folder: Path) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text("utf-8"))
    index["weight_map"]["model.norm.weight"] = "../model.safetensors"
    path.write_text(json.dumps(index), "utf-8")


def _broken_json(folder: Path) -> None:
    (folder / "config.json").write_text("{", "utf-8")


def _no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


# Each entry has the damage's name, the model, the function that makes the damage, and
# what the error message must name. tests/model_config refuses more fields.
DAMAGES: tuple[tuple[str, str, Callable[[Path], None], str], ...] = (
    ("truncated", "llama-tied", _truncate, "model.safetensors"),
    ("header", "llama-tied", _damage_header, "model.safetensors"),
    ("empty-file", "llama-tied", _empty_shard, "model.safetensors"),
    ("no-weights", "llama-tied", _remove_shard, "safetensors"),
    ("no-shard", "llama-untied", _remove_shard, "model-00001-of"),
    ("not-in-index", "llama-untied", _drop_from_index, "model.norm.weight"),
    ("outside", "llama-untied", _escape_folder, "../model.safetensors"),
    ("json", "llama-tied", _broken_json, "config.json"),
    ("no-config", "llama-tied", _no_config, "config.json"),
    ("architecture", "qwen3", _edit_config(model_type="mamba"), "mamba"),
    ("width", "qwen3", _edit_config(hidden_size=128), "64"),
)


@pytest.mark.parametrize(
    ("kind", "damage", "word"), [d[1:] for d in DAMAGES], ids=[d[0] for d in DAMAGES]
)
def test_a_damaged_model_folder_ends_the_start(
    kind: str, damage: Callable[[Path], None], word: str, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model(kind), folder)
    damage(folder)
    daemon = Daemon(folder, tmp_path / "weftd")
    daemon.launch()
    code = daemon.wait(START_SECONDS)
    ended = time.time()
    log = daemon.log_tail()
    assert 0 < code < 128, log
    assert word in log
    assert ended - daemon.last_log_time() < FAILED_START_SECONDS, log


def test_dummy_weights_need_config_json_alone(tmp_path: Path) -> None:
    """Two daemons with dummy weights agree. A daemon with the real weights differs."""
    source = tiny_model("gemma2")
    folder = tmp_path / "model"
    folder.mkdir()
    shutil.copy(source / "config.json", folder)
    tokens = [3, 1, 4, 1, 5, 9, 2, 6]
    logprobs = []
    for name, model, flags in (
        ("a", folder, ["--load-format", "dummy"]),
        ("b", folder, ["--load-format", "dummy"]),
        ("c", source, []),
    ):
        with (
            running(model, tmp_path / name, *flags) as daemon,
            daemon.client() as client,
        ):
            datum = weft.Datum(tokens, [*tokens[1:], 5])
            logprobs.append(np.asarray(client.forward([datum]).results[0].logprobs))
    assert np.isfinite(logprobs[0]).all()
    np.testing.assert_array_equal(logprobs[0], logprobs[1])
    assert np.abs(logprobs[0] - logprobs[2]).max() > 1e-2


@pytest.mark.parametrize(
    ("flags", "word"),
    (
        (["--checkpoint-dir", ""], "--checkpoint-dir is empty"),
        (["--rank", "3"], "rank"),
        (["--max-adapters", "0"], "max"),
        (["--max-adapters", "many"], "max"),
        (["--dtype", "int8"], "dtype"),
        (["--listen", "not-an-address"], "listen"),
        (["--device", "tpu"], "device"),
    ),
    ids=lambda value: "" if isinstance(value, str) else " ".join(value[:2]),
)
def test_bad_flags_end_the_start(flags: list[str], word: str, tmp_path: Path) -> None:
    daemon = Daemon(tiny_model("llama-tied"), tmp_path / "weftd", *flags)
    daemon.launch()
    assert 0 < daemon.wait(START_SECONDS) < 128
    assert word in daemon.log_tail()


def test_help_is_quick() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([WEFTD, "--help"], capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert b"--model" in done.stdout and b"--checkpoint-dir" in done.stdout
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert seconds < HELP_SECONDS


def _check_config(
    folder: Path, *flags: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Checks settings without the WEFT_ variables of the tests."""
    command = [str(WEFTD), "--check-config", "--model", str(folder), *flags]
    own = {k: v for k, v in os.environ.items() if not k.startswith("WEFT_")}
    env = {**own, **variables}
    return subprocess.run(command, capture_output=True, text=True, env=env)


def test_check_config_checks_what_a_start_checks(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model("llama-untied"), folder)
    cpu = ("--device=cpu", "--checkpoint-dir", str(tmp_path / "checkpoints"))
    done = _check_config(folder, *cpu)
    assert (done.returncode, done.stdout) == (0, "configuration is good\n")
    assert not (tmp_path / "checkpoints").exists()
    done = _check_config(folder, *cpu, WEFT_MAX_RANKS="8")
    assert done.returncode == 2
    assert "WEFT_MAX_RANKS sets no flag of weftd; did you mean" in done.stderr
    service = {"WEFT_PORT": "tcp://weft.example", "WEFT_SERVICE_HOST": "10.0.0.7"}
    assert _check_config(folder, *cpu, **service).returncode == 0
    (tmp_path / "file").touch()
    done = _check_config(folder, *cpu, "--state-dir", str(tmp_path / "file" / "state"))
    assert done.returncode == 1 and "--state-dir=" in done.stderr
    done = _check_config(folder, *cpu, "--auth-tokens-file", str(tmp_path / "none"))
    assert done.returncode == 1 and "--auth-tokens-file" in done.stderr
    _drop_from_index(folder)
    done = _check_config(folder, *cpu)
    assert done.returncode == 1 and "model.norm.weight" in done.stderr


@pytest.mark.parametrize(("policy", "spins"), ((None, 20000), ("passive", 0)))
def test_a_policy_of_the_operator_says_how_threads_wait(
    policy: str | None, spins: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    variables = {"OMP_WAIT_POLICY": policy} if policy else {}
    done = _check_config(
        tiny_model("llama-tied"), "--device=cpu", OMP_DISPLAY_ENV="verbose", **variables
    )
    assert f"GOMP_SPINCOUNT = '{spins}'" in done.stderr


def test_check_config_tells_the_memory_of_a_device_that_is_not_there(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model("llama-untied"), folder)
    gibibytes = ("--device-memory-bytes", str(4 * 2**30))
    done = _check_config(folder, *gibibytes)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["part", "bytes", "GiB", "limited", "by", "for"]
    assert lines[-1] == "configuration is good"
    rows = {line[:15].strip(): line[15:].split() for line in lines[1:-1]}
    assert {"model", "activations", "keys and values", "adapters"} <= rows.keys()
    total = int(rows.pop("all")[0])
    assert sum(int(row[0]) for row in rows.values()) == total
    assert total <= 0.9 * 4 * 2**30
    # Each of these makes a start fail: too little memory, wrong flags, and a
    # damaged folder.
    done = _check_config(folder, "--device-memory-bytes", str(2**29))
    assert (done.returncode, done.stdout) == (1, "")
    assert "--max-rank" in done.stderr and "--max-context" in done.stderr
    done = _check_config(folder, *gibibytes, "--tensor-parallel-size", "64")
    assert done.returncode == 2 and "--tensor-parallel-size" in done.stderr
    done = _check_config(folder, *gibibytes, "--device", "cpu")
    assert done.returncode == 2 and "--device=cpu" in done.stderr
    _drop_from_index(folder)
    done = _check_config(folder, *gibibytes)
    assert done.returncode == 1 and "model.norm.weight" in done.stderr


def test_version_is_told(daemon_for: Any) -> None:
    command = [str(WEFTD), "--version"]
    done = subprocess.run(command, capture_output=True, check=True)
    with daemon_for("llama-tied").client() as client:
        assert client.info().version.encode() in done.stdout


def test_info_describes_the_model(daemon_for: Any) -> None:
    with daemon_for("qwen3").client() as client:
        assert client.healthy()
        info = client.info()
    assert (info.device, info.model.dtype) == (DEVICE, DTYPE)
    assert info.model.architecture == "qwen3"
    assert info.model.num_layers == 3
    assert info.model.vocab_size == 320
    assert info.model.context_length == 512
    assert list(info.model.eos_token_ids) == [2]
    # Counts embeddings and head, and per layer q, o, k, v, two head norms, MLP
    # and two norms.
    layer = 2 * 64 * 128 + 2 * 64 * 64 + 2 * 32 + 3 * 64 * 96 + 2 * 64
    assert info.model.num_parameters == 2 * 320 * 64 + 3 * layer + 64
