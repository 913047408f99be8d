"""When and how long to wait before a call is repeated. Pure functions."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from weft.errors import ResourceExhausted, Unavailable, WeftError


@dataclass(frozen=True)
class RetryPolicy:
    """Bounded exponential back-off with jitter.

    The default outlasts about 20 seconds without a connection. Where the server
    says when to come again, the call does so until its deadline.
    """

    max_attempts: int = 8  # Calls in a row without a hint; 1 = never repeat.
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
    """Seconds to wait after a call failed; `attempt`: how many in a row have, this
    one included, without a hint of the server.

    None: give up, because the error does not allow a repetition, the attempts
    are used up or the deadline (`remaining` seconds away) would pass.
    RESOURCE_EXHAUSTED is repeated only where the server says when, and then
    however often: it is the server that sets the pace.
    """
    if policy.max_attempts == 1:
        return None
    hint = error.retry_after
    if isinstance(error, (Unavailable, ResourceExhausted)) and hint is not None:
        # Later by the jitter, so that many who were refused do not come at once.
        delay = max(hint, policy.initial_delay) * uniform(1, 1 + policy.jitter)
    elif isinstance(error, Unavailable) and attempt < policy.max_attempts:
        delay = policy.initial_delay * policy.multiplier ** (attempt - 1)
        delay = min(delay, policy.max_delay)
        delay *= uniform(1 - policy.jitter, 1 + policy.jitter)
    else:
        return None
    return delay if delay < remaining else None
