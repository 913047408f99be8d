"""Tests that the environment chooses the device and dtype of the oracle and
end-to-end tests. Also tests that a test which needs more devices, or has no bounds
for bf16, is skipped with the reason."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import daemon
import pytest

HERE = Path(__file__).resolve().parent
# A fake nvidia-smi that lists one GPU, whatever the machine has.
NVIDIA_SMI = '#!/bin/sh\n[ "$1" = -L ] && echo "GPU 0: NVIDIA H100 (UUID: GPU-1)"\n'


@pytest.fixture(autouse=True)
def one_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(NVIDIA_SMI, "utf-8")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


def run(
    folder: Path, program: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Runs a Python program with these variables, in `folder`."""
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(HERE), **variables},
        cwd=folder,
        capture_output=True,
        text=True,
    )


def printed_by_pytest(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Runs pytest inside this process, which has imported transformers already.
    Returns what it prints."""
    capsys.readouterr()
    options = ("-q", "-rs", "--capture=no", "-p", "no:cacheprovider")
    code = pytest.main([*options, *words])
    printed = capsys.readouterr().out
    assert code == 0, printed
    return printed


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
    done = run(tmp_path, program, **variables)
    assert wanted in done.stdout, done.stderr
    assert done.stdout.endswith(" TF32=0 1\n")


def test_an_unknown_device_is_refused(tmp_path: Path) -> None:
    for variables in ({"WEFT_TEST_DEVICE": "gpu"}, {"WEFT_TEST_DTYPE": "f16"}):
        done = run(tmp_path, "import daemon", **variables)
        assert done.returncode == 1
        assert "must be cpu or cuda, and f32 or bf16" in done.stderr


def test_a_rank_without_a_device_is_a_skip_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(daemon, "DEVICE", "cuda")
    wanted = ("-k", "losses and llama-tied")
    printed = printed_by_pytest(capsys, f"{HERE}/test_parallel.py", *wanted)
    assert "4 ranks need as many CUDA devices; there are 1" in printed
    assert "4 skipped" in printed


def test_bounds_of_f32_are_not_held_against_bf16(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # These modules copy daemon.DTYPE when they are imported, so pytest collects them
    # before the test changes it.
    files = [f"{HERE}/test_{name}.py" for name in ("logprobs", "gradients")]
    collected = printed_by_pytest(capsys, "--collect-only", "-m", "bf16", *files)
    for name in ("test_base_logprobs", "test_three_ranks", "test_shared_prompts"):
        assert name in collected
    assert "test_soft_targets" not in collected
    monkeypatch.setattr(daemon, "DTYPE", "bf16")
    printed = printed_by_pytest(capsys, f"{HERE}/test_training.py")
    assert "its bounds are those of f32" in printed
    assert "passed" not in printed
