"""Decides when a failed call is repeated. Pure functions."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from weft.errors import ResourceExhausted, Unavailable, WeftError
from weft.route import MOVED


@dataclass(frozen=True)
class RetryPolicy:
    """Bounded exponential back-off with jitter.

    Retries continue until the call's deadline, so that a run outlives a restart of the
    server's machine. A client that never had an answer from the server gives up within
    3 seconds.
    """

    # Consecutive attempts without a server's hint; None: no limit; 1: no retry.
    max_attempts: int | None = None
    initial_delay: float = 0.2  # Seconds before the first repetition.
    multiplier: float = 2.0
    max_delay: float = 5.0  # Seconds.
    jitter: float = 0.2  # Delays vary by this fraction, up and down.

    def time_left(self, attempt: int, error: WeftError, remaining: float) -> float:
        """Returns for how many seconds a failed call is repeated at most. attempt,
        error, remaining: as in next_delay."""
        if error.retry_after is not None or self.max_attempts is None:
            return remaining
        powers = range(attempt - 1, self.max_attempts - 1)
        delays = (self.initial_delay * self.multiplier**power for power in powers)
        most = sum(min(delay, self.max_delay) for delay in delays)
        return min(most * (1 + self.jitter), remaining)


NO_RETRY = RetryPolicy(max_attempts=1)


def next_delay(
    policy: RetryPolicy,
    attempt: int,
    error: WeftError,
    remaining: float,
    uniform: Callable[[float, float], float] = random.uniform,
) -> float | None:
    """Returns the seconds to wait after a failed call, or None to give up.

    attempt: the number of consecutive calls that failed without a retry hint from the
    server, including this call. None means that the error or the server allows no
    retry, that the attempts are used up, or that the wait would take `remaining`
    seconds or more. After RESOURCE_EXHAUSTED a call is retried only with a hint. With a
    hint the number of attempts has no limit, because the server sets the pace.
    """
    if policy.max_attempts == 1 or not error.repeatable:
        return None
    hint = error.retry_after
    if isinstance(error, (Unavailable, ResourceExhausted)) and hint is not None:
        # The jitter spreads the retries of many refused clients. It only adds time, so
        # that no client retries earlier than the hint says.
        delay = max(hint, policy.initial_delay) * uniform(1, 1 + policy.jitter)
    elif (isinstance(error, Unavailable) or error.reason == MOVED) and (
        policy.max_attempts is None or attempt < policy.max_attempts
    ):
        delay = policy.initial_delay
        for _ in range(attempt - 1):
            if delay >= policy.max_delay:
                break
            delay *= policy.multiplier
        delay = min(delay, policy.max_delay)
        delay *= uniform(1 - policy.jitter, 1 + policy.jitter)
    else:
        return None
    return delay if delay < remaining else None
