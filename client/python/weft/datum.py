"""Training data as token ids and numpy arrays, without protobuf."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from weft.errors import InvalidArgument
from weft.types import (
    ArrayLike,
    FloatArray,
    RoutingArray,
    Sample,
    SampledSpan,
    TokenArray,
)


def _array(name: str, values: ArrayLike, dtype: str | None = None) -> np.ndarray:
    """Returns an array. `values` may be a CPU tensor of torch, also one that requires a
    gradient or has dtype bfloat16, which numpy lacks. Raises InvalidArgument, with the
    name, for values of another kind."""
    tensor = getattr(values, "detach", None)
    try:
        if tensor is not None:
            values = tensor()
            if str(getattr(values, "dtype", "")) == "torch.bfloat16":
                values = cast(Any, values).float()
        return np.asarray(values, dtype=dtype)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidArgument(f"{name}: {error}") from None


def _tokens(name: str, values: ArrayLike) -> TokenArray:
    array = _array(name, values)
    if array.dtype.kind in "US":
        raise InvalidArgument(
            f"{name}: token ids are integers, got text; client.datum(text) makes data "
            "of it, and client.tokenizer().encode(text) token ids"
        )
    if array.size and array.dtype.kind not in "iu":
        raise InvalidArgument(f"{name}: token ids are integers, got {array.dtype}")
    if array.size and (array.min() < 0 or array.max() > 0xFFFFFFFF):
        raise InvalidArgument(
            f"{name}: token ids lie in [0, 2**32); a target that is not learnt has "
            "weight 0, not an id of its own"
        )
    return np.ascontiguousarray(array, dtype="<u4")


def token_list(name: str, values: ArrayLike) -> list[int]:
    """Returns one row of token ids as a list. Raises InvalidArgument for anything
    else."""
    array = _tokens(name, values)
    if array.ndim != 1:
        raise InvalidArgument(f"{name}: token ids in a row, got shape {array.shape}")
    return [int(token) for token in array]


def _floats(
    name: str, values: ArrayLike | None, shape: tuple[int, ...]
) -> FloatArray | None:
    if values is None:
        return None
    array = np.ascontiguousarray(_array(name, values, "<f4"))
    if array.shape != shape:
        raise InvalidArgument(
            f"{name}: shape {array.shape} differs from the targets' {shape}"
        )
    return array


def _targets(values: ArrayLike) -> tuple[TokenArray, TokenArray | None]:
    """Returns the targets as an array, and their offsets. Ragged targets become a flat
    array with offsets [N + 1]. For other targets the offsets are None."""
    name = "datum.targets"
    array = None
    with contextlib.suppress(ValueError):  # numpy refuses rows of several lengths.
        array = _array(name, values)
    if array is not None and array.dtype.kind != "O" and array.shape[1:] != (0,):
        return _tokens(name, array), None
    rows = [_array(name, row) for row in cast(Sequence[ArrayLike], values)]
    if any(row.ndim != 1 for row in rows):
        raise InvalidArgument(f"{name}: an id per token, or a list of ids per token")
    offsets = np.zeros(len(rows) + 1, dtype="<u4")
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    # Converts each row by itself, because numpy turns an empty list into floats.
    return np.concatenate([_tokens(name, row) for row in rows]), offsets


def _ragged_floats(
    name: str, values: ArrayLike | None, offsets: TokenArray
) -> FloatArray | None:
    if values is None:
        return None
    rows: list[FloatArray] = [
        _array(name, row, "<f4") for row in cast(Sequence[ArrayLike], values)
    ]
    lengths = np.diff(offsets).tolist()
    if len(rows) != len(lengths):
        raise InvalidArgument(f"{name}: {len(rows)} lists for {len(lengths)} tokens")
    for i, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        if row.shape != (length,):
            raise InvalidArgument(
                f"{name}[{i}]: shape {row.shape} differs from the targets' {(length,)}"
            )
    return np.concatenate(rows)


def _custom_inputs(values: Mapping[str, ArrayLike] | None) -> dict[str, np.ndarray]:
    inputs = {}
    for name, value in (values or {}).items():
        array = _array(f"datum.custom_inputs[{name!r}]", value)
        if array.ndim > 2 or array.dtype.kind not in "biuf":
            raise InvalidArgument(
                f"datum.custom_inputs[{name!r}]: {array.ndim} dimensions of "
                f"{array.dtype}, must be numbers in at most 2 dimensions"
            )
        dtype = "<f4" if array.dtype.kind == "f" else "<i8"
        inputs[name] = np.ascontiguousarray(array, dtype).reshape(array.shape)
    return inputs


def _routing(values: ArrayLike | None, num_tokens: int) -> RoutingArray | None:
    if values is None:
        return None
    array = _array("datum.routing", values)
    if array.ndim not in (2, 3) or len(array) != num_tokens or array.size == 0:
        raise InvalidArgument(
            f"datum.routing: shape {array.shape}, must be [{num_tokens}, L K] or "
            f"[{num_tokens}, L, K]"
        )
    if array.dtype.kind not in "iu" or array.min() < 0 or array.max() > 0xFFFF:
        raise InvalidArgument("datum.routing: experts are integers in 0..65535")
    return array.reshape(num_tokens, -1).astype("<u2")


def _support(
    values: Sequence[ArrayLike | None] | None, num_tokens: int
) -> list[TokenArray] | None:
    if values is None:
        return None
    name = "datum.support"
    rows = [_tokens(name, () if row is None else row) for row in values]
    if len(rows) != num_tokens or any(row.ndim != 1 for row in rows):
        raise InvalidArgument(
            f"{name}: {len(rows)} lists of ids for {num_tokens} tokens; a list for "
            "each token, which may be empty"
        )
    return rows


def support_offsets(support: list[TokenArray] | None) -> TokenArray | None:
    """Returns the offsets [N + 1] of the lists in Datum.support, or None."""
    if support is None:
        return None
    offsets = np.zeros(len(support) + 1, dtype="<u4")
    np.cumsum([len(ids) for ids in support], out=offsets[1:])
    return offsets


def _spans(values: Sequence[SampledSpan], num_tokens: int) -> tuple[SampledSpan, ...]:
    spans = tuple(values)
    free = 0
    for span in spans:
        if not isinstance(span, SampledSpan):
            raise InvalidArgument(
                f"datum.sampled: a {type(span).__name__}, must be a weft.SampledSpan"
            )
        end = span.start + span.length
        if span.start < free or span.length < 1 or span.offset < 0 or end > num_tokens:
            raise InvalidArgument(
                f"datum.sampled: {span} is empty, behind the {num_tokens} targets, or "
                f"not behind the span before it, which ends at {free}"
            )
        free = end
    return spans


class Datum:
    """One training sequence.

    tokens: [N] input tokens. targets: [N]; the model's output at a position scores
    the target there. cross_entropy also takes soft targets: [N, K], or ragged
    lists, one list of ids per token, which may be empty. weights, logprobs and
    advantages have the shape of the targets. routing: [N, L K] or [N, L, K], the K
    experts of each token in each of the L layers that have experts; None lets the
    router choose. teacher_tokens and teacher_offset: see with_teacher_tokens; without
    it they are None. custom_inputs: numbers, or arrays of one or two dimensions, by the
    names that a custom loss gives its inputs. support: [N] lists of increasing ids, at
    most 1024 each: the target's distribution then has only these ids, and the target
    must be one of them; an empty list or None stands for the whole vocabulary. It is
    for one target per token. So a trainer can use the distribution of a sampler with
    top_k, top_p or min_p. sampled: the targets that recorded samples have drawn,
    ascending; the `replay_*` options of a loss take experts, supports or logprobs of
    these targets from the records.

    All may be lists, numpy arrays or CPU tensors. Ragged values are stored flat, with
    target_offsets [N + 1], which otherwise is None. Raises InvalidArgument if the
    shapes do not fit.
    """

    __slots__ = (
        "tokens",
        "targets",
        "target_offsets",
        "weights",
        "logprobs",
        "advantages",
        "routing",
        "support",
        "sampled",
        "custom_inputs",
        "teacher_tokens",
        "teacher_offset",
    )

    def __init__(
        self,
        tokens: ArrayLike,
        targets: ArrayLike,
        weights: ArrayLike | None = None,
        logprobs: ArrayLike | None = None,
        advantages: ArrayLike | None = None,
        routing: ArrayLike | None = None,
        support: Sequence[ArrayLike | None] | None = None,
        sampled: Sequence[SampledSpan] = (),
        custom_inputs: Mapping[str, ArrayLike] | None = None,
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
        self.routing = _routing(routing, len(self.tokens))
        self.support = _support(support, len(self.tokens))
        self.sampled = _spans(sampled, len(self.tokens))
        self.custom_inputs = _custom_inputs(custom_inputs)
        self.teacher_tokens: TokenArray | None = None
        self.teacher_offset: int | None = None

    def __repr__(self) -> str:
        """Says how many tokens there are, not which ones."""
        learnt = self.targets if self.weights is None else np.flatnonzero(self.weights)
        return f"Datum({len(self.tokens)} tokens, {learnt.size} targets learnt)"

    def with_weights(self, weights: ArrayLike) -> Datum:
        """Returns a datum with the same tokens and targets and these weights, but
        without logprobs, advantages and custom inputs.

        weights: the shape of `targets`. Ragged targets are stored flat, so their
        weights must be flat, too. Raises InvalidArgument for another shape.
        """
        datum = copy.copy(self)
        datum.weights = _floats("datum.weights", weights, self.targets.shape)
        datum.logprobs = datum.advantages = None
        datum.custom_inputs = {}
        return datum

    def with_teacher_tokens(
        self, tokens: ArrayLike, *, offset: int | None = None
    ) -> Datum:
        """Returns a datum whose teacher reads other tokens, such as the same reply
        after another prompt.

        tokens: [M]. The output at a token is compared with the teacher's output at
        `offset` places further on. None: both end together, at M - N. Raises
        InvalidArgument for anything but token ids in a row.
        """
        array = _tokens("datum.teacher_tokens", tokens)
        if array.ndim != 1 or array.size == 0:
            raise InvalidArgument(
                f"datum.teacher_tokens: token ids in a row, got shape {array.shape}"
            )
        datum = copy.copy(self)
        datum.teacher_tokens = array
        datum.teacher_offset = offset
        return datum

    def per_token(self, values: FloatArray) -> list[FloatArray]:
        """Splits a result's values, one per target, into one view per token.

        values: the shape of `targets`, as in a DatumResult.
        """
        if self.target_offsets is None:
            return list(values)
        return np.split(values, self.target_offsets[1:-1])

    @classmethod
    def next_token(cls, tokens: ArrayLike, *, prompt_length: int = 0) -> Datum:
        """Returns a datum in which each token predicts the next one.

        tokens: [N], at least 2. The first `prompt_length` tokens are not learnt.
        Raises InvalidArgument if tokens or prompt_length are not valid.
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

    @classmethod
    def from_sample(
        cls,
        sample: Sample,
        *,
        advantage: ArrayLike | None = None,
        weight: ArrayLike = 1.0,
    ) -> Datum:
        """Turns a sample into training data. The drawn tokens are learnt and the
        prompt is not. `logprobs` holds the sampler's log-probabilities.

        advantage, weight: one number, or one for each drawn token, [S]. Without an
        advantage the datum is for cross_entropy. `forward` of such a datum, at the
        sample's temperature, returns `sample.logprobs` if the adapter has not changed:
        up to rounding, and README says where to the last bit. If the sample has
        routing or supports, the datum gets these, too. If it has a sequence_id, the
        datum's `sampled` names its drawn tokens, and a loss must use this
        (replay_logprobs=True, for example).
        Raises InvalidArgument if the sample has no prompt or no token, or if a length
        does not fit.
        """
        if not sample.prompt or not sample.tokens:
            raise InvalidArgument("sample: needs a prompt and at least one drawn token")
        tokens = _tokens("sample", [*sample.prompt, *sample.tokens])
        # Target i is token i + 1, so the prompt's last position predicts the first
        # drawn token.
        first = len(sample.prompt) - 1

        def scored(name: str, values: ArrayLike) -> FloatArray:
            row = np.zeros(len(tokens) - 1, dtype="<f4")
            array = _array(name, values, "<f4")
            if array.shape not in ((), (len(sample.tokens),)):
                raise InvalidArgument(
                    f"{name}: shape {array.shape} for {len(sample.tokens)} drawn tokens"
                )
            row[first:] = array
            return row

        return cls(
            tokens[:-1],
            tokens[1:],
            scored("weight", weight),
            scored("sample.logprobs", sample.logprobs),
            None if advantage is None else scored("advantage", advantage),
            sample.routing,
            None if sample.support is None else [*([None] * first), *sample.support],
            [SampledSpan(sample.sequence_id, first, len(sample.tokens))]
            if sample.sequence_id
            else [],
        )
