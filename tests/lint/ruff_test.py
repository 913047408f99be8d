"""Tests that Python is formatted, and that ruff finds nothing (.ruff.toml)."""

import subprocess
import sys

from sources import PYTHON_FOLDERS, ROOT


def _ruff(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ruff", *arguments, "--no-cache", "--quiet"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_everything_is_formatted() -> None:
    done = _ruff("format", "--diff", *PYTHON_FOLDERS)
    assert done.returncode == 0, done.stdout + done.stderr


def test_nothing_is_found() -> None:
    done = _ruff("check", "--output-format", "concise", *PYTHON_FOLDERS)
    assert done.returncode == 0, done.stdout + done.stderr
