"""Counts the floating-point operations of a step.

Counts only the operations that the result needs. Layers that run again in the backward
pass count once, so that the figures show what recomputing costs a side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

ATTENTION_LAYERS = 4  # q, k, v and o.


@dataclass(frozen=True)
class Run:
    """A run of `rows` tokens. They attend to each other causally, and to all of the
    `before` tokens before them."""

    rows: int
    before: int = 0


def step(
    config: dict[str, Any], rank: int, runs: Sequence[Run], scored_rows: int
) -> float:
    """Returns the operations of one forward and backward pass with LoRA on all
    linear layers and a frozen base.

    Counts two products for every base weight (forward, input gradient) and three
    for every LoRA weight. Attention has two products forward and five backward.
    """
    layers, heads, head, shapes = _shapes(config)
    base = sum(a * b for a, b in shapes)
    lora = sum(_lora_rank(config, i, rank) * sum(s) for i, s in enumerate(shapes))
    rows = sum(run.rows for run in runs)
    pairs = sum(run.rows * (run.before + run.rows / 2) for run in runs)
    per_layer = rows * (4 * base + 6 * lora) + 14 * pairs * heads * head
    return float(layers * per_layer) + head_flops(
        scored_rows, config["hidden_size"], config["vocab_size"]
    )


def decode(config: dict[str, Any], length: int) -> float:
    """Returns the operations of the base model for one token that attends to `length`
    others. The token's logits count, too."""
    layers, heads, head, shapes = _shapes(config)
    per_layer = 2 * sum(a * b for a, b in shapes) + 4 * length * heads * head
    return float(layers * per_layer + 2 * config["hidden_size"] * config["vocab_size"])


def model_flops(config: dict[str, Any], tokens: int) -> float:
    """Returns 4 P per token, where P is the number of the base's weights in matrix
    products. This counts the forward pass and the gradient of inputs. It leaves out
    attention, LoRA and recomputed layers."""
    return 4.0 * tokens * _matrix_weights(config)


def decode_bytes(
    config: dict[str, Any], batch: int, length: int, weight: int, cache: int
) -> float:
    """Returns the bytes that one iteration of `batch` sequences of `length` tokens
    must read: every weight once, and keys and values of all sequences. `weight` and
    `cache` are the bytes of an element."""
    head = config.get("head_dim") or (
        config["hidden_size"] // config["num_attention_heads"]
    )
    width = config["num_key_value_heads"] * head
    pairs = 2 * config["num_hidden_layers"] * width
    return float(weight * _matrix_weights(config) + cache * batch * length * pairs)


def _matrix_weights(config: dict[str, Any]) -> int:
    layers, _, _, shapes = _shapes(config)
    head = config["hidden_size"] * config["vocab_size"]
    return layers * sum(a * b for a, b in shapes) + int(head)


def head_flops(rows: int, hidden: int, vocab: int) -> float:
    """Returns the operations of the logits and of the gradient of their input."""
    return 4.0 * rows * hidden * vocab


def _shapes(config: dict[str, Any]) -> tuple[int, int, int, list[tuple[int, int]]]:
    """Returns the number of layers, of query heads and of features per head. Also
    returns (inputs, outputs) of each linear layer that a token passes in one layer: q,
    k, v, o, then those of the MLP or of the token's experts. Leaves out the router."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head = config.get("head_dim") or hidden // heads
    kv = config.get("num_key_value_heads", heads) * head
    ffn = config["intermediate_size"]
    shapes = [(hidden, heads * head), (hidden, kv), (hidden, kv)]
    shapes += [(heads * head, hidden)]
    mlp = [(hidden, ffn), (hidden, ffn), (ffn, hidden)]
    if "num_experts_per_tok" in config:
        ffn = config["moe_intermediate_size"]
        mlp = [(hidden, ffn), (hidden, ffn), (ffn, hidden)]
        mlp *= config["num_experts_per_tok"]
    return config["num_hidden_layers"], heads, head, shapes + mlp


def _lora_rank(config: dict[str, Any], index: int, rank: int) -> int:
    """Returns the LoRA rank of the linear layer `index` of _shapes. The rank of an
    expert is `rank` divided by the number of experts per token, but at least 1."""
    if index < ATTENTION_LAYERS:
        return rank
    return max(1, rank // int(config.get("num_experts_per_tok", 1)))
