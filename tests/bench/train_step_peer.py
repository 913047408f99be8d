"""One process of the peer of train_step: transformers + peft on this machine.

Prints one JSON line. Run by train_step.py, which sets allocator and threads.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import machine
import numpy as np
import peft
import torch
import transformers

GEMM_SHAPE = (4096, 576, 1536)  # Rows, in, out: SmolLM2's MLP.


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--reps", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = _load(options.model, options.work / "adapter")
    tokens = torch.from_numpy(np.load(options.work / "tokens.npy"))
    loss = _step(model, tokens)
    norm = _gradient_norm(model)
    seconds = []
    for _ in range(options.reps):
        start = time.perf_counter()
        _step(model, tokens)
        seconds.append(time.perf_counter() - start)
    result = {
        "seconds": seconds,
        "loss": loss,
        "grad_norm": norm,
        "peak_rss_bytes": machine.peak_resident_bytes(),
        "gemm_flops_per_second": _gemm_rate(),
        "versions": {
            module.__name__: module.__version__
            for module in (torch, transformers, peft)
        },
    }
    print(json.dumps(result))


def _load(folder: Path, adapter: Path) -> torch.nn.Module:
    base = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa"
    )
    model = peft.PeftModel.from_pretrained(base, adapter, is_trainable=True)
    return model.train()


def _step(model: torch.nn.Module, tokens: torch.Tensor) -> float:
    """Adds the gradient of the summed loss; returns the loss."""
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum"
    )
    loss.backward()
    return float(loss.detach())


def _gradient_norm(model: torch.nn.Module) -> float:
    squares = [
        parameter.grad.double().square().sum()
        for parameter in model.parameters()
        if parameter.grad is not None
    ]
    return float(torch.stack(squares).sum().sqrt())


def _gemm_rate() -> float:
    """Floating-point operations per second of torch's f32 matrix product."""
    rows, inner, columns = GEMM_SHAPE
    left, right = torch.randn(rows, inner), torch.randn(inner, columns)
    output = torch.empty(rows, columns)
    best = float("inf")
    for _ in range(20):
        start = time.perf_counter()
        torch.mm(left, right, out=output)
        best = min(best, time.perf_counter() - start)
    return 2.0 * rows * inner * columns / best


if __name__ == "__main__":
    main()
