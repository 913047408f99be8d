"""Drives operations without asyncio.

A call starts in the thread that submits it, so pipelined steps leave in order. The
conversion of a reply runs on a thread of gRPC. A repeated call starts on a timer's
thread. No thread waits for the reply of a submitted call.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

import grpc
from google.protobuf.message import Message

from weft import errors, methods
from weft._proto import sampling_pb2
from weft.channel import Security
from weft.convert import to_sample_delta
from weft.methods import Method, RequestT, ResponseT
from weft.operations import (
    Call,
    Effect,
    Operation,
    Reply,
    Sleep,
    Work,
    none_ended,
    or_none,
)
from weft.route import Links, Route, Trip
from weft.routing import adapter_of, call_metadata
from weft.types import SampleDelta

T = TypeVar("T")
# An object that is both a grpc.Future and a grpc.Call; grpc has no type for it.
CallFuture = Any


_SIGNAL_SECONDS = 0.5  # An interrupt is never noticed later than that.

# `_delivering.driver` is the driver whose reply the current thread is delivering. The
# thread must not wait for another call of this driver, because gRPC may need the thread
# to deliver that call's reply.
_delivering = threading.local()


class _Run(Generic[T]):
    """A running operation. Only one thread at a time resumes it."""

    def __init__(self, driver: ThreadDriver, operation: Operation[T]) -> None:
        self.future: Future[T] = Future()
        self.future.set_running_or_notify_cancel()
        self._driver = driver
        self._operation = operation
        self._call: CallFuture = None
        self._lock = threading.Lock()
        self._pause: threading.Timer | None = None
        self._cancelled = False

    def resume(
        self, reply: object = None, error: errors.WeftError | None = None
    ) -> None:
        try:
            if error is None:
                effect = self._operation.send(reply)
            else:
                effect = self._operation.throw(error)
            self._perform(effect)
        except StopIteration as stop:
            if not self.future.done():
                self.future.set_result(stop.value)
        except BaseException as failure:  # The future's waiter gets every error.
            # It has one already if an interrupt came while this thread performed an
            # effect, and the operation then ends because it is cancelled.
            if not self.future.done():
                self.future.set_exception(errors.without_frames(failure))

    def wait(self) -> T:
        """Waits for the end and returns the result. Looks up now and then, because
        Python learns of a signal that comes as a wait begins only when it ends."""
        while True:
            try:
                return self.future.result(_SIGNAL_SECONDS)
            except TimeoutError:
                if self.future.done():
                    return self.future.result()

    def cancel(self) -> None:
        """Ends the call in flight or the pause. Raises Cancelled in the operation."""
        with self._lock:
            self._cancelled = True
            call, pause = self._call, self._pause
            self._pause = None
            self._driver.pausing.discard(self)
        if pause is not None:
            pause.cancel()
            self.resume(error=errors.Cancelled("cancelled by this client"))
        elif call is not None:
            call.cancel()

    def end_pause(self) -> None:
        """Resumes the operation at once if it is paused."""
        with self._lock:
            pause = self._pause
        if pause is not None:
            pause.cancel()
            self._wake()

    def _perform(self, effect: Effect) -> None:
        if isinstance(effect, Work):
            try:
                reply = effect.function()
            except errors.WeftError as error:
                self.resume(error=error)
            else:
                self.resume(reply)
            return
        with self._lock:
            cancelled = self._cancelled
            if not cancelled:
                self._start(effect)
        if cancelled:
            self.resume(error=errors.Cancelled("cancelled by this client"))
        elif isinstance(effect, Call):
            self._call.add_done_callback(self._on_done)

    def _start(self, effect: Call | Sleep) -> None:
        if isinstance(effect, Sleep):
            self._driver.pausing.add(self)
            self._driver.keep_connecting()
            seconds = 0 if self._driver.closed else effect.seconds
            self._pause = threading.Timer(seconds, self._wake)
            self._pause.daemon = True
            self._pause.start()
            return
        self._call = self._driver.start(effect)
        if effect.slot is not None:
            effect.slot.cancel = self._call.cancel
            # Another thread may have withdrawn the step before `cancel` was set.
            if effect.slot.withdrawn_because is not None:
                self._call.cancel()

    def _wake(self) -> None:
        with self._lock:
            if self._pause is None:
                return  # The operation has been resumed already.
            self._pause = None
            self._driver.pausing.discard(self)
        self.resume()

    def _on_done(self, call: CallFuture) -> None:
        _delivering.driver = self._driver
        try:
            self._deliver(call)
        finally:
            _delivering.driver = None

    def _deliver(self, call: CallFuture) -> None:
        if call.cancelled():
            self.resume(error=errors.Cancelled("cancelled by this client"))
        elif (error := call.exception()) is not None:
            self.resume(error=errors.from_rpc_error(error))
        else:
            trailers = errors.metadata_dict(call.trailing_metadata())
            self.resume(Reply(call.result(), trailers))


def _require_may_wait(driver: ThreadDriver) -> None:
    if getattr(_delivering, "driver", None) is driver:
        raise errors.FailedPrecondition(
            "a callback of a future cannot wait for a call: it runs on the thread that "
            "delivers replies; submit the call instead"
        )


def _open(security: Security, target: str) -> grpc.Channel:
    return security.open(target, grpc.insecure_channel, grpc.secure_channel)


def _close(links: Links[grpc.Channel], process: int) -> None:
    if os.getpid() == process:  # In a fork, the channels' threads are missing.
        for channel in links.close():
            channel.close()


def _put(ended: SimpleQueue[int], index: int, _: Future[T]) -> None:
    ended.put(index)


class ThreadDriver:
    """Runs operations on grpc channels. Threads: any."""

    def __init__(self, route: Route) -> None:
        self._route = route
        self._links = Links(partial(_open, route.security))
        # A program may end without closing its client. gRPC would then wait forever for
        # the thread of `keep_connecting`, which no longer runs.
        weakref.finalize(self, _close, self._links, os.getpid())
        self._metadata = route.security.metadata()
        self.pausing: set[_Run[Any]] = set()
        self.closed = False
        self._watched: set[str] = set()

    def keep_connecting(self) -> None:
        """Lets a thread of gRPC drive the channel while a call waits to be repeated.

        Without it and without a call in flight, gRPC looks only every 5 seconds whether
        the connection that it is opening is open.
        """
        target = self._route.target()
        if target not in self._watched and not self.closed:
            self._watched.add(target)
            channel = self._links.channel(target)
            channel.subscribe(lambda state: None, try_to_connect=True)

    def start(self, call: Call) -> CallFuture:
        request = call.request
        metadata = self._metadata + call_metadata(request)
        return self._links.bound(call.target, call.method).future(
            request if isinstance(request, Message) else iter(request),
            timeout=or_none(call.timeout),
            metadata=metadata,
        )

    def submit(self, operation: Operation[T]) -> Future[T]:
        """Starts an operation. Its first call is sent before this returns, unless it is
        a step that must wait for its turn (StepCounter)."""
        run = _Run(self, operation)
        run.resume()
        return run.future

    def run(self, operation: Operation[T]) -> T:
        """Runs an operation and returns its result. An interrupt cancels the call.

        Raises FailedPrecondition if a callback of this driver's futures calls run().
        """
        _require_may_wait(self)
        run = _Run(self, operation)
        run.resume()
        try:
            return run.wait()
        except BaseException as error:
            run.cancel()
            raise errors.without_frames(error) from error.__cause__

    def run_many(
        self,
        operations: Iterable[Operation[T]],
        limit: Callable[[], int],
        patience: float,
    ) -> list[T]:
        """Runs operations, at most limit() at the same time, and returns the results
        in the operations' order.

        The first error cancels the operations in flight and is raised. If no operation
        ends for `patience` seconds, raises DeadlineExceeded.
        """
        _require_may_wait(self)
        waiting = enumerate(operations)
        ended: SimpleQueue[int] = SimpleQueue()
        runs: dict[int, _Run[T]] = {}
        results: dict[int, T] = {}
        more = True
        try:
            while more or runs:
                while more and len(runs) < limit():
                    index, operation = next(waiting, (-1, None))
                    if operation is None:
                        more = False
                        break
                    runs[index] = _Run(self, operation)
                    runs[index].future.add_done_callback(partial(_put, ended, index))
                    runs[index].resume()
                if runs:
                    try:
                        index = ended.get(timeout=or_none(patience))
                    except Empty:
                        raise none_ended(len(runs), patience) from None
                    results[index] = runs.pop(index).future.result()
        except BaseException:
            for run in runs.values():
                run.cancel()
            raise
        return [results[index] for index in range(len(results))]

    def stream(
        self, method: Method[RequestT, ResponseT], request: RequestT, timeout: float
    ) -> Iterator[ResponseT]:
        """Yields the messages of a download. A caller that leaves the loop early
        cancels the call."""
        metadata = self._metadata + call_metadata(request)
        deadline = time.monotonic() + timeout
        trip = Trip(self._route, adapter_of(request))
        while True:
            target = trip.next()
            left = or_none(deadline - time.monotonic())
            call = self._links.bound(target, method)(
                request, timeout=left, metadata=metadata
            )
            try:
                yield from call
                return
            except grpc.RpcError as error:
                failure = errors.from_rpc_error(error)
            finally:
                call.cancel()
            if not trip.goes_on(failure):
                raise failure

    def deltas(
        self, request: sampling_pb2.SampleStreamRequest, timeout: float
    ) -> Iterator[SampleDelta]:
        """Yields the messages of a stream of samples."""
        return map(
            to_sample_delta, self.stream(methods.SAMPLE_STREAM, request, timeout)
        )

    def close(self) -> None:
        """Ends the calls in flight and the pauses."""
        self.closed = True
        for channel in self._links.close():
            channel.close()
        for run in list(self.pausing):
            run.end_pause()
