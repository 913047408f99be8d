"""Client of Weft: train and sample LoRA adapters on a remote server.

import weft

with weft.Client("127.0.0.1:50051") as client:
    adapter = client.create_adapter("mine", rank=16)
    adapter.forward_backward([weft.Datum.next_token([1, 2, 3])])
    adapter.optim_step(learning_rate=1e-4)
    print(adapter.sample([1, 2], max_tokens=8).samples[0].tokens)
"""

from weft.aio import AsyncAdapter, AsyncClient
from weft.channel import Security
from weft.client import Adapter, Client
from weft.custom_loss import LossFn, torch_loss
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
from weft.types import (
    AdapterInfo,
    CheckpointInfo,
    Datum,
    DatumResult,
    LoraConfig,
    ModelInfo,
    OptimResult,
    Sample,
    SampleDelta,
    SampleResult,
    ServerInfo,
    TrainResult,
)

__version__ = "0.1.0"
__all__ = [
    "Aborted",
    "Adapter",
    "AdapterInfo",
    "AlreadyExists",
    "AsyncAdapter",
    "AsyncClient",
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
    "ModelInfo",
    "NO_RETRY",
    "NotFound",
    "OptimResult",
    "OutOfRange",
    "PermissionDenied",
    "ResourceExhausted",
    "RetryPolicy",
    "Sample",
    "SampleDelta",
    "SampleResult",
    "Security",
    "ServerInfo",
    "TrainResult",
    "Unauthenticated",
    "Unavailable",
    "Unimplemented",
    "WeftError",
    "torch_loss",
]
