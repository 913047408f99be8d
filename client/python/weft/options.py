"""Options of calls: what help() and documentation show of them.

A call takes its options as keywords of a TypedDict. `takes` gives the call a signature
that lists them, so that help(), Tab and the reference show each with its default.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar, get_type_hints

F = TypeVar("F", bound=Callable[..., Any])
_WIDTH = 80


class Option(NamedTuple):
    """The default of an option, and what it does."""

    default: object
    text: str


def _options(options: type) -> Iterator[tuple[str, Any, Option]]:
    """Yields name, type and description of each option of a TypedDict, whose types are
    Annotated with an Option."""
    for name, hint in get_type_hints(options, include_extras=True).items():
        yield name, hint.__origin__, hint.__metadata__[0]


def takes(options: type) -> Callable[[F], F]:
    """Shows the options of a TypedDict in place of the decorated call's `**options`."""

    def decorate(call: F) -> F:
        signature = inspect.signature(call)
        parameters = [
            one
            for one in signature.parameters.values()
            if one.kind is not inspect.Parameter.VAR_KEYWORD
        ]
        lines = [inspect.cleandoc(call.__doc__ or ""), ""]
        for name, kind, (default, text) in _options(options):
            parameters.append(
                inspect.Parameter(
                    name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=default,
                    annotation=kind,
                )
            )
            entry = f"{name}: {text} Default {default!r}."
            lines += textwrap.wrap(entry, _WIDTH, subsequent_indent="    ")
        call.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=parameters
        )
        call.__doc__ = "\n".join(lines)
        return call

    return decorate
