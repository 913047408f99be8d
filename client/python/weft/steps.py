"""Numbering of an adapter's steps: pure bookkeeping, no I/O.

A step gets its number when it is submitted, so that several can be in flight
and the server runs them in that order. A number that the server refused (the
step was never queued) must be used by another step, or everything after it
would wait for it: when it was the last one given out, the next step takes it;
otherwise the later steps in flight are withdrawn and the handle wants a
resync. When nobody knows whether a step ran (a deadline, a lost connection),
the next number is asked from the server.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable

from weft.errors import FailedPrecondition


class Outcome(enum.Enum):
    """What became of a step."""

    DONE = "done"  # It ran, now or earlier.
    REFUSED = "refused"  # It did not run and its number is free.
    UNKNOWN = "unknown"  # It may have run.


class StepSlot:
    """One number in flight. `cancel` ends the call that carries it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.withdrawn_because: str | None = None
        self.cancel: Callable[[], object] | None = None


class StepCounter:
    """Gives out the numbers of one adapter. Threads: any."""

    def __init__(self, adapter_id: str, last_step: int) -> None:
        self.adapter_id = adapter_id
        self._lock = threading.Lock()
        self._next = last_step + 1
        self._in_flight: dict[int, StepSlot] = {}
        self._unsure: str | None = None
        self._broken: str | None = None

    @property
    def next_step(self) -> int:
        """Returns the number that the next step gets."""
        return self._next

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def needs_refresh(self) -> bool:
        """Whether `reset` must come before the next `take`.

        Raises FailedPrecondition where the user has to decide.
        """
        with self._lock:
            if self._broken is not None:
                raise FailedPrecondition(self._broken)
            if self._unsure is not None and self._in_flight:
                raise FailedPrecondition(self._unsure)
            return self._unsure is not None

    def take(self) -> StepSlot:
        """The next number. Raises FailedPrecondition where it is not known."""
        with self._lock:
            problem = self._broken or self._unsure
            if problem is not None:
                raise FailedPrecondition(problem)
            slot = StepSlot(self._next)
            self._in_flight[slot.number] = slot
            self._next += 1
            return slot

    def require_idle(self, what: str) -> None:
        """Raises FailedPrecondition while steps are in flight."""
        if self._in_flight:
            raise FailedPrecondition(
                f"{what} of adapter {self.adapter_id!r} with "
                f"{len(self._in_flight)} steps in flight: wait for them first"
            )

    def reset(self, last_step: int) -> None:
        """Starts over after `last_step`, as the server reports it."""
        with self._lock:
            self._next = last_step + 1
            self._unsure = None
            self._broken = None

    def finish(self, slot: StepSlot, outcome: Outcome, reason: str = "") -> None:
        """Records the end of a step; withdraws later ones where needed."""
        withdrawn: list[StepSlot] = []
        with self._lock:
            self._in_flight.pop(slot.number, None)
            if slot.withdrawn_because is not None or outcome is Outcome.DONE:
                return
            is_last = slot.number == self._next - 1
            if outcome is Outcome.REFUSED and is_last:
                self._next = slot.number
            elif outcome is Outcome.REFUSED:
                self._broken = self._advice(slot, f"was refused ({reason})")
                withdrawn = [
                    later
                    for later in self._in_flight.values()
                    if later.number > slot.number
                ]
                for later in withdrawn:
                    later.withdrawn_because = self._broken
            elif is_last:
                self._unsure = self._advice(slot, f"may have run ({reason})")
            else:
                self._broken = self._advice(slot, f"may have run ({reason})")
        for later in withdrawn:
            if later.cancel is not None:
                later.cancel()

    def _advice(self, slot: StepSlot, what: str) -> str:
        return (
            f"step {slot.number} of adapter {self.adapter_id!r} {what}; wait "
            "for the steps in flight, then call resync() and go on from there"
        )
