"""Losses that the client computes: the pure parts.

A loss C of the log-probabilities has the gradient dC/dlp_i. The surrogate
sum_i(-w_i lp_i) with w_i = -dC/dlp_i, held constant, has the same one, and it
is the server's cross_entropy. So: Forward, C and its gradient here, then
ForwardBackward of the surrogate.
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

# Per-datum logprobs -> (loss, per-datum dloss/dlogprob). Those of ragged targets
# are one flat array here.
LossFn = Callable[[list[FloatArray]], tuple[float, Sequence[ArrayLike]]]


@dataclass(frozen=True)
class Surrogate:
    """The data whose cross_entropy has the custom loss's gradient."""

    data: list[Datum]
    loss: float

    def finish(self, forward: TrainResult, result: TrainResult) -> TrainResult:
        """The custom loss's metrics and every logprob that Forward scored.

        The surrogate leaves tokens without gradient unscored, so its own
        logprobs have holes.
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
    """Evaluates `loss_fn`. Tokens of weight 0 stay out of the gradient."""
    # Copies, so that the loss may write to them.
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
            f"the loss returned a gradient that is no array of numbers: {error}"
        ) from error
    if datum.weights is not None and weights.shape == datum.weights.shape:
        weights = np.where(datum.weights == 0, np.float32(0), weights)
    return datum.with_weights(weights)


def torch_loss(fn: Callable[[list[torch.Tensor]], torch.Tensor]) -> LossFn:
    """Wraps a loss written with torch: list of tensors -> scalar tensor.

    Torch differentiates it. Imports torch when called.
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
