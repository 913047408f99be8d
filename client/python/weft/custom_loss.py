"""Builds the surrogate of a loss that the client computes. Does no I/O.

A loss C of the log-probabilities lp_i has the gradient dC/dlp_i. The surrogate
sum_i(-w_i lp_i), with constant w_i = -dC/dlp_i, has the same gradient. The server can
compute the surrogate: it is cross_entropy with weights w_i. So the client calls
Forward, computes C and its gradient, and calls ForwardBackward with the surrogate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from weft.datum import Datum
from weft.errors import InvalidArgument

if TYPE_CHECKING:
    import torch

from weft.types import ArrayLike, FloatArray, TrainResult

# Takes one array of logprobs per datum. Returns the loss and one array of
# dloss/dlogprob per datum. If targets are ragged, the arrays are flat.
LossFn = Callable[[list[FloatArray]], tuple[float, Sequence[ArrayLike]]]


@dataclass(frozen=True)
class Surrogate:
    """The data whose cross_entropy has the custom loss's gradient."""

    data: list[Datum]
    loss: float

    def finish(self, forward: TrainResult, result: TrainResult) -> TrainResult:
        """Returns the surrogate's `result`, but with the custom loss as "loss:sum" and
        with the logprobs of `forward`.

        The surrogate's logprobs would have gaps, because the server does not score
        tokens whose gradient is 0. Each datum's `losses` remain the surrogate's.
        """
        metrics = dict(result.metrics)
        metrics["surrogate_loss:sum"] = metrics.get("loss:sum", 0.0)
        metrics["loss:sum"] = self.loss
        results = [
            replace(scored, logprobs=first.logprobs)
            for first, scored in zip(forward.results, result.results, strict=True)
        ]
        return replace(result, results=results, metrics=metrics)


def surrogate(
    data: Sequence[Datum], forward: TrainResult, loss_fn: LossFn
) -> Surrogate:
    """Evaluates `loss_fn` and returns the surrogate. Tokens with weight 0 get no
    gradient. Raises InvalidArgument if the gradients do not fit the data."""
    # loss_fn may write to its arrays, so it gets copies.
    logprobs = [result.logprobs.copy() for result in forward.results]
    loss, gradients = loss_fn(logprobs)
    if len(gradients) != len(data):
        raise InvalidArgument(
            f"the loss returned {len(gradients)} gradients for {len(data)} data"
        )
    weighted = [
        _with_gradient(datum, gradient)
        for datum, gradient in zip(data, gradients, strict=True)
    ]
    return Surrogate(data=weighted, loss=float(loss))


def _with_gradient(datum: Datum, gradient: ArrayLike) -> Datum:
    try:
        weights = -np.asarray(gradient, dtype="<f4")
    except ValueError as error:
        raise InvalidArgument(
            f"the loss returned a gradient that is not an array of numbers: {error}"
        ) from error
    if datum.weights is not None and weights.shape == datum.weights.shape:
        weights = np.where(datum.weights == 0, np.float32(0), weights)
    return datum.with_weights(weights)


def torch_loss(fn: Callable[[list[torch.Tensor]], torch.Tensor]) -> LossFn:
    """Makes a LossFn from a torch function, which takes a list of tensors and returns
    a scalar tensor.

    Torch computes the gradient. The LossFn imports torch when it is called.
    """

    def loss_fn(logprobs: list[FloatArray]) -> tuple[float, list[ArrayLike]]:
        import torch

        leaves = [torch.from_numpy(array).requires_grad_() for array in logprobs]
        loss = fn(leaves)
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
        arrays = [
            np.zeros_like(array) if gradient is None else gradient.numpy()
            for array, gradient in zip(logprobs, gradients, strict=True)
        ]
        return float(loss.detach()), arrays

    return loss_fn
