"""Converts LoRA of projections that a model has as one module, such as qkv_proj.

The daemon has an A and a B for each of q, k and v. In PEFT's folders the module's rank
is the sum of theirs: A has their rows, and B has a block for each.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

_MODULES = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}


def modules(config: Any) -> dict[str, tuple[str, ...]]:
    """Returns the modules that the model has as one, with their parts."""
    names = {"phi3": ("qkv_proj", "gate_up_proj"), "glm4": ("gate_up_proj",)}
    return {name: _MODULES[name] for name in names.get(config.model_type, ())}


def peft_options(shape: Any, config: Any) -> dict[str, Any]:
    """Returns LoraConfig's values for an adapter of the parts in shape.targets."""
    targets = list(shape.targets)
    ranks, alphas = {}, {}
    for name, parts in modules(config).items():
        if parts[0] not in targets:
            continue
        targets = [target for target in targets if target not in parts] + [name]
        ranks[name] = shape.rank * len(parts)
        alphas[name] = shape.alpha * len(parts)
    return {"target_modules": targets, "rank_pattern": ranks, "alpha_pattern": alphas}


def _sizes(name: str, rows: int, config: Any) -> list[int]:
    """Returns the number of B's rows of each part."""
    if name == "gate_up_proj":
        return [rows // 2] * 2
    head_dim = getattr(config, "head_dim", None)
    head_dim = head_dim or config.hidden_size // config.num_attention_heads
    kv_rows = config.num_key_value_heads * head_dim
    return [rows - 2 * kv_rows, kv_rows, kv_rows]


def _module_of(name: str, config: Any) -> str | None:
    module = name.split(".lora_")[0].rsplit(".", 1)[-1]
    return module if module in modules(config) else None


def block_mask(name: str, b: torch.Tensor, config: Any) -> torch.Tensor | None:
    """Returns ones in the blocks of the parts in a B. Returns None for another tensor,
    and if the parts cannot have equal ranks."""
    module = _module_of(name, config)
    if module is None or ".lora_B" not in name:
        return None
    sizes = _sizes(module, b.shape[0], config)
    if b.shape[1] % len(sizes) != 0:
        return None
    rank = b.shape[1] // len(sizes)
    return torch.block_diag(*(torch.ones(rows, rank) for rows in sizes)).to(b)


def keep_parts_apart(parameters: dict[str, torch.Tensor], config: Any) -> None:
    """Makes the gradient zero outside the blocks, if B is zero there."""
    for name, parameter in parameters.items():
        mask = block_mask(name, parameter, config)
        if mask is not None and not (parameter * (1 - mask)).any():
            parameter.register_hook(lambda grad, mask=mask: grad * mask)


def of_parts(tensors: dict[str, np.ndarray], config: Any) -> dict[str, np.ndarray]:
    """Returns the A and B of each part."""
    apart: dict[str, np.ndarray] = {}
    for name, value in tensors.items():
        module = _module_of(name, config)
        if module is None:
            apart[name] = value
            continue
        parts = _MODULES[module]
        is_b = ".lora_B" in name
        sizes = _sizes(module, value.shape[0], config) if is_b else []
        pieces = np.split(value, np.cumsum(sizes)[:-1] if is_b else len(parts))
        for i, (part, piece) in enumerate(zip(parts, pieces, strict=True)):
            block = np.split(piece, len(parts), axis=1)[i] if is_b else piece
            apart[name.replace(f".{module}.", f".{part}.")] = block
    return apart
