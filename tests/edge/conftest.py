"""The fixtures of the edge's tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
for _folder in ("tests/deploy", "tests/client", "tests/oracle", "client/python"):
    sys.path.insert(0, str(ROOT / _folder))

import generate  # noqa: E402

generate.ensure()

from edge_server import Edge  # noqa: E402


@pytest.fixture(scope="module")
def edge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Edge]:
    """A daemon with the Tinker API and tokens of alice and bob, behind an edge."""
    with Edge(tmp_path_factory.mktemp("edge")).running() as running:
        yield running
