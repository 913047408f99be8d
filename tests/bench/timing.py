"""Seconds of calls; without torch, which some peers do not have."""

from __future__ import annotations

import time
from collections.abc import Callable


def once(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def each(call: Callable[[], object], count: int) -> list[float]:
    """Seconds of each of `count` calls, one after the other."""
    return [once(call) for _ in range(count)]
