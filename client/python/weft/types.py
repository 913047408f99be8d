"""The options that calls take and the results that they return, without protobuf."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]
TokenArray = npt.NDArray[np.uint32]
RoutingArray = npt.NDArray[np.uint16]
# Anything that numpy reads: lists, arrays, CPU tensors.
ArrayLike = npt.ArrayLike
FinishReason = Literal["stop", "length"]
# Several stop entries, or one text or byte string.
Stop = str | bytes | Sequence[int | Sequence[int] | str | bytes]


class LossOptions(TypedDict, total=False):
    """Settings of a loss. An absent setting takes the server's default."""

    clip_low: float | None  # For ppo, cispo and gspo; default 0.8.
    clip_high: float | None  # For ppo, cispo and gspo; default 1.2.
    beta: float | None  # For dro; default 0.05.
    temperature: float | None  # Logits are divided by it; default 1.
    return_entropy: bool  # Also returns entropies, in nats; default False.
    # Also returns the logprobs and entropies of tokens with weight 0; their losses
    # stay 0. Default False.
    score_all: bool
    # Also returns the experts of every token; for models with experts. Default False.
    return_routing: bool
    # For each scored token, the backward pass skips a block of the vocabulary if all
    # probabilities in it are below this value. Default 0: the gradient is exact.
    gradient_filter: float


class OptimOptions(TypedDict, total=False):
    """AdamW's settings for one step. An absent setting takes the server's default."""

    learning_rate: float  # Default 1e-4.
    beta1: float  # Default 0.9.
    beta2: float  # Default 0.95.
    eps: float  # Default 1e-12.
    weight_decay: float  # Decoupled from the gradient; default 0.
    max_grad_norm: float  # Clips the gradient's L2 norm; default 0: no clipping.


class SampleOptions(TypedDict, total=False):
    """How to draw samples."""

    num_samples: int  # Default 1.
    max_tokens: int | None  # At least 1; None: the server's default (128).
    temperature: float  # 0 takes the most likely token; default 1.
    top_k: int  # Draws from the k most likely tokens; default 0: from all.
    top_p: float  # Total probability of the likeliest tokens to draw from; default 1.
    seed: int | None  # None: the server draws a seed.
    # Token ids, sequences of token ids, and text or bytes of the decoded output. Each
    # ends a sample, as the model's end of sequence does.
    stop: Stop | None
    ignore_eos: bool  # The end of sequence does not end a sample; default False.
    prompt_logprobs: bool  # Also returns the prompt's logprobs; default False.
    top_logprobs: int  # Also returns this many likely tokens per position; default 0.
    # Also returns this many likely tokens per position of the prompt; default 0.
    prompt_top_logprobs: int
    # Also returns the experts of every token; for models with experts. Default False.
    return_routing: bool


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
    num_experts: int  # In each layer with experts; 0: a dense model.
    experts_per_token: int
    expert_layers: int  # How many layers have experts.


@dataclass(frozen=True)
class ServerInfo:
    """The model that a server runs, and its limits."""

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
    losses: list[str]  # The losses that training accepts.
    string_stops: bool  # Whether stop entries may be text or bytes.
    max_adapters_per_tenant: int
    max_adapter_bytes_per_tenant: int  # 0 = no limit.
    max_queue_requests: int  # The most requests of all tenants that may wait.
    max_queue_tokens: int
    max_queue_requests_per_tenant: int
    max_queue_tokens_per_tenant: int
    reorder_window: int  # How far a step may be ahead of the lowest missing step.
    replay_window: int  # How many of an adapter's latest replies the server keeps.
    max_targets_per_token: int
    max_stop_entries: int
    max_top_logprobs: int  # Also the limit of prompt_top_logprobs.


@dataclass(frozen=True)
class LoraConfig:
    """An adapter's shape. The server has filled in every default."""

    rank: int
    alpha: float
    target_modules: list[str]
    seed: int | None


