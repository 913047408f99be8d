"""Makes single RPCs with every field as given. It does not check fields, number steps
or repeat calls."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import grpc

import weft  # noqa: F401  Generates weft._proto if it is missing.
from weft import methods
from weft._proto import adapters_pb2, sampling_pb2, training_pb2


@dataclass(frozen=True)
class Outcome:
    """The outcome of a call. `reply` is set if the code is OK."""

    code: str
    message: str = ""
    reply: Any = None
    trailers: dict[str, str] = field(default_factory=dict)

    @property
    def replayed(self) -> bool:
        return self.trailers.get("weft-replayed") == "1"


class Raw:
    """A plain channel to a daemon, used as a context manager."""

    def __init__(self, address: str, token: str = ""):
        self._metadata = [("authorization", f"Bearer {token}")] if token else []
        # The client's default limit would refuse large replies.
        options = [("grpc.max_receive_message_length", -1)]
        self._channel = grpc.insecure_channel(address, options=options)

    def __enter__(self) -> Raw:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._channel.close()

    def call(self, method: Any, request: Any, timeout: float = 60.0) -> Outcome:
        """Makes one RPC with a single reply. A method that streams requests takes an
        iterable of messages as `request`."""
        bound = method.bind(self._channel)
        try:
            reply, call = bound.with_call(
                request, timeout=timeout, metadata=self._metadata
            )
        except grpc.RpcError as error:
            return _failed(error)
        return Outcome("OK", "", reply, _text(call.trailing_metadata()))

    def drain_stream(self, method: Any, request: Any, timeout: float) -> Outcome:
        """Makes one server-streaming RPC. `reply` is the list of messages."""
        try:
            messages = list(method.bind(self._channel)(request, timeout=timeout))
        except grpc.RpcError as error:
            return _failed(error)
        return Outcome("OK", "", messages)

    def forward_backward(self, adapter_id: str, data: Any, **values: Any) -> Outcome:
        loss = values.pop("loss", {"function": 1})
        timeout = values.pop("timeout", 60.0)
        request = training_pb2.ForwardBackwardRequest(
            adapter_id=adapter_id, data=data, loss=loss, **values
        )
        return self.call(methods.FORWARD_BACKWARD, request, timeout)

    def forward(self, adapter_id: str, data: Any, **values: Any) -> Outcome:
        loss = values.pop("loss", {"function": 1})
        request = training_pb2.ForwardRequest(
            adapter_id=adapter_id, data=data, loss=loss, **values
        )
        return self.call(methods.FORWARD, request)

    def optim_step(self, adapter_id: str, **values: Any) -> Outcome:
        timeout = values.pop("timeout", 60.0)
        request = training_pb2.OptimStepRequest(adapter_id=adapter_id, **values)
        return self.call(methods.OPTIM_STEP, request, timeout)

    def sample(self, prompt: Any, **values: Any) -> Outcome:
        request = sampling_pb2.SampleRequest(prompt=prompt, **values)
        return self.call(methods.SAMPLE, request)

    def create(self, adapter_id: str, **config: Any) -> Outcome:
        request = adapters_pb2.CreateAdapterRequest(
            adapter_id=adapter_id, config=config or None
        )
        return self.call(methods.CREATE_ADAPTER, request)

    def load(self, adapter_id: str, name: str, source: str = "") -> Outcome:
        """The load creates the adapter if it does not exist."""
        request = adapters_pb2.LoadCheckpointRequest(
            adapter_id=adapter_id, source_adapter_id=source, name=name
        )
        return self.call(methods.LOAD_CHECKPOINT, request)

    def import_files(
        self, adapter_id: str, files: Iterable[tuple[str, bytes]]
    ) -> Outcome:
        request = adapters_pb2.ImportAdapterRequest
        parts = [request(options={"adapter_id": adapter_id})]
        parts += [request(chunk={"name": n, "data": d}) for n, d in files]
        return self.call(methods.IMPORT_ADAPTER, iter(parts))


def _text(metadata: Any) -> dict[str, str]:
    return {key: value for key, value in metadata or () if isinstance(value, str)}


def _failed(error: Any) -> Outcome:
    return Outcome(
        error.code().name, error.details() or "", None, _text(error.trailing_metadata())
    )


def datum(tokens: Iterable[int], **values: Any) -> dict[str, Any]:
    """Returns the fields of a datum that scores every next token."""
    ids = [int(token) for token in tokens]
    return {"tokens": ids[:-1], "targets": ids[1:], **values}
