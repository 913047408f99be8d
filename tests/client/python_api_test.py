"""Tests that all public names have a description and types without Any, and that one
page lists all of them."""

from __future__ import annotations

import inspect
import subprocess
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy.typing as npt
import pytest
from conftest import CLIENT

import weft
import weft.data
import weft.recipes

MODULES = (weft, weft.data, weft.recipes)


class Public(NamedTuple):
    """A public class, function or method, with its full name."""

    name: str
    thing: Any


def members(name: str, cls: type) -> Iterator[Public]:
    """Returns the public methods and properties of a class and of its bases in
    weft."""
    for base in cls.__mro__:
        if not base.__module__.startswith("weft"):
            continue
        for key, member in vars(base).items():
            if key.startswith("_") and key not in ("__init__", "__call__", "__iter__"):
                continue
            function = member.fget if isinstance(member, property) else member
            function = getattr(function, "__func__", function)
            if isinstance(function, types.FunctionType):
                yield Public(f"{name}.{key}", function)


def public() -> Iterator[Public]:
    for module in MODULES:
        for key in module.__all__:
            thing = getattr(module, key)
            name = f"{module.__name__}.{key}"
            if inspect.isclass(thing):
                yield Public(name, thing)
                yield from members(name, thing)
            elif inspect.isfunction(thing):
                yield Public(name, thing)


def mentions_any(hint: Any) -> bool:
    """Returns whether a type is Any, or contains it."""
    if hint is Any:
        return True
    if hint in typing.get_args(npt.ArrayLike):  # numpy's own type, of any dtype.
        return False
    if isinstance(hint, list):  # Parameters of a Callable.
        return any(map(mentions_any, hint))
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is typing.Literal:
        return False
    # numpy's own array types leave their shape open.
    name = getattr(typing.get_origin(hint), "__name__", "")
    return name not in ("ndarray", "_Buffer") and any(map(mentions_any, arguments))


def hints(function: Any) -> dict[str, Any]:
    """Returns the types of the parameters. Replaces types that weft imports only under
    TYPE_CHECKING by `object`."""
    unknown = {"torch": types.SimpleNamespace(Tensor=object), "Tokenizer": object}
    return typing.get_type_hints(function, localns=unknown)


@pytest.mark.parametrize("one", list(public()), ids=lambda one: one.name)
def test_it_is_described_and_typed(one: Public) -> None:
    dunder = one.name.rpartition(".")[2].startswith("__")
    if not dunder or "__call__" in one.name or "__iter__" in one.name:
        text = one.thing.__doc__
        assert text and not text.startswith(f"{one.thing.__name__}("), "no description"
    if isinstance(one.thing, types.FunctionType):
        found = {k for k, hint in hints(one.thing).items() if mentions_any(hint)}
        assert not found, f"Any in {found}"


def test_finds_any_within_a_type() -> None:
    assert mentions_any(dict[str, list[Any]]) and mentions_any(Any | None)
    assert mentions_any(typing.Callable[[Any], int])
    assert not mentions_any(typing.Callable[[int], str])
    assert not mentions_any(weft.types.FloatArray)


def test_the_reference_is_one_page_with_every_name(tmp_path: Path) -> None:
    page = tmp_path / "reference.html"
    subprocess.run(
        [sys.executable, str(CLIENT / "api_reference.py"), str(page)], check=True
    )
    assert [path.name for path in tmp_path.iterdir()] == ["reference.html"]
    text = page.read_text("utf-8")
    for one in public():
        name = one.name.rpartition(".")[2]
        if not name.startswith("__"):
            assert f">{name}<" in text, one.name


OPTIONS = {
    "create_adapter": weft.AdapterOptions,
    "get_or_create": weft.AdapterOptions,
    "sample": weft.SampleOptions,
    "sample_many": weft.SampleOptions,
    "sample_stream": weft.SampleOptions,
    "forward_backward": weft.LossOptions,
    "forward": weft.LossOptions,
    "score": weft.LossOptions,
    "optim_step": weft.OptimOptions,
    "save": weft.SaveOptions,
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_are_keywords_with_defaults_and_descriptions(name: str) -> None:
    for cls in (weft.Adapter, weft.AsyncAdapter, weft.Client, weft.AsyncClient):
        call = getattr(cls, name, None)
        if call is None:
            continue
        parameters = inspect.signature(call).parameters
        for option in typing.get_type_hints(OPTIONS[name]):
            assert parameters[option].kind is inspect.Parameter.KEYWORD_ONLY
            assert parameters[option].default is not inspect.Parameter.empty
            assert f"\n{option}: " in call.__doc__, option
        assert "options" not in parameters


def test_clients_and_adapters_name_themselves() -> None:
    with weft.Client("127.0.0.1:1") as client:
        assert repr(client) == "Client('127.0.0.1:1')"
    assert repr(weft.AsyncClient("[::1]:2")) == "AsyncClient('[::1]:2')"
