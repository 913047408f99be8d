"""Tests that the environment chooses the device of the oracle and end-to-end tests,
and that tests which need more are skipped with the reason."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
# Shows one device, whatever the machine has.
NVIDIA_SMI = '#!/bin/sh\n[ "$1" = -L ] && echo "GPU 0: NVIDIA H100 (UUID: GPU-1)"\n'


def run(
    folder: Path, *words: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs Python with these variables, in `folder`, on a machine with one device."""
    tool = folder / "nvidia-smi"
    tool.write_text(NVIDIA_SMI, "utf-8")
    tool.chmod(0o755)
    path = {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(HERE)}
    return subprocess.run(
        [sys.executable, *words],
        env={**os.environ, **path, **variables},
        cwd=folder,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [
        ({}, "--device cpu --dtype f32"),
        ({"WEFT_TEST_DTYPE": "bf16"}, "--device cpu --dtype bf16"),
        ({"WEFT_TEST_DEVICE": "cuda"}, "--device cuda --dtype f32"),
        (
            {"WEFT_TEST_DEVICE": "cuda", "WEFT_TEST_DTYPE": "bf16"},
            "--device cuda --dtype bf16",
        ),
    ],
)
def test_every_daemon_gets_the_device(
    variables: dict[str, str], wanted: str, tmp_path: Path
) -> None:
    weftd = tmp_path / "server" / "weftd"
    weftd.parent.mkdir()
    weftd.write_text('#!/bin/sh\necho "$@" TF32=$NVIDIA_TF32_OVERRIDE\n', "utf-8")
    weftd.chmod(0o755)
    program = (
        "import daemon, pathlib;"
        "d = daemon.Daemon(pathlib.Path('m'), pathlib.Path('weftd-log'));"
        "d.launch(); d.wait(); print(d.log_tail(), daemon.num_devices())"
    )
    variables = {**variables, "WEFT_BUILD_DIR": str(tmp_path)}
    done = run(tmp_path, "-c", program, **variables)
    assert wanted in done.stdout, done.stderr
    assert done.stdout.endswith(" TF32=0 1\n")


def test_an_unknown_device_is_refused(tmp_path: Path) -> None:
    for variables in ({"WEFT_TEST_DEVICE": "gpu"}, {"WEFT_TEST_DTYPE": "f16"}):
        done = run(tmp_path, "-c", "import daemon", **variables)
        assert done.returncode == 1
        assert "must be cpu or cuda, and f32 or bf16" in done.stderr


def test_a_rank_without_a_device_is_a_skip_with_its_reason(tmp_path: Path) -> None:
    words = ("-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider")
    wanted = ("-k", "losses and llama-tied")
    done = run(
        tmp_path, *words, f"{HERE}/test_parallel.py", *wanted, WEFT_TEST_DEVICE="cuda"
    )
    assert done.returncode == 0, done.stdout
    assert "4 ranks need as many CUDA devices; there are 1" in done.stdout
    assert "4 skipped" in done.stdout


def test_bounds_of_f32_are_not_held_against_bf16(tmp_path: Path) -> None:
    words = ("-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider")
    bf16 = {"WEFT_TEST_DEVICE": "cuda", "WEFT_TEST_DTYPE": "bf16"}
    done = run(tmp_path, *words, f"{HERE}/test_training.py", **bf16)
    assert done.returncode == 0, done.stdout
    assert "its bounds are those of f32" in done.stdout
    collected = run(tmp_path, *words[:3], "--collect-only", "-m", "bf16", str(HERE))
    for name in ("test_base_logprobs", "test_adapters_mixed", "test_three_ranks"):
        assert name in collected.stdout
