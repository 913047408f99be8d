"""One process of a peer of Weft's head; prints one JSON line. Files are those of
head_bench.cc; run by logprobs.py, which sets allocator and threads."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch_peer

SEQUENCES = 8  # TRL's loop is over sequences.


def main() -> None:
    options = _parse()
    torch.set_num_threads(options.threads)
    rows, hidden_size, vocab = options.rows, options.hidden, options.vocab
    hidden = _read(options.folder / "hidden", np.float32).view(rows, hidden_size)
    weight = _read(options.folder / "weight", np.float32).view(vocab, hidden_size)
    targets = _read(options.folder / "targets", np.int64)
    gradients = _read(options.folder / "gradients", np.float32)
    if options.side == "selective":
        hidden = hidden.view(SEQUENCES, -1, hidden_size)
        targets, gradients = (x.view(SEQUENCES, -1) for x in (targets, gradients))
    hidden.requires_grad_()
    heads: dict[str, Callable[..., torch.Tensor]] = {
        "naive": torch_peer.full_logprobs,
        "selective": torch_peer.selective_logprobs,
        "chunked": partial(torch_peer.chunked_logprobs, chunk=options.chunk),
    }
    logprobs_of = heads[options.side]

    def step() -> torch.Tensor:
        hidden.grad = None
        logprobs = logprobs_of(hidden, weight, targets)
        logprobs.backward(gradients)
        return logprobs.detach()

    run, logprobs = torch_peer.measure(step, options.reps)
    logprobs.numpy().tofile(options.folder / "logprobs")
    assert hidden.grad is not None
    hidden.grad.numpy().tofile(options.folder / "dhidden")
    print(json.dumps(run))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    for name in ("rows", "hidden", "vocab", "chunk", "threads", "reps"):
        parser.add_argument(name, type=int)
    parser.add_argument("side", choices=("naive", "selective", "chunked"))
    return parser.parse_args()


def _read(path: Path, dtype: type) -> torch.Tensor:
    return torch.from_numpy(np.fromfile(path, dtype=dtype))


if __name__ == "__main__":
    main()
