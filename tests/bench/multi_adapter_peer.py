"""Runs one process of transformers + peft that trains several adapters one by one,
and prints one JSON line. multi_adapter.py starts it and sets allocator and threads."""

from __future__ import annotations

import argparse
import json
from typing import Any

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
    tokens, lengths = (
        torch.from_numpy(np.load(options.work / f"{name}.npy")).to(options.device)
        for name in ("tokens", "lengths")
    )
    parameters = [_of_adapter(model, f"a{i}") for i in range(options.adapters)]
    batches = [
        (f"a{i}", parameters[i], rows[:, : int(own.max()) + 1], own)
        for i, (rows, own) in enumerate(
            zip(
                tokens.chunk(options.adapters),
                lengths.chunk(options.adapters),
                strict=True,
            )
        )
    ]
    with torch.no_grad():
        model(input_ids=tokens[:1, :2], use_cache=False)
    run, loss = torch_peer.measure(
        lambda: sum(_step(model, *batch) for batch in batches),
        options.reps,
        options.device,
    )
    # The norms are those of the last step. They equal the first step's,
    # because no timed step changes weights.
    norms = [torch_peer.gradient_norm(own) for own in parameters]
    for module in (transformers, peft):
        run["versions"][module.__name__] = module.__version__
    print(json.dumps({**run, "loss": loss, "grad_norms": norms}))


def _parse() -> argparse.Namespace:
    parser = peer_options.parser()
    parser.add_argument("--adapters", type=int, required=True)
    return parser.parse_args()


def _load(options: argparse.Namespace) -> Any:
    folder = options.work / "adapter"
    how: dict[str, Any] = {"is_trainable": True, "autocast_adapter_dtype": False}
    model = peft.PeftModel.from_pretrained(
        torch_peer.load_base(options), folder, adapter_name="a0", **how
    )
    for i in range(1, options.adapters):
        model.load_adapter(folder, adapter_name=f"a{i}", **how)
    return model.train()


def _of_adapter(model: Any, adapter: str) -> list[torch.nn.Parameter]:
    return [p for name, p in model.named_parameters() if f".{adapter}." in name]


def _step(
    model: Any,
    adapter: str,
    parameters: list[torch.nn.Parameter],
    tokens: torch.Tensor,
    lengths: torch.Tensor,
) -> float:
    """Returns the summed loss of one adapter's padded batch. Its gradient replaces
    the previous one."""
    model.set_adapter(adapter)
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.zero_()
    real = torch.arange(tokens.shape[1] - 1, device=tokens.device) < lengths[:, None]
    logits = model(
        input_ids=tokens[:, :-1], attention_mask=real.long(), use_cache=False
    ).logits
    loss = torch.nn.functional.cross_entropy(
        logits[real], tokens[:, 1:][real], reduction="sum"
    )
    loss.backward()
    return float(loss.detach())


if __name__ == "__main__":
    main()