@dataclass(frozen=True)
class AdapterInfo:
    """What the server knows about one adapter."""

    adapter_id: str
    config: LoraConfig
    last_step: int  # Counts the steps that made the state.
    next_step: int  # The number of the next step; it never goes back.
    optim_steps: int
    version: int
    num_parameters: int
    resident_bytes: int
    snapshots: list[str]
    created_at: float  # Unix time in seconds.
    tenant: str
    location: str  # Where the adapter's tensors are: "device", "host" or "disk".
    epoch: int  # Tells the adapter from earlier ones of the same name.
    durable_step: int  # Steps up to this number survive the end of the server.
    durability: str  # "memory" or "step", as in create_adapter.
    restoring: bool  # A restarted server lists it, but has not restored it yet.


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
    kind: str  # "train", or "sampler": weights only.
    metadata: dict[str, str]
    expires_at: float | None  # Unix time in seconds; None: never.
    tenant: str
    base_model: str  # Name of the base model.
    base_fingerprint: str


class SaveOptions(TypedDict, total=False):
    """Optional properties of a checkpoint.

    kind: "train", or "sampler", which holds only weights. metadata: the caller's own
    entries. ttl_seconds: the server deletes the checkpoint after that time; 0: never.
    keep_newest: after the save, the server deletes the adapter's oldest checkpoints of
    the same kind, so that this many remain; 0 deletes none.
    """

    kind: str
    metadata: Mapping[str, str]
    ttl_seconds: int
    keep_newest: int


@dataclass(frozen=True)
class DatumResult:
    """The results of one datum.

    `logprobs` and `losses` have the shape of `datum.targets`: [N] or [N, K]. For
    ragged targets they are flat, and `datum.per_token` splits them. Targets with
    weight 0 have loss 0. Unless the call set score_all, their logprobs are 0 too, and
    a token with only such targets has entropy 0. `entropies` is [N]. `routing` is
    [N, L K], in the form of Datum.routing. Each of the two is None if the call did not
    ask for it.
    """

    logprobs: FloatArray
    losses: FloatArray
    entropies: FloatArray | None = None
    routing: RoutingArray | None = None


@dataclass(frozen=True)
class TrainResult:
    """The result of a forward or a forward_backward call."""

    results: list[DatumResult]
    metrics: dict[str, float]  # Keys: `name:reduction`, always with "loss:sum".
    step: int  # The step's number; 0 for the base model.
    replayed: bool  # Whether this is the stored reply of a step that ran before.


@dataclass(frozen=True)
class OptimResult:
    """The result of an optim_step call."""

    grad_norm: float  # The gradient's L2 norm before clipping.
    version: int
    step: int
    replayed: bool


@dataclass(frozen=True)
class Sample:
    """One finished sample.

    `Datum.from_sample` turns it into training data.
    """

    tokens: list[int]  # [S] drawn tokens, including the stop token.
    # [S] log-probabilities before top_k and top_p, at the call's temperature. If the
    # temperature is 0, they are at temperature 1.
    logprobs: FloatArray
    finish_reason: FinishReason | None
    top_logprobs: list[list[tuple[int, float]]]  # Empty unless asked for.
    prompt: Sequence[int] = ()  # [P]; the prompt that the tokens continue.
    # [P + S - 1, L K], if asked for: the experts of the prompt and of all drawn
    # tokens but the last, in the form of Datum.routing.
    routing: RoutingArray | None = None


@dataclass(frozen=True)
class SampleResult:
    """All samples of one prompt."""

    samples: list[Sample]
    prompt_logprobs: FloatArray | None  # [P]; the first is 0 and has no meaning.
    # If asked for, [P] with an empty first entry; otherwise an empty list.
    prompt_top_logprobs: list[list[tuple[int, float]]]
    version: int  # The version of the weights; 0 for the base model.


@dataclass(frozen=True)
class SampleDelta:
    """Tokens drawn since the last delta of the same sample."""

    sample_index: int
    tokens: list[int]
    logprobs: FloatArray
    finish_reason: FinishReason | None  # Set in the sample's last delta.
    top_logprobs: list[list[tuple[int, float]]]
    # Set in the first delta, if requested.
    prompt_logprobs: FloatArray | None
    prompt_top_logprobs: list[list[tuple[int, float]]]
    version: int
    # [(P + S - 1) L K] in the sample's last delta, if requested: Sample.routing, flat.
    routing: RoutingArray | None = None
