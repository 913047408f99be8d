"""Numbers an adapter's steps, without I/O.

A step gets its number when it is submitted. So several steps can be in flight, and
the server runs them in the order of their numbers. A step that the server has accepted
keeps its number, also if it fails. If the server does not accept a step, the next step
takes its number. But if later steps are in flight, which the server cannot run, the
counter withdraws them, and the user must call resync. If it is unknown whether the
server has accepted the last step (a deadline, a lost connection), the client asks the
server for the next number.

Each step carries the epoch of its adapter, so that no step trains another adapter that
was made later under the same name. And if another client has worked on the adapter,
the next number is not the one that this client expects. Then the user must call resync,
because the adapter is no longer what this client has trained.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable

from weft.errors import FailedPrecondition


class Outcome(enum.Enum):
    """How a step ended."""

    DONE = "done"  # The server has accepted the step, which has its result.
    REFUSED = "refused"  # The server has not accepted it, so its number is free.
    UNKNOWN = "unknown"  # The server may have accepted the step.
    STALE = "stale"  # Another client has changed the adapter or made it anew.


class StepSlot:
    """One number in flight, with its epoch. `cancel` ends the call that carries it."""

    def __init__(self, number: int, epoch: int = 0) -> None:
        self.number = number
        self.epoch = epoch
        self.withdrawn_because: str | None = None
        self.cancel: Callable[[], object] | None = None


class StepCounter:
    """Gives out the step numbers of one adapter. Threads: any."""

    def __init__(self, adapter_id: str, next_step: int, epoch: int = 0) -> None:
        self.adapter_id = adapter_id
        self._epoch = epoch
        self._lock = threading.Lock()
        self._next = next_step
        self._in_flight: dict[int, StepSlot] = {}  # In the order of the numbers.
        self._unsure: str | None = None
        self._broken: str | None = None
        self._forgotten = False  # This client does not know the next number.

    @property
    def next_step(self) -> int:
        """Returns the number that the next step gets."""
        return self._next

    def needs_refresh(self) -> bool:
        """Returns whether the next number is unknown. If it is, the client must ask the
        server for it and call `refresh` before the next `take`.

        Raises FailedPrecondition if the user must first wait for the steps in flight
        or call resync.
        """
        with self._lock:
            if self._broken is not None:
                raise FailedPrecondition(self._broken)
            if self._unsure is not None and self._in_flight:
                raise FailedPrecondition(self._unsure)
            return self._unsure is not None

    def take(self) -> StepSlot:
        """Takes the next number. Raises FailedPrecondition if the next number is
        unknown or the user must call resync."""
        with self._lock:
            problem = self._broken or self._unsure
            if problem is not None:
                raise FailedPrecondition(problem)
            slot = StepSlot(self._next, self._epoch)
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

    def reset(self, next_step: int, epoch: int = 0) -> None:
        """Continues with the number and the epoch that the server reported."""
        with self._lock:
            self._next = next_step
            self._epoch = epoch
            self._unsure = None
            self._broken = None
            self._forgotten = False

    def forget(self, reason: str) -> None:
        """Records that this client no longer knows the next number, for example
        because a load may have taken one."""
        with self._lock:
            self._forgotten = True
            self._unsure = f"{reason}; call resync() and go on from there"

    def refresh(self, next_step: int, epoch: int) -> None:
        """Does what `reset` does if only this client has worked on the adapter.
        Otherwise raises FailedPrecondition, and then `take` raises it, too, until
        `reset`."""
        with self._lock:
            changed = self._epoch not in (0, epoch) or next_step > self._next
            if changed and not self._forgotten:
                self._broken = (
                    f"adapter {self.adapter_id!r} was changed by another client since "
                    f"this client's last step: its next step is {next_step} of epoch "
                    f"{epoch}, this client's was {self._next} of epoch {self._epoch}; "
                    "call resync() to go on from it"
                )
                raise FailedPrecondition(self._broken)
        self.reset(next_step, epoch)

    def finish(self, slot: StepSlot, outcome: Outcome, reason: str = "") -> None:
        """Records the end of a step. Withdraws later steps if this one was refused."""
        for later in self._end(slot, outcome, reason):
            if later.cancel is not None:
                later.cancel()

    def _end(self, slot: StepSlot, outcome: Outcome, reason: str) -> list[StepSlot]:
        """Records the end of a step. Returns the steps that this withdraws."""
        withdrawn: list[StepSlot] = []
        with self._lock:
            self._in_flight.pop(slot.number, None)
            if slot.withdrawn_because is not None or outcome is Outcome.DONE:
                return withdrawn
            is_last = slot.number == self._next - 1
            if outcome is Outcome.STALE:
                self._broken = self._advice(slot, f"was refused ({reason})")
            elif outcome is Outcome.REFUSED and is_last:
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
        return withdrawn

    def _advice(self, slot: StepSlot, what: str) -> str:
        return (
            f"step {slot.number} of adapter {self.adapter_id!r} {what}; wait "
            "for the steps in flight, then call resync() and go on from there"
        )
