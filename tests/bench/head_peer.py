"""Runs a head in torch, a peer of Weft's head, and prints one JSON line. Reads and
writes the same files as head_bench.cc. logprobs.py starts the process and sets
allocator and threads. The side `exact` is the chunked head in f64, and writes its
results in f64. All other sides are compared with `exact`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch_peer
from peer_options import DTYPES

SEQUENCES = 8  # Side `selective` needs them: TRL loops over sequences.
EXACT_ROWS = 256  # Rows in a chunk.


def main() -> None:
    options = _parse()
    torch.set_num_threads(options.threads)
    exact = options.side == "exact"
    dtype = torch.float64 if exact else torch_peer.dtype_on(options.device)

    def read(name: str, kind: type, *shape: int) -> torch.Tensor:
        values: np.ndarray = np.fromfile(options.folder / name, dtype=kind)
        return torch.from_numpy(values).view(shape).to(options.device)

    rows, hidden_size = options.rows, options.hidden
    hidden = read("hidden", np.float32, rows, hidden_size).to(dtype)
    weight = read("weight", np.float32, options.vocab, hidden_size).to(dtype)
    targets = read("targets", np.int64, rows)
    gradients = read("gradients", np.float32, rows).to(dtype)
    if options.side == "selective":
        hidden = hidden.view(SEQUENCES, -1, hidden_size)
        targets, gradients = (x.view(SEQUENCES, -1) for x in (targets, gradients))
    hidden.requires_grad_()
    heads: dict[str, Callable[..., torch.Tensor]] = {
        "naive": torch_peer.full_logprobs,
        "selective": torch_peer.selective_logprobs,
        "chunked": partial(torch_peer.chunked_logprobs, chunk=options.chunk),
        "exact": partial(torch_peer.chunked_logprobs, chunk=EXACT_ROWS),
    }
    logprobs_of = heads[options.side]

    def step() -> torch.Tensor:
        hidden.grad = None
        logprobs = logprobs_of(hidden, weight, targets)
        logprobs.backward(gradients)
        return logprobs.detach()

    run: dict[str, Any] = {}
    if exact:
        logprobs = step()
    else:
        run, logprobs = torch_peer.measure(step, options.reps, options.device)
    assert hidden.grad is not None
    for name, values in (("logprobs", logprobs), ("dhidden", hidden.grad)):
        stored = values.double() if exact else values.float()
        stored.cpu().numpy().tofile(options.folder / name)
    print(json.dumps(run))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    for name in ("rows", "hidden", "vocab", "chunk", "threads", "reps"):
        parser.add_argument(name, type=int)
    parser.add_argument("device", choices=DTYPES)
    parser.add_argument("side", choices=("naive", "selective", "chunked", "exact"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
