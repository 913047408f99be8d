"""Drives operations with asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, TypeVar

import grpc

from weft import errors, methods
from weft._proto import sampling_pb2
from weft.convert import to_sample_delta
from weft.methods import Bound, Method, RequestT, ResponseT
from weft.operations import Effect, Operation, Reply, Sleep, Work, none_ended, or_none
from weft.route import Links, Route, Trip
from weft.routing import adapter_of, call_metadata
from weft.types import SampleDelta

T = TypeVar("T")

# What grpc.aio says in place of the status of a server that ends an upload before it
# has all of it, as with MOVED. The upload has not run, and another attempt may get the
# status.
_WRITE_FAILED = "Internal error from Core"


class TaskDriver:
    """Runs operations on grpc.aio channels, inside one event loop: that of the first
    call."""

    def __init__(self, route: Route) -> None:
        self._route = route
        self._loop: asyncio.AbstractEventLoop | None = None
        self._links = Links(self._open)
        self._metadata = route.security.metadata()
        self._closed = asyncio.Event()
        self._pauses: set[asyncio.Event] = set()

    def _open(self, target: str) -> grpc.aio.Channel:
        return self._route.security.open(
            target, grpc.aio.insecure_channel, grpc.aio.secure_channel
        )

    def _require_loop(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        if self._loop is not loop:
            raise errors.FailedPrecondition(
                "the client made its first call in another event loop: make a client "
                "in each loop"
            )

    def _callable(self, target: str, method: Method[Any, Any]) -> Bound:
        self._require_loop()
        return self._links.bound(target, method)

    async def run(self, operation: Operation[T]) -> T:
        """Runs an operation and returns its result."""
        return await self._drive(operation, operation.send(None))

    def submit(self, operation: Operation[T]) -> asyncio.Task[T]:
        # Starts the operation here, so that its clean-up runs even if the task is
        # cancelled before it first runs.
        effect = operation.send(None)
        return asyncio.ensure_future(self._drive(operation, effect))

    async def run_many(
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
        waiting = enumerate(operations)
        tasks: dict[asyncio.Task[T], int] = {}
        results: dict[int, T] = {}
        more = True
        try:
            while more or tasks:
                while more and len(tasks) < limit():
                    index, operation = next(waiting, (-1, None))
                    if operation is None:
                        more = False
                        break
                    tasks[self.submit(operation)] = index
                if tasks:
                    ended, _ = await asyncio.wait(
                        tasks,
                        timeout=or_none(patience),
                        return_when=asyncio.FIRST_COMPLETED,
                    )
                    if not ended:
                        raise none_ended(len(tasks), patience)
                    for task in ended:
                        results[tasks[task]] = task.result()
                        del tasks[task]
        finally:
            for task in tasks:
                task.cancel()
            # Waits until all tasks have ended, and collects their errors, so that
            # asyncio does not report the errors as never retrieved.
            await asyncio.gather(*tasks, return_exceptions=True)
        return [results[index] for index in range(len(results))]

    async def _drive(self, operation: Operation[T], effect: Effect) -> T:
        try:
            while True:
                try:
                    reply = await self._perform(effect)
                except errors.WeftError as error:
                    effect = operation.throw(error)
                else:
                    effect = operation.send(reply)
        except StopIteration as stop:
            result: T = stop.value
            return result
        except errors.WeftError as error:
            raise errors.without_frames(error) from error.__cause__
        finally:
            operation.close()

    async def _perform(self, effect: Effect) -> object:
        if isinstance(effect, Work):
            return await asyncio.to_thread(effect.function)
        if isinstance(effect, Sleep):
            await self._pause(effect)
            return None
        call = self._callable(effect.target, effect.method)(
            effect.request,
            timeout=or_none(effect.timeout),
            metadata=self._metadata + call_metadata(effect.request),
        )
        slot = effect.slot
        if slot is not None:
            slot.cancel = call.cancel
        try:
            message = await call
            trailers = errors.metadata_dict(await call.trailing_metadata())
            return Reply(message, trailers)
        except grpc.RpcError as error:
            failure = errors.from_rpc_error(error)
            if failure.message == _WRITE_FAILED:
                return await self._perform(effect)
            raise failure from None
        except asyncio.CancelledError:
            # grpc raises CancelledError if the task is cancelled, but also if the step
            # counter withdrew the call or the client was closed.
            withdrawn = slot is not None and slot.withdrawn_because is not None
            task = asyncio.current_task()
            if withdrawn or (self._closed.is_set() and task and not task.cancelling()):
                raise errors.Cancelled("cancelled by this client") from None
            call.cancel()
            raise

    async def _pause(self, effect: Sleep) -> None:
        # Closing the client ends the pause early.
        woken = asyncio.Event()
        if self._closed.is_set():
            return
        self._pauses.add(woken)
        try:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(woken.wait(), effect.seconds)
        finally:
            self._pauses.discard(woken)

    async def stream(
        self, method: Method[RequestT, ResponseT], request: RequestT, timeout: float
    ) -> AsyncIterator[ResponseT]:
        """Yields the messages of a download. A caller that leaves the loop early
        cancels the call."""
        metadata = self._metadata + call_metadata(request)
        deadline = time.monotonic() + timeout
        trip = Trip(self._route, adapter_of(request))
        while True:
            target = trip.next()
            left = or_none(deadline - time.monotonic())
            call = self._callable(target, method)(
                request, timeout=left, metadata=metadata
            )
            try:
                async for message in call:
                    yield message
                return
            except grpc.RpcError as error:
                failure = errors.from_rpc_error(error)
            finally:
                call.cancel()
            if not trip.goes_on(failure):
                raise failure

    async def deltas(
        self, request: sampling_pb2.SampleStreamRequest, timeout: float
    ) -> AsyncIterator[SampleDelta]:
        """Yields the messages of a stream of samples."""
        async for message in self.stream(methods.SAMPLE_STREAM, request, timeout):
            yield to_sample_delta(message)

    async def close(self) -> None:
        self._closed.set()
        for woken in self._pauses:
            woken.set()
        if self._loop is not None:
            self._require_loop()
        for channel in self._links.close():
            await channel.close()
