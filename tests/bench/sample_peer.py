"""One process of transformers' generate; prints one JSON line. Run by sample.py,
which sets allocator and threads.
"""

from __future__ import annotations

import argparse
import json
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
    model = transformers.AutoModelForCausalLM.from_pretrained(
        options.model, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    prompts = torch.from_numpy(np.load(options.work / "prompts.npy"))
    seconds, tokens = {}, {}
    for batch in options.batches:
        rows = prompts[:batch]
        tokens[str(batch)] = _generate(model, rows, options.tokens).tolist()
        seconds[str(batch)] = min(
            timing.each(lambda: _generate(model, rows, options.tokens), options.reps)
        )
    versions = {module.__name__: module.__version__ for module in (torch, transformers)}
    print(
        json.dumps(
            {
                "seconds": seconds,
                "tokens": tokens,
                "gemm_flops_per_second": torch_peer.gemm_rate(),
                "versions": versions,
            }
        )
    )


@torch.inference_mode()
def _generate(model: Any, rows: torch.Tensor, count: int) -> torch.Tensor:
    """[rows, count] tokens, the most likely ones."""
    output = model.generate(
        input_ids=rows,
        attention_mask=torch.ones_like(rows),
        do_sample=False,
        min_new_tokens=count,
        max_new_tokens=count,
        eos_token_id=None,
        pad_token_id=0,
    )
    return output[:, rows.shape[1] :]


def _parse() -> argparse.Namespace:
    parser = peer_options.parser()
    parser.add_argument("--batches", type=int, nargs="+", required=True)
    parser.add_argument("--tokens", type=int, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
