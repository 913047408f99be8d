"""Options of calls: what help() and documentation show of them.

A call takes its options as keywords of a TypedDict, whose docstring has an entry for
each: `name: what it does. Default VALUE.` `takes` gives the call a signature that lists
them, so that help(), Tab and the reference show each with its default.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable
from typing import Any, TypeVar, get_type_hints

F = TypeVar("F", bound=Callable[..., Any])
# An option's entry; its further lines are indented.
_ENTRY = re.compile(r"^(\w+): .*(?:\n    .*)*?\s+Default\s+(.+)\.$", re.MULTILINE)


def takes(options: type) -> Callable[[F], F]:
    """Shows the options of a TypedDict in place of the decorated call's `**options`."""
    # With -OO there are no docstrings.
    _, gap, entries = inspect.cleandoc(options.__doc__ or "").partition("\n\n")
    defaults = {name: ast.literal_eval(text) for name, text in _ENTRY.findall(entries)}

    def decorate(call: F) -> F:
        signature = inspect.signature(call)
        parameters = [
            one
            for one in signature.parameters.values()
            if one.kind is not inspect.Parameter.VAR_KEYWORD
        ]
        parameters += [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=defaults.get(name, inspect.Parameter.empty),
                annotation=kind,
            )
            for name, kind in get_type_hints(options).items()
        ]
        call.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=parameters
        )
        call.__doc__ = inspect.cleandoc(call.__doc__ or "") + gap + entries
        return call

    return decorate
