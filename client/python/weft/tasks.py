"""Drives operations with asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, TypeVar

import grpc

from weft.channel import Security
from weft.errors import Cancelled, WeftError, from_rpc_error, metadata_dict
from weft.methods import Bound, Method, RequestT, ResponseT
from weft.operations import Call, Operation, Reply, Sleep
from weft.routing import adapter_metadata

T = TypeVar("T")


class TaskDriver:
    """A grpc.aio channel and the ways to run operations on it."""

    def __init__(self, target: str, security: Security) -> None:
        self._channel = security.open(
            target, grpc.aio.insecure_channel, grpc.aio.secure_channel
        )
        self._metadata = security.metadata()
        self._bound: dict[str, Bound] = {}

    def _callable(self, method: Method[Any, Any]) -> Bound:
        if method.path not in self._bound:
            self._bound[method.path] = method.bind(self._channel)
        return self._bound[method.path]

    async def run(self, operation: Operation[T]) -> T:
        """Performs what the operation asks for until it returns."""
        return await self._drive(operation, operation.send(None))

    def submit(self, operation: Operation[T]) -> asyncio.Task[T]:
        # Started here, so that its clean-up runs even where the task is
        # cancelled before its first turn.
        effect = operation.send(None)
        return asyncio.ensure_future(self._drive(operation, effect))

    async def _drive(self, operation: Operation[T], effect: Call | Sleep) -> T:
        try:
            while True:
                try:
                    reply = await self._perform(effect)
                except WeftError as error:
                    effect = operation.throw(error)
                else:
                    effect = operation.send(reply)
        except StopIteration as stop:
            result: T = stop.value
            return result
        finally:
            operation.close()

    async def _perform(self, effect: Call | Sleep) -> Reply[Any] | None:
        if isinstance(effect, Sleep):
            await asyncio.sleep(effect.seconds)
            return None
        call = self._callable(effect.method)(
            effect.request,
            timeout=effect.timeout,
            metadata=self._metadata + adapter_metadata(effect.request),
        )
        slot = effect.slot
        if slot is not None:
            slot.cancel = call.cancel
        try:
            message = await call
            trailers = metadata_dict(await call.trailing_metadata())
            return Reply(message, trailers)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        except asyncio.CancelledError:
            # grpc raises this for a call that the numbering withdrew, too.
            if slot is not None and slot.withdrawn_because is not None:
                raise Cancelled("cancelled by this client") from None
            call.cancel()
            raise

    async def stream(
        self,
        method: Method[RequestT, ResponseT],
        request: RequestT,
        timeout: float,
    ) -> AsyncIterator[ResponseT]:
        """Messages of a download; leaving the loop early cancels it."""
        metadata = self._metadata + adapter_metadata(request)
        call = self._callable(method)(request, timeout=timeout, metadata=metadata)
        try:
            async for message in call:
                yield message
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        finally:
            call.cancel()

    async def close(self) -> None:
        await self._channel.close()
