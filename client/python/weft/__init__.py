"""Client of Weft: train and sample LoRA adapters on a remote server.

import weft

with weft.Client("127.0.0.1:50051") as client:
    adapter = client.get_or_create("mine", rank=16)
    adapter.forward_backward([weft.Datum.next_token([1, 2, 3])])
    adapter.optim_step(learning_rate=1e-4)
    print(adapter.sample([1, 2], max_tokens=8).samples[0].tokens)
"""

from weft import data
from weft.adapter import Adapter, Sampler
from weft.aio import AsyncClient
from weft.aio_adapter import AsyncAdapter, AsyncSampler
from weft.channel import Security
from weft.client import Client
from weft.custom_loss import LossFn, torch_loss
from weft.datum import Datum
from weft.errors import (
    Aborted,
    AlreadyExists,
    Cancelled,
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    NotFound,
    OutOfRange,
    PermissionDenied,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
    Unimplemented,
    WeftError,
)
from weft.retry import NO_RETRY, RetryPolicy
from weft.server_loss import ServerLoss, trace_loss
from weft.types import (
    ALL_THAT_FIT,
    AdapterInfo,
    AdapterOptions,
    CheckpointInfo,
    DatumResult,
    LoraConfig,
    LossOptions,
    ModelInfo,
    OptimOptions,
    OptimResult,
    Sample,
    SampleDelta,
    SampledSpan,
    SampleOptions,
    SampleResult,
    SaveOptions,
    ServerInfo,
    Teacher,
    TrainResult,
)

__version__ = "0.1.0"
__all__ = [
    "ALL_THAT_FIT",
    "Aborted",
    "Adapter",
    "AdapterInfo",
    "AdapterOptions",
    "AlreadyExists",
    "AsyncAdapter",
    "AsyncClient",
    "AsyncSampler",
    "Cancelled",
    "CheckpointInfo",
    "Client",
    "DataLoss",
    "Datum",
    "DatumResult",
    "DeadlineExceeded",
    "FailedPrecondition",
    "Internal",
    "InvalidArgument",
    "LoraConfig",
    "LossFn",
    "LossOptions",
    "ModelInfo",
    "NO_RETRY",
    "NotFound",
    "OptimOptions",
    "OptimResult",
    "OutOfRange",
    "PermissionDenied",
    "ResourceExhausted",
    "RetryPolicy",
    "Sample",
    "SampleDelta",
    "SampledSpan",
    "SampleOptions",
    "SampleResult",
    "Sampler",
    "SaveOptions",
    "Security",
    "ServerInfo",
    "ServerLoss",
    "Teacher",
    "TrainResult",
    "Unauthenticated",
    "Unavailable",
    "Unimplemented",
    "WeftError",
    "data",
    "torch_loss",
    "trace_loss",
]
