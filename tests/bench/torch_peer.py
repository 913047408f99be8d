"""What the peers' programs share: how they measure themselves, and the heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import machine
import timing
import torch
from torch.utils.checkpoint import checkpoint

GEMM_SHAPE = (4096, 576, 1536)  # Rows, in, out: SmolLM2's MLP.

T = TypeVar("T")


def measure(step: Callable[[], T], reps: int) -> tuple[dict[str, Any], T]:
    """Seconds of `reps` steps after a first one, the memory they needed, torch's
    GEMM rate and version; and what the first step gave."""
    # The first checkpoint of a process imports a compiler: code, not activations.
    checkpoint(torch.neg, torch.zeros(1), use_reentrant=False)
    memory = machine.PeakMemory()
    first = step()
    run = {
        "seconds": timing.each(step, reps),
        **memory.read(),
        "gemm_flops_per_second": gemm_rate(),
        "versions": {"torch": torch.__version__},
    }
    return run, first


def gradient_norm(model: torch.nn.Module) -> float:
    """Of what `model` trains now, which leaves other adapters' gradients out; the
    squares are summed in f64."""
    squares = [
        parameter.grad.double().square().sum()
        for parameter in model.parameters()
        if parameter.requires_grad and parameter.grad is not None
    ]
    return float(torch.stack(squares).sum().sqrt())


def full_logprobs(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    """[N] of targets [N] from hidden [N, H], with logits of all rows at once."""
    logprobs = torch.log_softmax(hidden @ weight.T, dim=-1)
    return logprobs.gather(-1, targets.unsqueeze(-1)).squeeze(-1)


def selective_logprobs(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    """As TRL's selective_log_softmax for f32: the target's logit less a logsumexp
    that is taken row by row, so that no log_softmax of all rows is kept.

    Written here because importing TRL's wants pandas and datasets.
    """
    logits = hidden @ weight.T
    selected = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return selected - torch.stack([torch.logsumexp(row, dim=-1) for row in logits])


def chunked_logprobs(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, chunk: int
) -> torch.Tensor:
    """full_logprobs of `chunk` rows at a time, run again in the backward pass: no
    more than one chunk's logits at any time."""
    parts = [
        checkpoint(full_logprobs, rows, weight, wanted, use_reentrant=False)
        for rows, wanted in zip(hidden.split(chunk), targets.split(chunk))
    ]
    return torch.cat(parts)


def gemm_rate() -> float:
    """Floating-point operations per second of torch's f32 matrix product."""
    rows, inner, columns = GEMM_SHAPE
    left, right = torch.randn(rows, inner), torch.randn(inner, columns)
    output = torch.empty(rows, columns)
    seconds = timing.each(lambda: torch.mm(left, right, out=output), 20)
    return 2.0 * rows * inner * columns / min(seconds)
