"""What goes into calls and what comes back. No protobuf types."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

import numpy as np
import numpy.typing as npt

from weft.errors import InvalidArgument

FloatArray = npt.NDArray[np.float32]
TokenArray = npt.NDArray[np.uint32]
# Anything numpy reads: lists, arrays, CPU tensors.
ArrayLike = Any
# FloatArray of the targets' shape; of ragged targets a list, one per token.
PerTarget = Any
FinishReason = Literal["stop", "length"]
Stop = Sequence[int | Sequence[int] | str | bytes]


class LossOptions(TypedDict, total=False):
    """Loss values; what is absent takes the server's default."""

    clip_low: float | None  # ppo, cispo, gspo; default 0.8.
    clip_high: float | None  # ppo, cispo, gspo; default 1.2.
    beta: float | None  # dro; default 0.05.
    temperature: float | None  # Logits are divided by it; default 1.
    return_entropy: bool  # Also return entropies; default False.
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


def _targets(values: ArrayLike) -> tuple[TokenArray, TokenArray | None]:
    """The targets and, for ragged ones (then flat), their offsets [N + 1]."""
    name = "datum.targets"
    array = None
    with contextlib.suppress(ValueError):  # Rows of several lengths.
        array = np.asarray(values)
    if array is not None and array.dtype.kind != "O" and array.shape[1:] != (0,):
        return _tokens(name, array), None
    rows = [np.asarray(row) for row in values]
    if any(row.ndim != 1 for row in rows):
        raise InvalidArgument(f"{name}: an id per token, or a list of ids per token")
    offsets = np.zeros(len(rows) + 1, dtype="<u4")
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    # Each by itself: an empty list is one of floats to numpy.
    return np.concatenate([_tokens(name, row) for row in rows]), offsets


def _ragged_floats(
    name: str, values: ArrayLike | None, offsets: TokenArray
) -> FloatArray | None:
    if values is None:
        return None
    rows: list[FloatArray] = [np.asarray(row, dtype="<f4") for row in values]
    lengths = np.diff(offsets).tolist()
    if len(rows) != len(lengths):
        raise InvalidArgument(f"{name}: {len(rows)} lists for {len(lengths)} tokens")
    for i, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        if row.shape != (length,):
            raise InvalidArgument(
                f"{name}[{i}]: shape {row.shape} differs from the targets' {(length,)}"
            )
    return np.concatenate(rows)


class Datum:
    """One training sequence.

    tokens: [N] input tokens. targets: [N], scored by the model's output at the
    same position; or soft targets (cross_entropy only): [N, K], or ragged, a
    list of ids for each token, which may be empty. weights, logprobs,
    advantages: shape of the targets. Lists, numpy arrays and CPU tensors will
    do. Ragged ones are kept flat, with target_offsets [N + 1], else None. Raises
    InvalidArgument where the shapes do not fit.
    """

    __slots__ = (
        "tokens",
        "targets",
        "target_offsets",
        "weights",
        "logprobs",
        "advantages",
    )

    def __init__(
        self,
        tokens: ArrayLike,
        targets: ArrayLike,
        weights: ArrayLike | None = None,
        logprobs: ArrayLike | None = None,
        advantages: ArrayLike | None = None,
    ) -> None:
        self.tokens = _tokens("datum.tokens", tokens)
        self.targets, self.target_offsets = _targets(targets)
        if self.tokens.ndim != 1 or self.targets.ndim not in (1, 2):
            raise InvalidArgument(
                "datum: tokens are [N], targets [N], [N, K] or N lists"
            )
        offsets = self.target_offsets
        positions = len(self.targets) if offsets is None else len(offsets) - 1
        if len(self.tokens) != positions:
            raise InvalidArgument(
                f"datum.targets: {positions} positions for {len(self.tokens)} tokens"
            )

        def floats(name: str, values: ArrayLike | None) -> FloatArray | None:
            if offsets is None:
                return _floats(name, values, self.targets.shape)
            return _ragged_floats(name, values, offsets)

        self.weights = floats("datum.weights", weights)
        self.logprobs = floats("datum.logprobs", logprobs)
        self.advantages = floats("datum.advantages", advantages)

    def with_weights(self, weights: ArrayLike) -> Datum:
        """The same tokens and targets, with weights of the shape of `targets`
        (flat for ragged ones) and nothing else."""
        datum = copy.copy(self)
        datum.weights = _floats("datum.weights", weights, self.targets.shape)
        datum.logprobs = datum.advantages = None
        return datum

    def per_target(self, flat: FloatArray) -> PerTarget:
        """Views of one number per target, in the shape that the targets had."""
        if self.target_offsets is None:
            return flat.reshape(self.targets.shape)
        return np.split(flat, self.target_offsets[1:-1])

    @classmethod
    def next_token(cls, tokens: ArrayLike, *, prompt_length: int = 0) -> Datum:
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
    """Results of one datum, each in the shape of the datum's targets.

    Results of ragged targets are a list with one array per token. Positions of
    weight 0 are not scored and read 0. `entropies` is [N], or None unless the
    call asked for it.
    """

    logprobs: PerTarget
    losses: PerTarget
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
