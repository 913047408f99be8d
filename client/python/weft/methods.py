"""The service's methods: path and message types. Stands in for gRPC stubs."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, Generic, Protocol, Self, TypeVar

import grpc
from google.protobuf import message

from weft._proto import adapters_pb2 as adapters
from weft._proto import sampling_pb2 as sampling
from weft._proto import server_pb2 as server
from weft._proto import training_pb2 as training


class Message(Protocol):
    """What protobuf's messages and RawMessage have in common."""

    def SerializeToString(self) -> bytes: ...

    @classmethod
    def FromString(cls, data: bytes, /) -> Self: ...


RequestT = TypeVar("RequestT", bound=Message)
ResponseT = TypeVar("ResponseT", bound=Message)
_RequestT = TypeVar("_RequestT", bound=message.Message)
_ResponseT = TypeVar("_ResponseT", bound=message.Message)
# What a channel makes of a method: a class for each arity, in grpc and in
# grpc.aio, without a common one.
Bound = Any


class Arity(enum.Enum):
    """Which sides of a call stream; the value is the channel's factory."""

    UNARY = "unary_unary"
    DOWNLOAD = "unary_stream"
    UPLOAD = "stream_unary"


@dataclass(frozen=True)
class Method(Generic[RequestT, ResponseT]):
    """One RPC."""

    path: str
    request_type: type[RequestT]
    response_type: type[ResponseT]
    arity: Arity = Arity.UNARY

    def bind(self, channel: grpc.Channel | grpc.aio.Channel) -> Bound:
        """The callable of a grpc or grpc.aio channel."""
        return getattr(channel, self.arity.value)(
            self.path,
            request_serializer=self.request_type.SerializeToString,
            response_deserializer=self.response_type.FromString,
        )


def _method(
    service: str,
    request_type: type[_RequestT],
    response_type: type[_ResponseT],
    arity: Arity = Arity.UNARY,
) -> Method[_RequestT, _ResponseT]:
    """Every request type is named after its method."""
    name = request_type.DESCRIPTOR.name.removesuffix("Request")
    path = f"/weft.v1.{service}/{name}"
    return Method(path, request_type, response_type, arity)


_A, _T = "AdapterService", "TrainingService"
_S, _V = "SamplingService", "ServerService"

CREATE_ADAPTER = _method(
    _A, adapters.CreateAdapterRequest, adapters.CreateAdapterResponse
)
GET_ADAPTER = _method(_A, adapters.GetAdapterRequest, adapters.GetAdapterResponse)
LIST_ADAPTERS = _method(_A, adapters.ListAdaptersRequest, adapters.ListAdaptersResponse)
DELETE_ADAPTER = _method(
    _A, adapters.DeleteAdapterRequest, adapters.DeleteAdapterResponse
)
SAVE_CHECKPOINT = _method(
    _A, adapters.SaveCheckpointRequest, adapters.SaveCheckpointResponse
)
LOAD_CHECKPOINT = _method(
    _A, adapters.LoadCheckpointRequest, adapters.LoadCheckpointResponse
)
LIST_CHECKPOINTS = _method(
    _A, adapters.ListCheckpointsRequest, adapters.ListCheckpointsResponse
)
DELETE_CHECKPOINT = _method(
    _A, adapters.DeleteCheckpointRequest, adapters.DeleteCheckpointResponse
)
PUBLISH_SNAPSHOT = _method(
    _A, adapters.PublishSnapshotRequest, adapters.PublishSnapshotResponse
)
RELEASE_SNAPSHOT = _method(
    _A, adapters.ReleaseSnapshotRequest, adapters.ReleaseSnapshotResponse
)
EXPORT_ADAPTER = _method(
    _A,
    adapters.ExportAdapterRequest,
    adapters.ExportAdapterResponse,
    Arity.DOWNLOAD,
)
IMPORT_ADAPTER = _method(
    _A,
    adapters.ImportAdapterRequest,
    adapters.ImportAdapterResponse,
    Arity.UPLOAD,
)
FORWARD_BACKWARD = _method(
    _T, training.ForwardBackwardRequest, training.ForwardBackwardResponse
)
FORWARD = _method(_T, training.ForwardRequest, training.ForwardResponse)
OPTIM_STEP = _method(_T, training.OptimStepRequest, training.OptimStepResponse)
SAMPLE = _method(_S, sampling.SampleRequest, sampling.SampleResponse)
SAMPLE_STREAM = _method(
    _S,
    sampling.SampleStreamRequest,
    sampling.SampleStreamResponse,
    Arity.DOWNLOAD,
)
GET_INFO = _method(_V, server.GetInfoRequest, server.GetInfoResponse)
DRAIN = _method(_V, server.DrainRequest, server.DrainResponse)
PROFILE = _method(_V, server.ProfileRequest, server.ProfileResponse, Arity.DOWNLOAD)


class RawMessage(bytes):
    """Bytes in the place of a message; for grpc.health.v1, whose messages need
    no stubs: the empty request asks for the whole server, and the reply
    SERVING is field 1 with value 1."""

    @classmethod
    def FromString(cls, data: bytes, /) -> RawMessage:
        return cls(data)

    def SerializeToString(self) -> bytes:
        return bytes(self)


HEALTH_CHECK: Method[RawMessage, RawMessage] = Method(
    "/grpc.health.v1.Health/Check", RawMessage, RawMessage
)
HEALTH_SERVING = b"\x08\x01"
