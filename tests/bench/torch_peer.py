"""Shared by the peers' programs: measurements, and log-probabilities of targets."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import machine
import timing
import torch
from peer_options import DTYPES
from torch.utils.checkpoint import checkpoint

# Rows, inputs and outputs of a matrix product. On a CPU they are those of SmolLM2's
# MLP. On "cuda" they fill a large device.
GEMM_SHAPE = {"cpu": (4096, 576, 1536), "cuda": (8192, 8192, 8192)}
READ_BYTES = {"cpu": 1 << 28, "cuda": 1 << 32}  # More bytes than any cache holds.
TORCH_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}

T = TypeVar("T")


def dtype_on(device: str) -> torch.dtype:
    return TORCH_DTYPES[DTYPES[device]]


def load_base(options: argparse.Namespace, **extra: Any) -> Any:
    """Returns transformers' model for the options of peer_options.py. Its adapters
    will have the model's dtype, which is the fastest that peft offers. `extra` are
    further arguments of from_pretrained."""
    import transformers

    arguments = {
        "dtype": dtype_on(options.device),
        "attn_implementation": "sdpa",
        "device_map": options.device,
    }
    return transformers.AutoModelForCausalLM.from_pretrained(
        options.model, **(arguments | extra)
    )


def measure(step: Callable[[], T], reps: int, device: str) -> tuple[dict[str, Any], T]:
    """Runs one step and then times `reps` steps. Returns their seconds, the memory
    that all steps needed, torch's GEMM rate and version, and the first step's result.
    On "cuda" also returns what torch's allocator took, `extra_allocated_bytes`."""
    # A process's first call of checkpoint() imports a compiler. This call does it
    # before the memory is measured, so that the compiler's code does not count.
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
    """Returns a function that runs `call`, then waits for the device's queued work."""
    if device == "cpu":
        return call

    def run() -> None:
        call()
        torch.cuda.synchronize()

    return run


def gradient_norm(parameters: Iterable[torch.nn.Parameter]) -> float:
    """Returns the L2 norm over the parameters that have a gradient. Squares are
    summed in f64."""
    squares = [
        parameter.grad.double().square().sum()
        for parameter in parameters
        if parameter.grad is not None
    ]
    return float(torch.stack(squares).sum().sqrt())


def full_logprobs(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    """Returns log-probabilities [N] of targets [N] from hidden [N, H], with the
    logits of all rows at once."""
    logprobs = torch.log_softmax(hidden @ weight.T, dim=-1)
    return logprobs.gather(-1, targets.unsqueeze(-1)).squeeze(-1)


def selective_logprobs(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    """TRL's selective_log_softmax for f32: the target's logit minus a logsumexp
    that is computed row by row, so that no log_softmax of all rows is kept.

    TRL's own function is not used, because importing it requires pandas and datasets.
    """
    logits = hidden @ weight.T
    selected = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return selected - torch.stack([torch.logsumexp(row, dim=-1) for row in logits])


def chunked_logprobs(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, chunk: int
) -> torch.Tensor:
    """Runs full_logprobs on `chunk` rows at a time, and runs it again in the
    backward pass. So the logits of only one chunk exist at any time."""
    parts = [
        checkpoint(full_logprobs, rows, weight, wanted, use_reentrant=False)
        for rows, wanted in zip(hidden.split(chunk), targets.split(chunk), strict=True)
    ]
    return torch.cat(parts)


def gemm_rate(device: str) -> float:
    """Returns the floating-point operations per second of torch's matrix product of
    random data, in the dtype that all sides use on the device."""
    rows, inner, columns = GEMM_SHAPE[device]
    options: dict[str, Any] = {"dtype": dtype_on(device), "device": device}
    left = torch.randn(rows, inner, **options)
    right = torch.randn(inner, columns, **options)
    output = torch.empty(rows, columns, **options)
    seconds = best_seconds(lambda: torch.mm(left, right, out=output), 20, device)
    return 2.0 * rows * inner * columns / seconds


def memory_rates(device: str) -> dict[str, float]:
    """Returns the bytes per second of a copy (bytes read and written) and of a sum
    (bytes read)."""
    source = torch.randn(READ_BYTES[device] // 4, device=device)
    target = torch.empty_like(source)
    copying = best_seconds(lambda: target.copy_(source), 10, device)
    reading = best_seconds(source.sum, 10, device)
    return {
        "copy_bytes_per_second": 2 * source.nbytes / copying,
        "read_bytes_per_second": source.nbytes / reading,
    }


def best_seconds(call: Callable[[], object], count: int, device: str) -> float:
    """Returns the seconds of the fastest of `count` calls, made one after another.
    On "cuda", CUDA events time the calls, after three calls that warm up."""
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
