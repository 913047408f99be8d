"""Where chat templates run, which may come from a server that nobody trusts."""

from __future__ import annotations

import sys
import time
from collections.abc import Sized
from types import FrameType
from typing import TYPE_CHECKING

from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

if TYPE_CHECKING:
    from _typeshed import TraceFunction

SECONDS = 10.0
MAX_REPEATED = 1 << 20


class Deadline:
    """Ends a template's code that runs in this thread for longer than SECONDS, while
    the object is entered. Other code runs at full speed."""

    def __enter__(self) -> None:
        self._before = sys.gettrace()
        self._end = time.monotonic() + SECONDS
        sys.settrace(self._trace)

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _trace(
        self, frame: FrameType, _event: str, _arg: object
    ) -> TraceFunction | None:
        if time.monotonic() > self._end:
            raise SecurityError(f"runs for more than {SECONDS:.0f} s")
        return self._trace if frame.f_code.co_filename == "<template>" else None


class Sandbox(ImmutableSandboxedEnvironment):
    """Refuses texts and lists that a template makes much longer by a number."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(
        self, context: Context, operator: str, left: object, right: object
    ) -> object:
        numbers = [v for v in (left, right) if isinstance(v, int | float)]
        lengths = [len(v) for v in (left, right) if isinstance(v, Sized)]
        if operator == "**" or any(abs(number) > 1 << 64 for number in numbers):
            raise SecurityError("computes powers, or very large numbers")
        if lengths and numbers and lengths[0] * numbers[0] > MAX_REPEATED:
            raise SecurityError(f"repeats more than {MAX_REPEATED} items")
        return super().call_binop(context, operator, left, right)
