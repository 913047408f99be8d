"""Tests that strict mypy finds nothing in client, deploy and tests (.mypy.ini)."""

import subprocess
import sys
from pathlib import Path

import pytest
from sources import PYTHON_FOLDERS, ROOT, files

sys.path.insert(0, str(ROOT / "client" / "python"))
import generate

# Folders that setuptools and protoc leave in the tree.
GENERATED = ("build", "_proto")


def _folders() -> list[str]:
    found = {
        str(path.parent.relative_to(ROOT))
        for path in files(ROOT, PYTHON_FOLDERS, frozenset({".py"}))
        if not set(GENERATED) & set(path.relative_to(ROOT).parts)
    }
    return sorted(found)


def _mypy(*paths: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mypy", *map(str, paths)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.fixture(scope="module", autouse=True)
def stubs() -> None:
    generate.ensure_stubs()


@pytest.mark.parametrize("folder", _folders())
def test_a_folder_is_typed(folder: str) -> None:
    done = _mypy(*sorted((ROOT / folder).glob("*.py")))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("def f(x):\n    return x\n", "no-untyped-def"),
        ("x: int = 'a'\n", "assignment"),
        ("import weft\n\nweft.Client('').sample([1]).tokens\n", "attr-defined"),
        ("import weft\n\nweft.Client('').sample([1], max_token=1)\n", "call-arg"),
        (
            "from weft._proto import server_pb2\n\nserver_pb2.DrainRequest(x=1)\n",
            "call-arg",
        ),
    ],
)
def test_finds_each_offence(tmp_path: Path, text: str, code: str) -> None:
    path = tmp_path / "a.py"
    path.write_text(text)
    done = _mypy(path)
    assert done.returncode == 1 and f"[{code}]" in done.stdout, done.stdout
