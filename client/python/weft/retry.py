"""Decides when a failed call is repeated. Pure functions."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from weft.errors import ResourceExhausted, Unavailable, WeftError


@dataclass(frozen=True)
class RetryPolicy:
    """Bounded exponential back-off with jitter.

    The default delays add up to about 16 seconds, which outlasts a short restart of
    the server. If the server says when to come again, repetitions go on until the
    call's deadline.
    """

    max_attempts: int = 8  # Consecutive calls without a hint; 1: never repeat.
    initial_delay: float = 0.2  # Seconds before the first repetition.
    multiplier: float = 2.0
    max_delay: float = 5.0  # Seconds.
    jitter: float = 0.2  # Delays vary by this fraction, up and down.


NO_RETRY = RetryPolicy(max_attempts=1)


def next_delay(
    policy: RetryPolicy,
    attempt: int,
    error: WeftError,
    remaining: float,
    uniform: Callable[[float, float], float] = random.uniform,
) -> float | None:
    """Returns the seconds to wait after a failed call, or None to give up.

    attempt: the number of consecutive calls that failed without a hint of the
    server, including this one. None means that the error or the server allows no
    repetition, that the attempts are used up, or that the wait would take `remaining`
    seconds or more. RESOURCE_EXHAUSTED is repeated only with a hint, and then without
    a limit of attempts, because the server sets the pace.
    """
    if policy.max_attempts == 1 or not error.repeatable:
        return None
    hint = error.retry_after
    if isinstance(error, (Unavailable, ResourceExhausted)) and hint is not None:
        # The jitter only adds time, so that many refused clients do not come back at
        # once, and none before the hint.
        delay = max(hint, policy.initial_delay) * uniform(1, 1 + policy.jitter)
    elif isinstance(error, Unavailable) and attempt < policy.max_attempts:
        delay = policy.initial_delay * policy.multiplier ** (attempt - 1)
        delay = min(delay, policy.max_delay)
        delay *= uniform(1 - policy.jitter, 1 + policy.jitter)
    else:
        return None
    return delay if delay < remaining else None
