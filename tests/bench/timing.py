"""Measures the seconds of calls. It does not import torch, because some peers do
not have it."""

from __future__ import annotations

import time
from collections.abc import Callable


def once(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def each(call: Callable[[], object], count: int) -> list[float]:
    """Returns the seconds of each of `count` calls, made one after another."""
    return [once(call) for _ in range(count)]
