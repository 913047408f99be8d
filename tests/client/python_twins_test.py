"""Tests that weft.client and weft.aio are one interface: the same methods with the
same parameters and descriptions, and with corresponding return types."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Iterator
from types import FunctionType
from typing import NamedTuple

import pytest

import weft
from weft import adapter, aio, aio_adapter, client

TWINS = (
    (weft.Client, weft.AsyncClient),
    (weft.Adapter, weft.AsyncAdapter),
    (adapter.Submit, aio_adapter.AsyncSubmit),
    (client.BaseSubmit, aio.AsyncBaseSubmit),
)
SPECIAL = ("__init__", "__enter__", "__exit__")


class Method(NamedTuple):
    """A method, described in terms of the synchronous class."""

    parameters: list[str]
    returns: str
    is_awaited: bool
    description: str | None


def in_sync_words(text: str) -> str:
    """Replaces AsyncIterator by Iterator, AsyncClient by Client, Task by Future."""
    for theirs, ours in (("Async", ""), ("Task[", "Future["), ("Task", "Thread")):
        text = text.replace(theirs, ours)
    return text


def methods(cls: type, *, is_async: bool) -> dict[str, Method]:
    """Returns the public methods and properties. A synchronous method that waits
    corresponds to a coroutine. __init__, properties and methods that return an
    iterator or a future do not wait."""
    found = {}
    for name, member in vars(cls).items():
        plain = name.replace("__a", "__") if is_async else name
        function = member.fget if isinstance(member, property) else member
        if not isinstance(function, FunctionType):
            continue
        if name.startswith("_") and plain not in SPECIAL:
            continue
        signature = inspect.signature(function)
        returns = in_sync_words(str(signature.return_annotation))
        if is_async:
            is_awaited = inspect.iscoroutinefunction(function)
        else:
            is_awaited = not (
                name == "__init__"
                or isinstance(member, property)
                or returns.startswith(("Iterator[", "Future["))
            )
        parameters = [in_sync_words(str(p)) for p in signature.parameters.values()]
        found[plain] = Method(parameters, returns, is_awaited, function.__doc__)
    return found


def differences(sync: type, asynchronous: type) -> list[str]:
    """Returns a sentence for each method that the twins do not share."""
    ours = methods(sync, is_async=False)
    theirs = methods(asynchronous, is_async=True)
    found = []
    for name in sorted(ours.keys() | theirs.keys()):
        one, other = ours.get(name), theirs.get(name)
        if one is None or other is None:
            found.append(f"{name}: in one class only")
        elif one != other:
            found.append(f"{name}: {one} is not {other}")
        elif name not in SPECIAL and not one.description:
            found.append(f"{name}: no description")
    return found


@pytest.mark.parametrize(("sync", "asynchronous"), TWINS)
def test_the_clients_are_one_interface(sync: type, asynchronous: type) -> None:
    assert len(methods(sync, is_async=False)) >= 3
    assert differences(sync, asynchronous) == []


class Ours:
    def call(self, a: int = 1, *, b: Ours | None = None) -> int:
        """Calls."""
        return a

    def stream(self) -> Iterator[int]:
        """Streams."""
        return iter(())


class AsyncOurs:
    async def call(self, a: int = 1, *, b: AsyncOurs | None = None) -> int:
        """Calls."""
        return a

    def stream(self) -> AsyncIterator[int]:
        """Streams."""
        raise NotImplementedError


async def other_default(self: object, a: int = 2, *, b: Ours | None = None) -> int:
    """Calls."""
    return a


async def other_type(self: object, a: int = 1, *, b: Ours | None = None) -> str:
    """Calls."""
    return ""


async def other_words(self: object, a: int = 1, *, b: Ours | None = None) -> int:
    """This method differs from its twin."""
    return a


def blocking(self: object, a: int = 1, *, b: Ours | None = None) -> int:
    """Calls."""
    return a


def test_equal_twins_have_no_differences() -> None:
    assert differences(Ours, AsyncOurs) == []


@pytest.mark.parametrize("call", [other_default, other_type, other_words, blocking])
def test_finds_each_difference(call: FunctionType) -> None:
    other = type("Other", (), {**vars(AsyncOurs), "call": call})
    found = differences(Ours, other)
    assert len(found) == 1 and found[0].startswith("call: ")


def test_finds_what_is_missing() -> None:
    other = type("Other", (), {"call": AsyncOurs.call})
    assert differences(Ours, other) == ["stream: in one class only"]


def test_finds_what_is_not_described() -> None:
    class Silent:
        def close(self) -> None:
            pass

    class AsyncSilent:
        async def close(self) -> None:
            pass

    assert differences(Silent, AsyncSilent) == ["close: no description"]
