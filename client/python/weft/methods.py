"""The service's methods with their paths and message types, instead of gRPC stubs."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import grpc
from google.protobuf import wrappers_pb2
from google.protobuf.message import Message

from weft._proto import adapters_pb2 as adapters
from weft._proto import sampling_pb2 as sampling
from weft._proto import server_pb2 as server
from weft._proto import training_pb2 as training

RequestT = TypeVar("RequestT", bound=Message)
ResponseT = TypeVar("ResponseT", bound=Message)
# A method bound to a channel. grpc and grpc.aio have a class of their own for each
# arity, and these classes have no common base.
Bound = Any


class Arity(enum.Enum):
    """Says which side of a call streams. The value names a method of the channel."""

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

    @property
    def name(self) -> str:
        """Returns the last part of the path."""
        return self.path.rpartition("/")[2]

    def bind(self, channel: grpc.Channel | grpc.aio.Channel) -> Bound:
        """Returns a function that performs this RPC on the channel."""
        return getattr(channel, self.arity.value)(
            self.path,
            request_serializer=self.request_type.SerializeToString,
            response_deserializer=self.response_type.FromString,
        )


def _method(
    service: str,
    request_type: type[RequestT],
    response_type: type[ResponseT],
    arity: Arity = Arity.UNARY,
) -> Method[RequestT, ResponseT]:
    """Returns the method that is named like its request type without "Request"."""
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
DOWNLOAD_CHECKPOINT = _method(
    _A,
    adapters.DownloadCheckpointRequest,
    adapters.DownloadCheckpointResponse,
    Arity.DOWNLOAD,
)
UPLOAD_CHECKPOINT = _method(
    _A,
    adapters.UploadCheckpointRequest,
    adapters.UploadCheckpointResponse,
    Arity.UPLOAD,
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
GET_TOKENIZER = _method(
    _V, server.GetTokenizerRequest, server.GetTokenizerResponse, Arity.DOWNLOAD
)
DRAIN = _method(_V, server.DrainRequest, server.DrainResponse)
UNDRAIN = _method(_V, server.UndrainRequest, server.UndrainResponse)
PROFILE = _method(_V, server.ProfileRequest, server.ProfileResponse, Arity.DOWNLOAD)

# The wrappers have the fields of HealthCheckRequest and HealthCheckResponse, so the
# client needs no stubs of grpc.health.v1.
HEALTH_CHECK = Method(
    "/grpc.health.v1.Health/Check", wrappers_pb2.StringValue, wrappers_pb2.Int32Value
)
HEALTH_SERVING = 1
