"""What the peers' programs share: how they measure themselves, and the heads."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import machine
import timing
import torch
from peer_options import DTYPES
from torch.utils.checkpoint import checkpoint

# Rows, in, out: SmolLM2's MLP; what fills a large device.
GEMM_SHAPE = {"cpu": (4096, 576, 1536), "cuda": (8192, 8192, 8192)}
READ_BYTES = {"cpu": 1 << 28, "cuda": 1 << 32}  # More than any cache.
TORCH_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}

T = TypeVar("T")


def dtype_on(device: str) -> torch.dtype:
    return TORCH_DTYPES[DTYPES[device]]


def load_base(options: argparse.Namespace) -> Any:
    """transformers' model of peer_options.py's options, adapters of which are to be
    in its dtype, too: the fastest that peft has."""
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(
        options.model,
        dtype=dtype_on(options.device),
        attn_implementation="sdpa",
        device_map=options.device,
    )


def measure(step: Callable[[], T], reps: int, device: str) -> tuple[dict[str, Any], T]:
    """Seconds of `reps` steps after a first one, the memory they needed (on "cuda"
    also what torch's allocator gave, `extra_allocated_bytes`), torch's GEMM rate and
    version; and what the first step gave."""
    # The first checkpoint of a process imports a compiler: code, not activations.
    checkpoint(torch.neg, torch.zeros(1), use_reentrant=False)
    memory = machine.PeakMemory(device=device)
    allocated = 0
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        allocated = torch.cuda.memory_allocated()
    first = step()
    run = {"seconds": timing.each(waiting(step, device), reps), **memory.read()}
    if device == "cuda":
        most = torch.cuda.max_memory_allocated()
        run["extra_allocated_bytes"] = most - allocated
    run |= {
        "gemm_flops_per_second": gemm_rate(device),
        "versions": {"torch": torch.__version__},
    }
    return run, first


def waiting(call: Callable[[], object], device: str) -> Callable[[], object]:
    """`call`, until the device has done what it queues."""
    if device == "cpu":
        return call

    def run() -> None:
        call()
        torch.cuda.synchronize()

    return run


def gradient_norm(parameters: Iterable[torch.nn.Parameter]) -> float:
    """L2 norm over the parameters with a gradient; squares are summed in f64."""
    squares = [
        parameter.grad.double().square().sum()
        for parameter in parameters
        if parameter.grad is not None
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
    """TRL's selective_log_softmax for f32: the target's logit less a logsumexp that
    is taken row by row, so that no log_softmax of all rows is kept.

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
        for rows, wanted in zip(hidden.split(chunk), targets.split(chunk), strict=True)
    ]
    return torch.cat(parts)


def gemm_rate(device: str) -> float:
    """Floating-point operations per second of torch's matrix product of random
    data, in the dtype of all sides."""
    rows, inner, columns = GEMM_SHAPE[device]
    options: dict[str, Any] = {"dtype": dtype_on(device), "device": device}
    left = torch.randn(rows, inner, **options)
    right = torch.randn(inner, columns, **options)
    output = torch.empty(rows, columns, **options)
    seconds = best_seconds(lambda: torch.mm(left, right, out=output), 20, device)
    return 2.0 * rows * inner * columns / seconds


def memory_rates(device: str) -> dict[str, float]:
    """Bytes per second of a copy (read and written ones) and of a sum (read ones)."""
    source = torch.randn(READ_BYTES[device] // 4, device=device)
    target = torch.empty_like(source)
    copying = best_seconds(lambda: target.copy_(source), 10, device)
    reading = best_seconds(source.sum, 10, device)
    return {
        "copy_bytes_per_second": 2 * source.nbytes / copying,
        "read_bytes_per_second": source.nbytes / reading,
    }


def best_seconds(call: Callable[[], object], count: int, device: str) -> float:
    """Seconds of the fastest of `count` calls, one after the other. A device measures
    them by its own clock, after some calls that warm it up."""
    if device == "cpu":
        return min(timing.each(call, count))
    marks = []
    for _ in range(count + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        marks.append((begin, end))
    torch.cuda.synchronize()
    return float(min(begin.elapsed_time(end) for begin, end in marks[3:])) / 1e3
