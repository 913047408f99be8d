"""Runs one process of transformers + peft on this machine and prints one JSON line.

processes.py starts it and sets allocator and threads.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "oracle"))

import experts
import numpy as np
import peer_options
import peft
import torch
import torch_peer
import transformers


def main() -> None:
    options = _parse()
    torch.set_num_threads(options.threads)
    model = _load(options)
    tokens = torch.from_numpy(np.load(options.work / "tokens.npy")).to(options.device)
    with torch.no_grad():
        model(input_ids=tokens[:1, :2], use_cache=False)
    run, loss = torch_peer.measure(
        lambda: _step(model, tokens, options), options.reps, options.device
    )
    for module in (transformers, peft):
        run["versions"][module.__name__] = module.__version__
    run |= {"loss": loss, "grad_norm": torch_peer.gradient_norm(model.parameters())}
    print(json.dumps(run))


def _parse() -> argparse.Namespace:
    parser = peer_options.parser()
    parser.add_argument("--prompt", type=int, required=True, help="tokens not learnt")
    parser.add_argument("--slice", type=int, default=0, help="sequences; 0: all")
    parser.add_argument("--experts", help="implementation of experts")
    parser.add_argument("--checkpoint", action="store_true", help="all layers")
    parser.add_argument("--chunk", type=int, default=0, help="rows of logits; 0: all")
    parser.add_argument(
        "--autocast", action="store_true", help="bf16 weights, f32 adapters, autocast"
    )
    return parser.parse_args()


def _load(options: argparse.Namespace) -> Any:
    model = peft.PeftModel.from_pretrained(
        torch_peer.load_base(
            options, experts_implementation=options.experts, **_base_dtype(options)
        ),
        options.work / "adapter",
        is_trainable=True,
        autocast_adapter_dtype=options.autocast,
    )
    experts.keep_halves_apart(dict(model.named_parameters()), model.config)
    if options.checkpoint:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def _base_dtype(options: argparse.Namespace) -> dict[str, Any]:
    return {"dtype": torch.bfloat16} if options.autocast else {}


def _step(model: Any, tokens: torch.Tensor, options: argparse.Namespace) -> float:
    """Returns the summed loss. Its gradient replaces the previous one. Runs a
    limited number of sequences at a time."""
    model.zero_grad(set_to_none=False)
    loss_of: Callable[..., torch.Tensor] = _chunked_loss if options.chunk else _loss
    total = 0.0
    for rows in tokens.split(options.slice or len(tokens)):
        # The head computes only the rows that predict a trained token.
        with torch.autocast("cpu", torch.bfloat16, enabled=options.autocast):
            loss = loss_of(model, rows, max(options.prompt - 1, 0), options.chunk)
        loss.backward()
        total += float(loss.detach())
    return total


def _loss(model: Any, tokens: torch.Tensor, first: int, _: int) -> torch.Tensor:
    targets = tokens[:, 1 + first :]
    logits = model(
        input_ids=tokens[:, :-1], use_cache=False, logits_to_keep=targets.shape[1]
    ).logits
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), reduction="sum"
    )


def _chunked_loss(
    model: Any, tokens: torch.Tensor, first: int, chunk: int
) -> torch.Tensor:
    causal = model.get_base_model()
    hidden = causal.model(input_ids=tokens[:, :-1], use_cache=False).last_hidden_state
    logprobs = torch_peer.chunked_logprobs(
        hidden[:, first:].flatten(0, 1),
        causal.lm_head.weight,
        tokens[:, 1 + first :].flatten(),
        chunk,
    )
    return -logprobs.sum()


if __name__ == "__main__":
    main()
