"""Fixtures of the Python client's tests. Stubs are generated when missing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

CLIENT = Path(__file__).resolve().parents[2] / "client" / "python"
sys.path.insert(0, str(CLIENT))

import generate  # noqa: E402

generate.ensure_stubs()

from fake_server import FakeServer  # noqa: E402

import weft  # noqa: E402

FAST = weft.RetryPolicy(max_attempts=4, initial_delay=0.01, max_delay=0.05)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as fake:
        yield fake


@pytest.fixture
def client(server: FakeServer) -> Iterator[weft.Client]:
    with weft.Client(server.target, timeout=20.0, retry=FAST) as made:
        yield made
