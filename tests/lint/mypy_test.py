"""Tests that strict mypy finds nothing in client, deploy and tests (.mypy.ini)."""

import contextlib
import fcntl
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from checked_once import cache_folder
from mypy import api
from sources import PYTHON_FOLDERS, ROOT, files

sys.path.insert(0, str(ROOT / "client" / "python"))
import generate

# Folders that setuptools and protoc leave in the tree.
GENERATED = ("build", "_proto")
# mypy's results for each module, which all clones share. mypy recognizes an unchanged
# file by its path and time, and a file in another clone by its text.
CACHE = cache_folder("mypy")


def _folders() -> list[str]:
    found = {
        str(path.parent.relative_to(ROOT))
        for path in files(ROOT, PYTHON_FOLDERS, frozenset({".py"}))
        if not set(GENERATED) & set(path.relative_to(ROOT).parts)
    }
    return sorted(found)


def _mypy(*paths: Path) -> tuple[str, int]:
    """Returns mypy's output and exit status. mypy runs in this process, because half
    of its time with a full cache goes to its start."""
    with contextlib.chdir(ROOT):
        output, errors, status = api.run(["--cache-dir", str(CACHE), *map(str, paths)])
    return output + errors, status


@pytest.fixture(scope="module", autouse=True)
def cache() -> Iterator[None]:
    """Locks the cache, so that runs in other clones wait."""
    generate.ensure()
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.mark.parametrize("folder", _folders())
def test_a_folder_is_typed(folder: str) -> None:
    output, status = _mypy(*sorted((ROOT / folder).glob("*.py")))
    assert status == 0, output


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("def f(x):\n    return x\n", "no-untyped-def"),
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
    output, status = _mypy(path)
    assert status == 1 and f"[{code}]" in output, output
