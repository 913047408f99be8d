"""Counts the floating-point operations of a step.

Counts only the operations that the result needs. Layers that run again in the backward
pass count once, so that the figures show what recomputing costs a side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Run:
    """A run of `rows` tokens. They attend to each other causally, and to all of the
    `before` tokens before them."""

    rows: int
    before: int = 0


@dataclass(frozen=True)
class Layers:
    """`count` equal layers. `first` and `mlp` have (inputs, outputs) of each linear
    layer that a token passes: those of attention or of a gated delta rule, and those
    of the MLP or of the token's experts, without the router. `heads` query heads have
    `head` features each. `state` is the number of features of a gated delta rule's
    state, and `conv` that of the rows before the convolution that it keeps."""

    count: int
    first: list[tuple[int, int]]
    mlp: list[tuple[int, int]]
    heads: int = 0
    head: int = 0
    state: int = 0
    conv: int = 0

    @property
    def weights(self) -> int:
        return sum(a * b for a, b in self.first + self.mlp)


def step(
    config: dict[str, Any], rank: int, runs: Sequence[Run], scored_rows: int
) -> float:
    """Returns the operations of one forward and backward pass with LoRA on all
    linear layers and a frozen base.

    Counts two products for every base weight (forward, input gradient) and three
    for every LoRA weight. Attention has two products forward and five backward. A
    gated delta rule reads and changes its state by three products forward, and has
    twice as many backward.
    """
    rows = sum(run.rows for run in runs)
    pairs = sum(run.rows * (run.before + run.rows / 2) for run in runs)
    # The rank of an expert is `rank` divided by the number of experts per token.
    expert_rank = max(1, rank // int(config.get("num_experts_per_tok", 1)))
    total = head_flops(scored_rows, config["hidden_size"], config["vocab_size"])
    for layers in _layers(config):
        lora = rank * sum(map(sum, layers.first))
        lora += expert_rank * sum(map(sum, layers.mlp))
        per_row = 4 * layers.weights + 6 * lora + 18 * layers.state
        products = 14 * pairs * layers.heads * layers.head
        total += layers.count * (rows * per_row + products)
    return total


def decode(config: dict[str, Any], length: int) -> float:
    """Returns the operations of the base model for one token that attends to `length`
    others. The token's logits count, too."""
    total = 2 * config["hidden_size"] * config["vocab_size"]
    for layers in _layers(config):
        products = 4 * length * layers.heads * layers.head + 6 * layers.state
        total += layers.count * (2 * layers.weights + products)
    return float(total)


def model_flops(config: dict[str, Any], tokens: int) -> float:
    """Returns 4 P per token, where P is the number of the base's weights in matrix
    products. This counts the forward pass and the gradient of inputs. It leaves out
    attention, LoRA and recomputed layers."""
    return 4.0 * tokens * _matrix_weights(config)


def decode_bytes(
    config: dict[str, Any], batch: int, length: int, weight: int, cache: int
) -> float:
    """Returns the bytes that one iteration of `batch` sequences of `length` tokens
    must read: every weight once, and keys, values and states of all sequences.
    `weight` and `cache` are the bytes of an element. States have f32."""
    kv = sum(
        layers.count * 2 * layers.first[1][1]
        for layers in _layers(config)
        if layers.heads > 0
    )
    state = sum(
        layers.count * (4 * layers.state + cache * layers.conv)
        for layers in _layers(config)
    )
    sequences = batch * (cache * length * kv + state)
    return float(weight * _matrix_weights(config) + sequences)


def _matrix_weights(config: dict[str, Any]) -> int:
    head = config["hidden_size"] * config["vocab_size"]
    return sum(layers.count * layers.weights for layers in _layers(config)) + int(head)


def head_flops(rows: int, hidden: int, vocab: int) -> float:
    """Returns the operations of the logits and of the gradient of their input."""
    return 4.0 * rows * hidden * vocab


def _layers(config: dict[str, Any]) -> list[Layers]:
    """Returns the layers with attention, with q, k, v and o in `first`, and those
    with a gated delta rule, if there are any."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head = config.get("head_dim") or hidden // heads
    kv = config.get("num_key_value_heads", heads) * head
    ffn = config["intermediate_size"]
    # q also makes the gates of its outputs.
    q = heads * head * (2 if config.get("attn_output_gate") else 1)
    attention = [(hidden, q), (hidden, kv), (hidden, kv), (heads * head, hidden)]
    mlp = [(hidden, ffn), (hidden, ffn), (ffn, hidden)]
    if "num_experts_per_tok" in config:
        ffn = config["moe_intermediate_size"]
        mlp = [(hidden, ffn), (hidden, ffn), (ffn, hidden)]
        mlp *= config["num_experts_per_tok"]
    count = config["num_hidden_layers"]
    if "full_attention_interval" not in config:
        return [Layers(count, attention, mlp, heads, head)]
    full = count // config["full_attention_interval"]
    key_heads, value_heads = (config[f"linear_num_{n}_heads"] for n in ("key", "value"))
    key, value = (config[f"linear_{name}_head_dim"] for name in ("key", "value"))
    conv, out = 2 * key_heads * key + value_heads * value, value_heads * value
    # in_proj_qkv, z, b, a and out_proj.
    widths = (conv, out, value_heads, value_heads)
    delta = [*((hidden, width) for width in widths), (out, hidden)]
    rows = config["linear_conv_kernel_dim"] - 1
    return [
        Layers(full, attention, mlp, heads, head),
        Layers(count - full, delta, mlp, state=key * out, conv=rows * conv),
    ]
