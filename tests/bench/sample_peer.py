"""Runs one process of transformers' generate and prints one JSON line. sample.py
starts it and sets allocator and threads."""

from __future__ import annotations

import argparse
import json
from functools import partial
from typing import Any

import numpy as np
import peer_options
import timing
import torch
import torch_peer
import transformers


def main() -> None:
    options = _parse()
    torch.set_num_threads(options.threads)
    model = torch_peer.load_base(options).eval()
    prompts = torch.from_numpy(np.load(options.work / "prompts.npy")).to(model.device)
    drawn = json.loads((options.work / "drawn.json").read_text("utf-8"))
    seconds, tokens, gaps = {}, {}, {}
    for batch in options.batches:
        rows = prompts[:batch]
        with torch.inference_mode():
            gaps[str(batch)] = _gap(model, rows, drawn[str(batch)])
        tokens[str(batch)] = _generate(model, rows, options.tokens).tolist()
        seconds[str(batch)] = min(
            timing.each(partial(_generate, model, rows, options.tokens), options.reps)
        )
    versions = {module.__name__: module.__version__ for module in (torch, transformers)}
    print(
        json.dumps(
            {
                "seconds": seconds,
                "tokens": tokens,
                "gaps": gaps,
                "gemm_flops_per_second": torch_peer.gemm_rate(options.device),
                **torch_peer.memory_rates(options.device),
                "versions": versions,
            }
        )
    )


def _gap(model: Any, prompts: torch.Tensor, drawn: list[list[int]]) -> float:
    """Returns the largest gap between a token of `drawn` and the likeliest token:
    the difference of their logits divided by the largest logit."""
    worst = 0.0
    for prompt, own in zip(prompts, drawn, strict=True):
        tokens = torch.tensor(own, device=prompt.device)
        ids = torch.cat([prompt, tokens])[None, :-1]
        logits = (
            model(input_ids=ids, use_cache=False, logits_to_keep=len(own))
            .logits[0]
            .double()
        )
        chosen = logits.gather(1, tokens[:, None])[:, 0]
        gaps = (logits.amax(dim=1) - chosen) / logits.abs().amax(dim=1)
        worst = max(worst, float(gaps.max()))
    return worst


def _generate(model: Any, rows: torch.Tensor, count: int) -> torch.Tensor:
    """Returns the greedy tokens after each row, as [rows, count] on the CPU."""
    with torch.inference_mode():
        output: torch.Tensor = model.generate(
            input_ids=rows,
            attention_mask=torch.ones_like(rows),
            do_sample=False,
            min_new_tokens=count,
            max_new_tokens=count,
            eos_token_id=None,
            pad_token_id=0,
        )
    return output[:, rows.shape[1] :].cpu()


def _parse() -> argparse.Namespace:
    parser = peer_options.parser()
    parser.add_argument("--batches", type=int, nargs="+", required=True)
    parser.add_argument("--tokens", type=int, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
