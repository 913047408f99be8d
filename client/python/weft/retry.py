"""When and how long to wait before a call is repeated. Pure functions."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from weft.errors import ResourceExhausted, Unavailable, WeftError


@dataclass(frozen=True)
class RetryPolicy:
    """Bounded exponential back-off with jitter.

    The default outlasts about 20 seconds without a connection. Where a server
    that is full says when to come again, only the deadline bounds the attempts.
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
    RESOURCE_EXHAUSTED is repeated only where the server says when, and then
    however often: it is the server that sets the pace.
    """
    paced = isinstance(error, ResourceExhausted) and error.retry_after is not None
    if policy.max_attempts <= 1 or not (paced or isinstance(error, Unavailable)):
        return None
    if attempt >= policy.max_attempts and not paced:
        return None
    # Attempts without end must not overflow.
    delay = policy.initial_delay * policy.multiplier ** min(attempt - 1, 60)
    delay = min(delay, policy.max_delay)
    delay *= uniform(1 - policy.jitter, 1 + policy.jitter)
    delay = max(delay, error.retry_after or 0.0)
    return delay if delay < remaining else None
