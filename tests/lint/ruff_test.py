"""Tests that Python is formatted, and that ruff finds nothing (.ruff.toml)."""

import subprocess
import sys

import pytest
from sources import PYTHON_FOLDERS, ROOT


def _ruff(*arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ruff", *arguments, "--no-cache", "--quiet"]
    return subprocess.run(command, cwd=ROOT, input=text, capture_output=True, text=True)


def test_everything_is_formatted() -> None:
    done = _ruff("format", "--diff", *PYTHON_FOLDERS)
    assert done.returncode == 0, done.stdout + done.stderr


def test_nothing_is_found() -> None:
    done = _ruff("check", "--output-format", "concise", *PYTHON_FOLDERS)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("path", "text", "code"),
    [
        ("client/python/weft/a.py", "import os\n", "F401"),
        (
            "client/python/weft/a.py",
            "from typing import Any\n\n\ndef f(x: Any) -> None: ...\n",
            "ANN401",
        ),
    ],
)
def test_finds_each_offence(path: str, text: str, code: str) -> None:
    done = _ruff(
        "check", "--output-format", "concise", "--stdin-filename", path, text=text
    )
    assert done.returncode == 1 and code in done.stdout, done.stdout + done.stderr
