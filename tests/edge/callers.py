"""Calls that stay open while a test attacks: steps that wait for an earlier one."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc

import weft
from weft import methods
from weft._proto import training_pb2

OPTIONS = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]


def step(number: int) -> Any:
    return training_pb2.ForwardBackwardRequest(
        adapter_id="open",
        step=number,
        data=[training_pb2.Datum(tokens=[3, 4], targets=[4, 5])],
        loss=training_pb2.LossConfig(function=training_pb2.LOSS_FUNCTION_CROSS_ENTROPY),
    )


class OpenCalls:
    """Ten calls of bob, each on a connection of its own, and then step 1, without which
    none of them can end."""

    def __init__(self, target: str, security: weft.Security) -> None:
        self._channels = []
        self._calls = []
        self._metadata = security.metadata()

        def plain(target: str, options: Any) -> grpc.Channel:
            return grpc.insecure_channel(target, [*options, *OPTIONS])

        def secure(target: str, credentials: Any, options: Any) -> grpc.Channel:
            return grpc.secure_channel(target, credentials, [*options, *OPTIONS])

        for number in range(1, 12):
            channel = security.open(target, plain, secure)
            self._channels.append(channel)
            if number > 1:
                self._calls.append(self._start(channel, number))

    def _start(self, channel: grpc.Channel, number: int) -> Any:
        bound = methods.FORWARD_BACKWARD.bind(channel)
        metadata = (*self._metadata, ("weft-adapter-id", "open"))
        return bound.future(step(number), timeout=60.0, metadata=metadata)

    def ended(self) -> list[str]:
        """Returns what became of calls that should be open."""
        return [str(call.exception()) for call in self._calls if call.done()]

    def finish(self) -> None:
        """Makes the missing step. Then each call must end well."""
        self._start(self._channels[0], 1).result()
        for call in self._calls:
            call.result()

    def close(self) -> None:
        for channel in self._channels:
            channel.close()


@contextlib.contextmanager
def open_calls(
    client: Any, target: str, security: weft.Security
) -> Iterator[Callable[[], list[str]]]:
    """Bob's calls are open inside, and all of them succeed afterwards. Gives a function
    that returns what became of those that have ended."""
    client.create_adapter("open", rank=1)
    calls = OpenCalls(target, security)
    try:
        time.sleep(0.5)
        assert calls.ended() == []
        yield calls.ended
        assert calls.ended() == []
        calls.finish()
    finally:
        calls.close()
        client.adapter("open").delete()
