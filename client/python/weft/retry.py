"""When and how long to wait before a call is repeated. Pure functions."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from weft.errors import ResourceExhausted, Unavailable, WeftError


@dataclass(frozen=True)
class RetryPolicy:
    """Bounded exponential back-off with jitter.

    The default outlasts about 20 seconds without a connection.
    """

    max_attempts: int = 8  # Calls in all; 1 = never repeat.
    initial_delay: float = 0.2  # Seconds before the first repetition.
    multiplier: float = 2.0
    max_delay: float = 5.0  # Seconds.
    jitter: float = 0.2  # Delays vary by this fraction up and down.


NO_RETRY = RetryPolicy(max_attempts=1)


def next_delay(
    policy: RetryPolicy,
    attempt: int,
    error: WeftError,
    remaining: float,
    uniform: Callable[[float, float], float] = random.uniform,
) -> float | None:
    """Seconds to wait after failed attempt number `attempt` (from 1).

    None: give up, because the error does not allow a repetition, the attempts
    are used up or the deadline (`remaining` seconds away) would pass.
    RESOURCE_EXHAUSTED is repeated only where the server says when.
    """
    if attempt >= policy.max_attempts:
        return None
    delay = policy.initial_delay * policy.multiplier ** (attempt - 1)
    delay = min(delay, policy.max_delay)
    delay *= uniform(1 - policy.jitter, 1 + policy.jitter)
    hinted = error.retry_after is not None
    if not (
        isinstance(error, Unavailable)
        or (isinstance(error, ResourceExhausted) and hinted)
    ):
        return None
    delay = max(delay, error.retry_after or 0.0)
    return delay if delay < remaining else None
