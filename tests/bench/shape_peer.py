"""Writes a model of shapes.py: shape_peer.py CONFIG_JSON FOLDER DEVICE.

Weights are bf16, as in published models. A matrix with n inputs has variance 1 / n, so
that activations, losses and gradients have the sizes of a trained model's. The weights
of norms are near 1.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

SEED = 11
MOST_SHARD_BYTES = 2 << 30
FEWEST_SHARDS = 3  # The minimum makes even the smallest model have several shards.

Sizes = tuple[int, ...]


def main() -> None:
    config, folder, device = json.loads(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    draft = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        write(config, draft, device)
        os.rename(draft, folder)  # The folder is complete or absent.
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def write(config: dict[str, Any], folder: Path, device: str) -> None:
    parts = shards(list(tensors(config)))
    generator = torch.Generator(device).manual_seed(SEED)
    index: dict[str, Any] = {"metadata": {}, "weight_map": {}}
    for number, part in enumerate(parts, start=1):
        file = f"model-{number:05}-of-{len(parts):05}.safetensors"
        drawn = {
            name: _draw(sizes, *_normal(name, sizes, config), generator, device)
            for name, sizes in part
        }
        save_file(drawn, folder / file, metadata={"format": "pt"})
        index["weight_map"] |= dict.fromkeys(drawn, file)
    total = 2 * sum(elements(sizes) for part in parts for _, sizes in part)
    index["metadata"]["total_size"] = total
    for file, values in (
        ("model.safetensors.index.json", index),
        ("config.json", config),
    ):
        (folder / file).write_text(json.dumps(values, indent=2) + "\n", "utf-8")


def tensors(config: dict[str, Any]) -> Iterator[tuple[str, Sizes]]:
    """Returns names and sizes of all tensors, in the order of computation."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    heads, ffn = config["num_attention_heads"], config["intermediate_size"]
    head = config.get("head_dim") or hidden // heads
    kv = config["num_key_value_heads"] * head
    q = heads * head * (2 if config.get("attn_output_gate") else 1)
    attention: dict[str, Sizes] = {
        "self_attn.q_proj.weight": (q, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.o_proj.weight": (hidden, heads * head),
    }
    layer: dict[str, Sizes] = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (ffn, hidden),
        "mlp.up_proj": (ffn, hidden),
        "mlp.down_proj": (hidden, ffn),
    }
    if config["model_type"] == "qwen3_moe":
        for name in ("gate_proj", "up_proj", "down_proj"):
            del layer[f"mlp.{name}"]
        ffn, count = config["moe_intermediate_size"], config["num_experts"]
        layer["mlp.gate"] = (count, hidden)
        for expert in range(count):
            layer[f"mlp.experts.{expert}.gate_proj"] = (ffn, hidden)
            layer[f"mlp.experts.{expert}.up_proj"] = (ffn, hidden)
            layer[f"mlp.experts.{expert}.down_proj"] = (hidden, ffn)
    if config["model_type"] in ("qwen3", "qwen3_moe", "qwen3_5_text"):
        attention |= dict.fromkeys(
            ("self_attn.q_norm.weight", "self_attn.k_norm.weight"), (head,)
        )
    # Every layer has attention, or the last one of each interval.
    interval = config.get("full_attention_interval", 1)
    delta = _delta(config) if interval > 1 else {}
    yield "model.embed_tokens.weight", (vocab, hidden)
    for number in range(config["num_hidden_layers"]):
        first = attention if (number + 1) % interval == 0 else delta
        rest = {f"{name}.weight": sizes for name, sizes in layer.items()}
        for name, sizes in (first | rest).items():
            yield f"model.layers.{number}.{name}", sizes
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (vocab, hidden)


def _delta(config: dict[str, Any]) -> dict[str, Sizes]:
    """Returns names and sizes of the tensors of a gated delta rule."""
    hidden, heads = config["hidden_size"], config["linear_num_value_heads"]
    value = config["linear_value_head_dim"]
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    conv, out = 2 * keys + heads * value, heads * value
    return {
        "linear_attn.dt_bias": (heads,),
        "linear_attn.A_log": (heads,),
        "linear_attn.conv1d.weight": (conv, 1, config["linear_conv_kernel_dim"]),
        "linear_attn.norm.weight": (value,),
        "linear_attn.out_proj.weight": (hidden, out),
        "linear_attn.in_proj_qkv.weight": (conv, hidden),
        "linear_attn.in_proj_z.weight": (out, hidden),
        "linear_attn.in_proj_b.weight": (heads, hidden),
        "linear_attn.in_proj_a.weight": (heads, hidden),
    }


def shards(named: list[tuple[str, Sizes]]) -> list[list[tuple[str, Sizes]]]:
    """Returns the tensors of each file, in order. Starts a new file when the
    current file has its share of the elements."""
    total = sum(elements(sizes) for _, sizes in named)
    count = max(FEWEST_SHARDS, -(-2 * total // MOST_SHARD_BYTES))
    result: list[list[tuple[str, Sizes]]] = [[]]
    written = 0
    for name, sizes in named:
        if written >= total * len(result) / count:
            result.append([])
        result[-1].append((name, sizes))
        written += elements(sizes)
    return result


def _normal(name: str, sizes: Sizes, config: dict[str, Any]) -> tuple[float, float]:
    """Returns mean and standard deviation of a tensor."""
    if name.endswith("conv1d.weight"):
        # Most of q and k are far from 0 after silu. So few queries are nearly
        # orthogonal to all keys, where the norm of the rule's output would enlarge
        # rounding errors.
        return 0.0, 1.5
    if len(sizes) > 1:
        return 0.0, sizes[1] ** -0.5
    # These norms multiply by 1 + their weights.
    from_one = config["model_type"] == "qwen3_5_text"
    is_norm = "norm" in name and "linear_attn" not in name
    return 0.0 if from_one and is_norm else 1.0, 0.1


def _draw(
    sizes: Sizes, mean: float, std: float, generator: torch.Generator, device: str
) -> torch.Tensor:
    tensor = torch.empty(sizes, dtype=torch.bfloat16, device=device)
    return tensor.normal_(mean, std, generator=generator).cpu()


def elements(sizes: Sizes) -> int:
    return math.prod(sizes)


if __name__ == "__main__":
    main()
