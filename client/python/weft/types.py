"""What goes into calls and what comes back. No protobuf types."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, Union

import numpy as np
import numpy.typing as npt

from weft.errors import InvalidArgument

FloatArray = npt.NDArray[np.float32]
TokenArray = npt.NDArray[np.uint32]
# Anything numpy reads: lists, arrays, CPU tensors.
ArrayLike = Any
FinishReason = Literal["stop", "length"]
Stop = Sequence[Union[int, Sequence[int], str, bytes]]


class LossOptions(TypedDict, total=False):
    """Loss values; what is absent takes the server's default."""

    clip_low: float | None  # ppo, cispo, gspo; default 0.8.
    clip_high: float | None  # ppo, cispo, gspo; default 1.2.
    beta: float | None  # dro; default 0.05.
    temperature: float | None  # Logits are divided by it; default 1.
    return_entropy: bool  # Also return entropies; default False.


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
    max_tokens: int | None  # None: the server's default (128).
    temperature: float  # 0 = the most likely token; default 1.
    top_k: int  # 0 = all; default 0.
    top_p: float  # Default 1.
    seed: int | None  # None: drawn by the server.
    # None: the model's end of sequence; []: never stop. Otherwise token ids,
    # sequences of token ids, and text or bytes of the decoded output.
    stop: Stop | None
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


def _tokens(name: str, values: ArrayLike) -> TokenArray:
    array = np.asarray(values)
    if array.size and array.dtype.kind not in "iu":
        raise InvalidArgument(f"{name}: token ids are integers, got {array.dtype}")
    if array.size and (array.min() < 0 or array.max() > 0xFFFFFFFF):
        raise InvalidArgument(f"{name}: token ids lie in [0, 2**32)")
    return np.ascontiguousarray(array, dtype="<u4")


def _floats(
    name: str, values: ArrayLike | None, shape: tuple[int, ...]
) -> FloatArray | None:
    if values is None:
        return None
    array = np.ascontiguousarray(values, dtype="<f4")
    if array.shape != shape:
        raise InvalidArgument(
            f"{name}: shape {array.shape} differs from the targets' {shape}"
        )
    return array


class Datum:
    """One training sequence.

    tokens: [N] input tokens. targets: [N], scored by the model's output at the
    same position; or [N, K] soft targets (cross_entropy only). weights,
    logprobs, advantages: shape of the targets. Lists, numpy arrays and CPU
    tensors will do. Raises InvalidArgument where the shapes do not fit.
    """

    __slots__ = ("tokens", "targets", "weights", "logprobs", "advantages")

    def __init__(
        self,
        tokens: ArrayLike,
        targets: ArrayLike,
        weights: ArrayLike | None = None,
        logprobs: ArrayLike | None = None,
        advantages: ArrayLike | None = None,
    ) -> None:
        self.tokens = _tokens("datum.tokens", tokens)
        self.targets = _tokens("datum.targets", targets)
        if self.tokens.ndim != 1 or self.targets.ndim not in (1, 2):
            raise InvalidArgument("datum: tokens are [N], targets [N] or [N, K]")
        if len(self.tokens) != len(self.targets):
            raise InvalidArgument(
                f"datum.targets: {len(self.targets)} positions for "
                f"{len(self.tokens)} tokens"
            )
        shape = self.targets.shape
        self.weights = _floats("datum.weights", weights, shape)
        self.logprobs = _floats("datum.logprobs", logprobs, shape)
        self.advantages = _floats("datum.advantages", advantages, shape)

    @classmethod
    def next_token(cls, tokens: ArrayLike, *, prompt_length: int = 0) -> "Datum":
        """A sequence to learn by heart: each token predicts the next one.

        The first `prompt_length` tokens are read but not learnt.
        """
        array = _tokens("tokens", tokens)
        if array.ndim != 1 or len(array) < 2:
            raise InvalidArgument("tokens: next_token needs at least 2 in a row")
        if not 0 <= prompt_length <= len(array):
            raise InvalidArgument(
                f"prompt_length {prompt_length} is not in 0..{len(array)}"
            )
        weights = np.ones(len(array) - 1, dtype="<f4")
        weights[: max(prompt_length - 1, 0)] = 0.0
        return cls(array[:-1], array[1:], weights)


@dataclass(frozen=True)
class DatumResult:
    """Results of one datum, each of the shape of its targets.

    Positions of weight 0 are not scored: they read 0. entropies is [N], and
    None unless asked for.
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
    """One finished sample; the stop token is included."""

    tokens: list[int]
    logprobs: FloatArray
    finish_reason: FinishReason | None
    top_logprobs: list[list[tuple[int, float]]]  # Empty unless asked for.


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
