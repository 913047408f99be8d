"""Describes calls as generators, which decide what to send and when to repeat it.

They do no I/O. An operation yields `Call`, `Sleep` and `Work`. A driver performs them
and sends the reply back, or throws a WeftError into the operation. weft.client drives
operations with threads and weft.aio with asyncio, so both share these decisions.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from google.protobuf.message import Message

from weft._proto import adapters_pb2
from weft.contact import Contact
from weft.errors import (
    Cancelled,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    WeftError,
)
from weft.methods import GET_ADAPTER, Method, RequestT, ResponseT
from weft.retry import NO_RETRY, RetryPolicy, next_delay
from weft.route import Route, Trip
from weft.routing import adapter_of
from weft.steps import Outcome, StepCounter, StepSlot
from weft.texts import Texts

T = TypeVar("T")

# If a step fails with one of these codes, and step_done is False, the server has not
# accepted the step.
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

# A longer timeout is none. Far longer ones overflow the clocks of gRPC and of Python.
MAX_SECONDS = 1e8

# Error reasons (weft/v1/errors.proto) of a step whose adapter is another than this
# client knows, or whose number another client has used.
_CHANGED = frozenset({"STALE_EPOCH", "STEP_HAS_ANOTHER_PAYLOAD"})


@dataclass
class Call:
    """Asks the driver to perform one RPC and to tell `slot` how to cancel it.

    target: the address of the server. timeout: seconds; infinite for a call without a
    deadline.
    """

    target: str
    method: Method[Any, Any]
    request: Message | Iterable[Message]  # Several messages for an upload.
    timeout: float
    slot: StepSlot | None = None


@dataclass(frozen=True)
class Sleep:
    """Asks the driver to wait."""

    seconds: float


@dataclass(frozen=True)
class Work:
    """Asks the driver to compute something long, where an event loop does not wait."""

    function: Callable[[], Any]


Effect = Call | Sleep | Work


@dataclass(frozen=True)
class Reply(Generic[ResponseT]):
    """The reply of a call, with its trailing metadata, and the address of the server
    that sent it."""

    message: ResponseT
    trailers: dict[str, str] = field(default_factory=dict)
    server: str = ""

    @property
    def replayed(self) -> bool:
        """Returns whether this is the stored reply of a step that ran before."""
        return self.trailers.get("weft-replayed") == "1"


def or_none(seconds: float) -> float | None:
    """Returns a time limit in the form that gRPC and queues take: None for no limit."""
    return None if math.isinf(seconds) else seconds


def none_ended(in_flight: int, patience: float) -> DeadlineExceeded:
    """Returns the error of many calls, none of which ended in `patience` seconds."""
    return DeadlineExceeded(
        f"no answer to any of {in_flight} calls in flight within {patience:g} s"
    )


Operation = Generator[Effect, Any, T]


class Caller:
    """Builds operations with a client's deadline and retry policy, and has what all
    handles of the client share.

    Raises InvalidArgument for a timeout that is negative or not a number.
    """

    def __init__(
        self, route: Route, timeout: float | None, policy: RetryPolicy
    ) -> None:
        if timeout is None:
            timeout = math.inf
        if not timeout >= 0:
            raise InvalidArgument(
                f"timeout is {timeout}, must be at least 0 seconds; None: no limit"
            )
        self.timeout = timeout if timeout < MAX_SECONDS else math.inf
        self.policy = policy
        self.route = route
        self.contact = Contact(route.text)
        self.texts = Texts()
        self._closed = False
        self._process = os.getpid()

    def other(self, asked: str, named: str) -> Caller:
        """Returns a caller of another server, which the one at `asked` names. As a new
        client, it gives up soon if it reaches none. Raises as Route.follow."""
        return Caller(self.route.other(asked, named), self.timeout, self.policy)

    def close(self) -> None:
        """Makes all later calls raise FailedPrecondition."""
        self._closed = True

    def is_forked(self) -> bool:
        """Returns whether this process is a fork of the one that made the client."""
        return os.getpid() != self._process

    def require_open(self) -> None:
        """Raises FailedPrecondition if the client is closed, or if its threads are in
        another process, so that no reply would ever come."""
        if self.is_forked():
            raise FailedPrecondition(
                "the client was made before fork(): make another in this process"
            )
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
        """Builds one RPC with its repetitions, all within one deadline. An attempt that
        never ran goes on to another server (Trip), and counts as no repetition.

        slot: that of a step.
        gone_is_done: a repetition that gets NOT_FOUND counts as a success, because an
        earlier attempt did the work and its reply was lost. on_refusal is called
        before each repetition that follows RESOURCE_EXHAUSTED.
        """
        limit = self.timeout if timeout is None else timeout
        began = sent = time.monotonic()
        deadline = began + limit
        trip = Trip(self.route, adapter_of(request))
        repeated = False
        unanswered = 0  # Consecutive failures without a server's retry hint.
        while True:
            remaining = deadline - time.monotonic()
            target = trip.next()
            try:
                if slot is not None and slot.withdrawn_because is not None:
                    raise Cancelled(slot.withdrawn_because)
                self.require_open()
                reply: Reply[ResponseT] = yield Call(
                    target, method, request, remaining, slot
                )
                self.contact.made()
                return Reply(reply.message, reply.trailers, target)
            except WeftError as error:
                if gone_is_done and repeated and error.code == "NOT_FOUND":
                    return Reply(method.response_type())
                if trip.goes_on(error):
                    self.contact.note(error)
                    continue
                remaining = deadline - time.monotonic()
                policy = self.policy if retry else NO_RETRY
                unanswered = unanswered + 1 if error.retry_after is None else 0
                delay = next_delay(policy, unanswered, error, remaining)
                self.contact.check(error, began, sent, delay)
                if delay is None:
                    raise
                left = policy.time_left(unanswered, error, remaining)
                self.contact.say(method.name, error, began, left)
                if on_refusal is not None and error.code == "RESOURCE_EXHAUSTED":
                    on_refusal()
            repeated = True
            yield Sleep(delay)
            sent = time.monotonic()

    def submit_step(
        self,
        counter: StepCounter,
        method: Method[RequestT, ResponseT],
        build: Callable[[StepSlot], RequestT],
        convert: Callable[[Reply[ResponseT]], T],
    ) -> Operation[T]:
        """Builds a step that takes its number now, before a driver runs it.

        Raises FailedPrecondition if the number is unknown or the client is closed.
        """
        self.require_open()
        slot = counter.take()
        try:
            request = build(slot)
        except BaseException:
            counter.finish(slot, Outcome.REFUSED, "not sent")
            raise
        return self._run_step(counter, slot, method, request, convert)

    def _run_step(
        self,
        counter: StepCounter,
        slot: StepSlot,
        method: Method[RequestT, ResponseT],
        request: RequestT,
        convert: Callable[[Reply[ResponseT]], T],
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
            elif error.reason in _CHANGED:
                outcome = Outcome.STALE
            elif error.code in REFUSALS:
                outcome = Outcome.REFUSED
            reason = str(error)
            raise
        finally:
            counter.finish(slot, outcome, reason)

    def step(
        self,
        counter: StepCounter,
        method: Method[RequestT, ResponseT],
        build: Callable[[StepSlot], RequestT],
        convert: Callable[[Reply[ResponseT]], T],
    ) -> Operation[T]:
        """Builds a step. Asks the server first if the next step number is unknown."""
        if counter.needs_refresh():
            adapter = yield from self._present(counter)
            counter.refresh(adapter.next_step, adapter.epoch)
        submitted = self.submit_step(counter, method, build, convert)
        return (yield from submitted)

    def resync(self, counter: StepCounter) -> Operation[int]:
        """Builds a call that asks the server for the next number and returns it.

        Raises FailedPrecondition while steps are in flight.
        """
        counter.require_idle("resync")
        adapter = yield from self._present(counter)
        counter.reset(adapter.next_step, adapter.epoch)
        return counter.next_step

    def _present(self, counter: StepCounter) -> Operation[adapters_pb2.Adapter]:
        request = adapters_pb2.GetAdapterRequest(adapter_id=counter.adapter_id)
        reply = yield from self.call(GET_ADAPTER, request)
        return reply.message.adapter
