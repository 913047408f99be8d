"""Fixtures of the Python client's tests. Stubs are generated when missing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CLIENT = Path(__file__).resolve().parents[2] / "client" / "python"
sys.path.insert(0, str(CLIENT))

import generate  # noqa: E402

generate.ensure_stubs()

from fake_weftd import FakeWeftd  # noqa: E402

import weft  # noqa: E402
from weft import methods  # noqa: E402

FAST = weft.RetryPolicy(max_attempts=4, initial_delay=0.01, max_delay=0.05)


@pytest.fixture
def server() -> Iterator[FakeWeftd]:
    with FakeWeftd() as fake:
        yield fake


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The messages that clients made from now on send, as they are serialized."""
    messages: list[Any] = []

    def bind(method: methods.Method[Any, Any], channel: Any) -> Any:
        def serialize(request: Any) -> bytes:
            messages.append(request)
            data: bytes = request.SerializeToString()
            return data

        return getattr(channel, method.arity.value)(
            method.path,
            request_serializer=serialize,
            response_deserializer=method.response_type.FromString,
        )

    monkeypatch.setattr(methods.Method, "bind", bind)
    return messages


@pytest.fixture
def client(server: FakeWeftd) -> Iterator[weft.Client]:
    with weft.Client(server.target, timeout=20.0, retry=FAST) as made:
        yield made
