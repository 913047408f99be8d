"""Finds the project's source files for the lint tests."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
CODE_FOLDERS = ("src", "server", "client", "kernels")
PYTHON_FOLDERS = ("client", "deploy", "tests")
CPP_SUFFIXES = frozenset({".h", ".cc", ".cu", ".cuh"})
SUFFIXES = CPP_SUFFIXES | {".py"}

_INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')


class Include(NamedTuple):
    line: int
    path: str


def files(
    root: Path, folders: tuple[str, ...], suffixes: frozenset[str]
) -> Iterator[Path]:
    """Yields the files below root/folder with one of the suffixes, sorted."""
    for folder in folders:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in suffixes and path.is_file():
                yield path


def includes(path: Path) -> list[Include]:
    """Yields the #include lines of a C++ file."""
    found = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        match = _INCLUDE.match(line)
        if match:
            found.append(Include(number, match.group(2)))
    return found
