"""Computes the learning rate of each step."""

from __future__ import annotations

import math

from weft.errors import InvalidArgument

SCHEDULES = ("constant", "cosine", "linear")


def warn_of_warmup(warmup: int, total: int) -> None:
    """Says that the rate does not become full within `total` steps."""
    if warmup > total:
        print(f"--warmup {warmup}: of {total} steps, none has the full rate of --lr")


def learning_rate(
    step: int, total: int, peak: float, *, schedule: str = "constant", warmup: int = 0
) -> float:
    """Returns the learning rate of step `step` of `total`, counted from 0.

    The rate rises linearly to `peak` over the first `warmup` steps. Then it stays
    ("constant"), or falls along half a cosine ("cosine") or a line ("linear") and
    reaches 0 after the last step. Raises InvalidArgument for another schedule.
    """
    if schedule not in SCHEDULES:
        raise InvalidArgument(f"schedule {schedule!r}: one of {', '.join(SCHEDULES)}")
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(total - warmup, 1)
    if schedule == "cosine":
        return peak * 0.5 * (1.0 + math.cos(math.pi * min(done, 1.0)))
    if schedule == "linear":
        return peak * max(1.0 - done, 0.0)
    return peak
