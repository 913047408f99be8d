"""What goes into calls and what comes back. No protobuf types."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]
TokenArray = npt.NDArray[np.uint32]
# Anything numpy reads: lists, arrays, CPU tensors.
ArrayLike = npt.ArrayLike
FinishReason = Literal["stop", "length"]
# Several, or one text or byte string.
Stop = str | bytes | Sequence[int | Sequence[int] | str | bytes]


class LossOptions(TypedDict, total=False):
    """Loss values; what is absent takes the server's default."""

    clip_low: float | None  # ppo, cispo, gspo; default 0.8.
    clip_high: float | None  # ppo, cispo, gspo; default 1.2.
    beta: float | None  # dro; default 0.05.
    temperature: float | None  # Logits are divided by it; default 1.
    return_entropy: bool  # Also return entropies; default False.
    # Also return what tokens of weight 0 have; their losses are 0. Default False.
    score_all: bool
    # Backward leaves out what is less likely than this; default 0, exact.
    gradient_filter: float


class OptimOptions(TypedDict, total=False):
    """AdamW values of one step; what is absent takes the server's default."""

    learning_rate: float  # Default 1e-4.
    beta1: float  # Default 0.9.
    beta2: float  # Default 0.95.
    eps: float  # Default 1e-12.
    weight_decay: float  # Decoupled; default 0.
    max_grad_norm: float  # 0 = no clipping; default 0.


class SampleOptions(TypedDict, total=False):
    """How to draw samples."""

    num_samples: int  # Default 1.
    max_tokens: int | None  # At least 1; None: the server's default (128).
    temperature: float  # 0 = the most likely token; default 1.
    top_k: int  # 0 = all; default 0.
    top_p: float  # Default 1.
    seed: int | None  # None: drawn by the server.
    # What ends a sample beside the model's end of sequence: token ids, sequences
    # of token ids, and text or bytes of the decoded output.
    stop: Stop | None
    ignore_eos: bool  # The end of sequence does not end a sample; default False.
    prompt_logprobs: bool  # Also score the prompt; default False.
    top_logprobs: int  # Most likely tokens per position; default 0.


@dataclass(frozen=True)
class ModelInfo:
    """The base model."""

    name: str
    architecture: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    context_length: int
    eos_token_ids: list[int]
    num_parameters: int
    dtype: str


@dataclass(frozen=True)
class ServerInfo:
    """What a server runs and accepts."""

    version: str
    device: str
    model: ModelInfo
    max_adapters: int
    num_adapters: int
    max_rank: int
    max_data_per_request: int
    max_tokens_per_request: int
    max_samples: int
    max_message_bytes: int
    draining: bool
    losses: list[str]  # Those that training takes.
    string_stops: bool  # Stops may be text.
    max_adapters_per_tenant: int
    max_adapter_bytes_per_tenant: int  # 0 = no limit.
    max_queue_requests: int  # That may wait, of all tenants.
    max_queue_tokens: int
    max_queue_requests_per_tenant: int
    max_queue_tokens_per_tenant: int
    reorder_window: int  # Steps that a number may run ahead.
    replay_window: int  # Latest steps whose replies are kept.
    max_targets_per_token: int
    max_stop_entries: int
    max_top_logprobs: int


@dataclass(frozen=True)
class LoraConfig:
    """Shape of an adapter, every default filled in by the server."""

    rank: int
    alpha: float
    target_modules: list[str]
    seed: int | None


@dataclass(frozen=True)
class AdapterInfo:
    """What the server knows about one adapter."""

    adapter_id: str
    config: LoraConfig
    last_step: int
    optim_steps: int
    version: int
    num_parameters: int
    resident_bytes: int
    snapshots: list[str]
    created_at: float  # Unix time in seconds.
    tenant: str
    location: str  # Where the server keeps its tensors: "device", "host" or "disk".


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint on the server's disk."""

    adapter_id: str
    name: str
    last_step: int
    optim_steps: int
    size_bytes: int
    created_at: float  # Unix time in seconds.
    config: LoraConfig


@dataclass(frozen=True)
class DatumResult:
    """Results of one datum, each in the shape of `datum.targets`.

    That is [N], [N, K], or flat for ragged targets: `datum.per_token` splits it.
    Positions of weight 0 are not scored and read 0. `entropies` is [N], or None
    unless the call asked for it.
    """

    logprobs: FloatArray
    losses: FloatArray
    entropies: FloatArray | None = None


@dataclass(frozen=True)
class TrainResult:
    """Results of Forward or ForwardBackward."""

    results: list[DatumResult]
    metrics: dict[str, float]  # Named `name:reduction`; has "loss:sum".
    step: int  # 0 for the base model.
    replayed: bool  # The server had run this step before.


@dataclass(frozen=True)
class OptimResult:
    """Result of OptimStep."""

    grad_norm: float  # L2, before clipping.
    version: int
    step: int
    replayed: bool


@dataclass(frozen=True)
class Sample:
    """One finished sample; the stop token is included.

    `Datum.from_sample` makes training data of it.
    """

    tokens: list[int]  # [S] drawn.
    logprobs: FloatArray  # [S] under the distribution at the call's temperature.
    finish_reason: FinishReason | None
    top_logprobs: list[list[tuple[int, float]]]  # Empty unless asked for.
    prompt: Sequence[int] = ()  # [P]; what the tokens continue.


@dataclass(frozen=True)
class SampleResult:
    """All samples of a prompt."""

    samples: list[Sample]
    prompt_logprobs: FloatArray | None  # [P]; the first is 0, meaning nothing.
    version: int  # 0 for the base model.


@dataclass(frozen=True)
class SampleDelta:
    """Tokens drawn since the last delta of the same sample."""

    sample_index: int
    tokens: list[int]
    logprobs: FloatArray
    finish_reason: FinishReason | None  # Set in the sample's last delta.
    top_logprobs: list[list[tuple[int, float]]]
    prompt_logprobs: FloatArray | None  # In the first delta, when asked for.
    version: int
