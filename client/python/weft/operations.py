"""Calls as generators: what to send and when to repeat, without any I/O.

An operation yields `Call` and `Sleep`; a driver performs them and sends the
reply back (or throws a WeftError). weft.client drives them with threads,
weft.aio with asyncio, so both share every decision made here.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from weft._proto import adapters_pb2
from weft.errors import Cancelled, DeadlineExceeded, FailedPrecondition, WeftError
from weft.methods import GET_ADAPTER, Message, Method, RequestT, ResponseT
from weft.retry import NO_RETRY, RetryPolicy, next_delay
from weft.steps import Outcome, StepCounter, StepSlot

T = TypeVar("T")

# Codes that the server gives before a training step is queued.
REFUSALS = frozenset(
    {
        "INVALID_ARGUMENT",
        "NOT_FOUND",
        "PERMISSION_DENIED",
        "RESOURCE_EXHAUSTED",
        "UNAUTHENTICATED",
        "UNIMPLEMENTED",
    }
)


@dataclass
class Call:
    """Perform one RPC. `slot` learns how to cancel it; `timeout` in seconds."""

    method: Method[Any, Any]
    request: Message | Iterable[Message]  # The latter for streams.
    timeout: float
    slot: StepSlot | None = None


@dataclass(frozen=True)
class Sleep:
    """Wait."""

    seconds: float


@dataclass(frozen=True)
class Reply(Generic[ResponseT]):
    """What a call returned."""

    message: ResponseT
    trailers: dict[str, str] = field(default_factory=dict)

    @property
    def replayed(self) -> bool:
        """Whether the server had run this step before."""
        return self.trailers.get("weft-replayed") == "1"


def seconds_left(call: Call) -> float | None:
    """The timeout as gRPC takes it: None for a call without one."""
    return None if math.isinf(call.timeout) else call.timeout


def none_ended(in_flight: int, patience: float) -> DeadlineExceeded:
    """The error of a batch of calls that no longer moves."""
    return DeadlineExceeded(
        f"no answer to any of {in_flight} calls in flight within {patience:g} s"
    )


Operation = Generator[Call | Sleep, Any, T]


class Caller:
    """Builds operations with a client's deadline and retry policy."""

    def __init__(self, timeout: float, policy: RetryPolicy) -> None:
        self.timeout = timeout
        self.policy = policy
        self._closed = False

    def close(self) -> None:
        """No call is sent any more."""
        self._closed = True

    def require_open(self) -> None:
        """Raises FailedPrecondition once the client is closed."""
        if self._closed:
            raise FailedPrecondition("the client is closed")

    def call(
        self,
        method: Method[RequestT, ResponseT],
        request: RequestT | Iterable[RequestT],
        *,
        timeout: float | None = None,
        retry: bool = True,
        slot: StepSlot | None = None,
        gone_is_done: bool = False,
        on_refusal: Callable[[], None] | None = None,
    ) -> Operation[Reply[ResponseT]]:
        """One RPC with repetitions, all within one deadline.

        gone_is_done: NOT_FOUND to a repetition means that the first attempt,
        whose reply got lost, did the work. on_refusal: called where the server
        has no room now.
        """
        limit = self.timeout if timeout is None else timeout
        deadline = time.monotonic() + limit
        repeated = False
        unanswered = 0  # Attempts in a row after which the server gave no hint.
        while True:
            remaining = deadline - time.monotonic()
            try:
                if slot is not None and slot.withdrawn_because is not None:
                    raise Cancelled(slot.withdrawn_because)
                self.require_open()
                reply: Reply[ResponseT] = yield Call(method, request, remaining, slot)
                return reply
            except WeftError as error:
                if gone_is_done and repeated and error.code == "NOT_FOUND":
                    return Reply(method.response_type())
                remaining = deadline - time.monotonic()
                policy = self.policy if retry else NO_RETRY
                unanswered = unanswered + 1 if error.retry_after is None else 0
                delay = next_delay(policy, unanswered, error, remaining)
                if delay is None:
                    raise
                if on_refusal is not None and error.code == "RESOURCE_EXHAUSTED":
                    on_refusal()
            repeated = True
            yield Sleep(delay)

    def submit_step(
        self,
        counter: StepCounter,
        method: Method[RequestT, ResponseT],
        build: Callable[[int], RequestT],
        convert: Callable[[Reply[ResponseT]], T],
        refusals: frozenset[str] = REFUSALS,
    ) -> Operation[T]:
        """A step that takes its number now, before the operation is driven."""
        self.require_open()
        slot = counter.take()
        try:
            request = build(slot.number)
        except BaseException:
            counter.finish(slot, Outcome.REFUSED, "not sent")
            raise
        return self._run_step(counter, slot, method, request, convert, refusals)

    def _run_step(
        self,
        counter: StepCounter,
        slot: StepSlot,
        method: Method[RequestT, ResponseT],
        request: RequestT,
        convert: Callable[[Reply[ResponseT]], T],
        refusals: frozenset[str],
    ) -> Operation[T]:
        outcome, reason = Outcome.UNKNOWN, "interrupted"
        try:
            reply = yield from self.call(method, request, slot=slot)
            outcome = Outcome.DONE
            return convert(reply)
        except WeftError as error:
            if slot.withdrawn_because is not None:
                raise FailedPrecondition(
                    f"step {slot.number} was withdrawn: {slot.withdrawn_because}"
                ) from error
            if error.step_done:
                outcome = Outcome.DONE
            elif error.code in refusals:
                outcome = Outcome.REFUSED
            reason = str(error)
            raise
        finally:
            counter.finish(slot, outcome, reason)

    def step(
        self,
        counter: StepCounter,
        method: Method[RequestT, ResponseT],
        build: Callable[[int], RequestT],
        convert: Callable[[Reply[ResponseT]], T],
        refusals: frozenset[str] = REFUSALS,
    ) -> Operation[T]:
        """A step that first asks the server for its number where unsure."""
        if counter.needs_refresh():
            yield from self.resync(counter)
        submitted = self.submit_step(counter, method, build, convert, refusals)
        return (yield from submitted)

    def resync(self, counter: StepCounter) -> Operation[int]:
        """Learns the next number from the server and returns it."""
        counter.require_idle("resync")
        request = adapters_pb2.GetAdapterRequest(adapter_id=counter.adapter_id)
        reply = yield from self.call(GET_ADAPTER, request)
        counter.reset(reply.message.adapter.last_step)
        return counter.next_step
