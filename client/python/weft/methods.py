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
    request_type: type[RequestT], response_type: type[ResponseT]
) -> Method[RequestT, ResponseT]:
    """Returns the method that is named like its request type without "Request". Its
    service is the one of the type's .proto file."""
    described = request_type.DESCRIPTOR
    (service,) = described.file.services_by_name.values()
    rpc = service.methods_by_name[described.name.removesuffix("Request")]
    arity = Arity.UNARY
    if rpc.server_streaming:
        arity = Arity.DOWNLOAD
    elif rpc.client_streaming:
        arity = Arity.UPLOAD
    path = f"/{service.full_name}/{rpc.name}"
    return Method(path, request_type, response_type, arity)


CREATE_ADAPTER = _method(adapters.CreateAdapterRequest, adapters.CreateAdapterResponse)
GET_ADAPTER = _method(adapters.GetAdapterRequest, adapters.GetAdapterResponse)
LIST_ADAPTERS = _method(adapters.ListAdaptersRequest, adapters.ListAdaptersResponse)
DELETE_ADAPTER = _method(adapters.DeleteAdapterRequest, adapters.DeleteAdapterResponse)
MOVE_ADAPTER = _method(adapters.MoveAdapterRequest, adapters.MoveAdapterResponse)
SAVE_CHECKPOINT = _method(
    adapters.SaveCheckpointRequest, adapters.SaveCheckpointResponse
)
LOAD_CHECKPOINT = _method(
    adapters.LoadCheckpointRequest, adapters.LoadCheckpointResponse
)
LIST_CHECKPOINTS = _method(
    adapters.ListCheckpointsRequest, adapters.ListCheckpointsResponse
)
DELETE_CHECKPOINT = _method(
    adapters.DeleteCheckpointRequest, adapters.DeleteCheckpointResponse
)
SET_CHECKPOINT_TTL = _method(
    adapters.SetCheckpointTtlRequest, adapters.SetCheckpointTtlResponse
)
DOWNLOAD_CHECKPOINT = _method(
    adapters.DownloadCheckpointRequest, adapters.DownloadCheckpointResponse
)
UPLOAD_CHECKPOINT = _method(
    adapters.UploadCheckpointRequest, adapters.UploadCheckpointResponse
)
PUBLISH_SNAPSHOT = _method(
    adapters.PublishSnapshotRequest, adapters.PublishSnapshotResponse
)
RELEASE_SNAPSHOT = _method(
    adapters.ReleaseSnapshotRequest, adapters.ReleaseSnapshotResponse
)
EXPORT_ADAPTER = _method(adapters.ExportAdapterRequest, adapters.ExportAdapterResponse)
IMPORT_ADAPTER = _method(adapters.ImportAdapterRequest, adapters.ImportAdapterResponse)
FORWARD_BACKWARD = _method(
    training.ForwardBackwardRequest, training.ForwardBackwardResponse
)
FORWARD = _method(training.ForwardRequest, training.ForwardResponse)
OPTIM_STEP = _method(training.OptimStepRequest, training.OptimStepResponse)
REPORT_METRICS = _method(training.ReportMetricsRequest, training.ReportMetricsResponse)
SAMPLE = _method(sampling.SampleRequest, sampling.SampleResponse)
SAMPLE_STREAM = _method(sampling.SampleStreamRequest, sampling.SampleStreamResponse)
GET_INFO = _method(server.GetInfoRequest, server.GetInfoResponse)
GET_TOKENIZER = _method(server.GetTokenizerRequest, server.GetTokenizerResponse)
DRAIN = _method(server.DrainRequest, server.DrainResponse)
UNDRAIN = _method(server.UndrainRequest, server.UndrainResponse)
PROFILE = _method(server.ProfileRequest, server.ProfileResponse)

# The wrappers have the fields of HealthCheckRequest and HealthCheckResponse, so the
# client needs no stubs of grpc.health.v1.
HEALTH_CHECK = Method(
    "/grpc.health.v1.Health/Check", wrappers_pb2.StringValue, wrappers_pb2.Int32Value
)
HEALTH_SERVING = 1
