"""Tests that the parts of a pytest entry have each test once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TESTS = """
import pytest

@pytest.mark.parametrize("kind", ("a", "b", "c"))
def test_one(kind): pass

@pytest.mark.parametrize("kind", ("b", "c", "d"))
@pytest.mark.parametrize("size", (1, 2))
def test_two(size, kind): pass

@pytest.mark.parametrize("group", (("a", 1), ("a", 2)), ids=("1-a", "2-a"))
def test_ranks(group): pass

def test_three(): pass
"""


def collected(file: Path, shard: str) -> subprocess.CompletedProcess[str]:
    command = ["-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    return subprocess.run(
        [sys.executable, *command, "-p", "shards", f"--shard={shard}", str(file)],
        env={"PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
    )


def test_each_test_is_in_one_part_beside_those_of_its_model(tmp_path: Path) -> None:
    file = tmp_path / "test_parts.py"
    file.write_text(TESTS)
    parts = []
    for number in (1, 2, 3):
        done = collected(file, f"{number}/3")
        assert done.returncode == 0, done.stdout + done.stderr
        parts.append([line for line in done.stdout.splitlines() if "::" in line])
    names = [name for part in parts for name in part]
    assert len(names) == len(set(names)) == 3 + 6 + 2 + 1
    models = [{n[-2] for n in part if n.endswith("]")} for part in parts]
    assert sum(map(len, models)) == 4 and set().union(*models) == set("abcd")
