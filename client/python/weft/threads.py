"""Drives operations without asyncio.

Calls start in the thread that submits them, so pipelined steps leave in order;
what follows a reply (conversion, back-off) runs on gRPC's own thread. No
thread is held while a step waits.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

import grpc

from weft.channel import Security
from weft.errors import Cancelled, WeftError, from_rpc_error, metadata_dict
from weft.methods import Bound, Method, RequestT, ResponseT
from weft.operations import Call, Operation, Reply, Sleep
from weft.routing import adapter_metadata

T = TypeVar("T")
# Both a grpc.Future and a grpc.Call, which have no common type.
CallFuture = Any


class _Run(Generic[T]):
    """One operation on its way. Each step of it happens on one thread."""

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
        self, reply: Reply[Any] | None = None, error: WeftError | None = None
    ) -> None:
        try:
            if error is None:
                effect = self._operation.send(reply)
            else:
                effect = self._operation.throw(error)
            self._perform(effect)
        except StopIteration as stop:
            self.future.set_result(stop.value)
        except BaseException as failure:  # Whatever it is, the waiter gets it.
            self.future.set_exception(failure)

    def cancel(self) -> None:
        """Ends the call in flight or the pause; the operation sees Cancelled."""
        with self._lock:
            self._cancelled = True
            call, pause = self._call, self._pause
            self._pause = None
        if pause is not None:
            pause.cancel()
            self.resume(error=Cancelled("cancelled by this client"))
        elif call is not None:
            call.cancel()

    def _perform(self, effect: Call | Sleep) -> None:
        with self._lock:
            cancelled = self._cancelled
            if not cancelled:
                self._start(effect)
        if cancelled:
            self.resume(error=Cancelled("cancelled by this client"))
        elif isinstance(effect, Call):
            self._call.add_done_callback(self._on_done)

    def _start(self, effect: Call | Sleep) -> None:
        if isinstance(effect, Sleep):
            self._pause = threading.Timer(effect.seconds, self._wake)
            self._pause.daemon = True
            self._pause.start()
            return
        self._call = self._driver.start(effect)
        if effect.slot is not None:
            effect.slot.cancel = self._call.cancel

    def _wake(self) -> None:
        with self._lock:
            if self._pause is None:
                return  # Cancelled while this thread began.
            self._pause = None
        self.resume()

    def _on_done(self, call: CallFuture) -> None:
        if call.cancelled():
            self.resume(error=Cancelled("cancelled by this client"))
        elif (error := call.exception()) is not None:
            self.resume(error=from_rpc_error(error))
        else:
            trailers = metadata_dict(call.trailing_metadata())
            self.resume(Reply(call.result(), trailers))


class ThreadDriver:
    """A grpc channel and the ways to run operations on it."""

    def __init__(self, target: str, security: Security) -> None:
        self._channel = security.open(
            target, grpc.insecure_channel, grpc.secure_channel
        )
        self._metadata = security.metadata()
        self._bound: dict[str, Bound] = {}

    def _callable(self, method: Method[Any, Any]) -> Bound:
        if method.path not in self._bound:
            self._bound[method.path] = method.bind(self._channel)
        return self._bound[method.path]

    def start(self, call: Call) -> CallFuture:
        request = call.request
        return self._callable(call.method).future(
            request,
            timeout=call.timeout,
            metadata=self._metadata + adapter_metadata(request),
        )

    def submit(self, operation: Operation[T]) -> Future[T]:
        """Starts an operation; its first call leaves before this returns."""
        run = _Run(self, operation)
        run.resume()
        return run.future

    def run(self, operation: Operation[T]) -> T:
        """Waits for the result. An interrupt cancels the call."""
        run = _Run(self, operation)
        run.resume()
        try:
            return run.future.result()
        except BaseException:
            run.cancel()
            raise

    def stream(
        self,
        method: Method[RequestT, ResponseT],
        request: RequestT,
        timeout: float,
    ) -> Iterator[ResponseT]:
        """Messages of a download; leaving the loop early cancels it."""
        metadata = self._metadata + adapter_metadata(request)
        call = self._callable(method)(request, timeout=timeout, metadata=metadata)
        try:
            yield from call
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        finally:
            call.cancel()

    def close(self) -> None:
        self._channel.close()
