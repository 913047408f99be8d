"""Converts LoRA of experts between two forms. Checkpoints and adapters name single
experts. transformers 5 and peft compute with fused parameters.

When peft loads a folder with single experts, it converts them to the fused form.
This module converts weights and gradients back. gpt-oss has no single experts, so this
module writes its folders in the fused form.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from daemon import DTYPE
from peft import LoraConfig
from safetensors.torch import save_file

# The names of gate, up and down, and the block that has them.
_QWEN = (("gate_proj", "up_proj", "down_proj"), "mlp")
_MIXTRAL = (("w1", "w3", "w2"), "block_sparse_moe")


def has_experts(config: Any) -> bool:
    return getattr(config, "num_experts_per_tok", None) is not None


def need_equal_choices(config: Any) -> None:
    """Skips a test in bf16 if the model has experts, because rounding may lead to other
    experts than in the reference. test_routing.py compares such models in every
    dtype: it gives both sides the same experts."""
    if DTYPE == "bf16" and has_experts(config):
        pytest.skip("in bf16, rounding may choose other experts")


def need_small_rounding(config: Any) -> None:
    """Skips a test in bf16 if the model has a gated delta rule. The rule's norms divide
    by sizes that may be nearly zero, so no bound follows from the dtype alone.
    test_hybrid.py compares such models in bf16 with transformers in bf16."""
    if DTYPE == "bf16" and hasattr(config, "linear_num_value_heads"):
        pytest.skip("in bf16, norms may enlarge rounding errors without a bound")


def _spelling(config: Any) -> tuple[tuple[str, str, str], str]:
    return _MIXTRAL if config.model_type in ("mixtral", "minimax_m2") else _QWEN


def target_names(config: Any, targets: tuple[str, ...]) -> list[str]:
    """Returns the names that select `targets` in the model's checkpoints."""
    renamed = dict(zip(_QWEN[0], _spelling(config)[0], strict=True))
    return [renamed.get(name, name) for name in targets]


def write_adapter(model: Any, folder: Path, shape: Any, seed: int) -> Path:
    """Writes a PEFT folder with random A and B, in the form of single experts."""
    config = model.config.get_text_config()
    torch.manual_seed(seed)
    names = target_names(config, shape.targets)
    if is_fused(config):
        _write_fused(model, folder, shape, names)
        return folder
    LoraConfig(
        r=shape.rank,
        lora_alpha=shape.alpha,
        target_modules=names,
        task_type="CAUSAL_LM",
    ).save_pretrained(folder)
    tensors = _draw_factors(model, shape.rank, names)
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def is_fused(config: Any) -> bool:
    """Returns whether the model has no single experts, only fused parameters."""
    return config.model_type in ("gpt_oss", "qwen3_vl_moe_text")


def _in_turns(config: Any) -> bool:
    """Returns whether rows of gate and up alternate in the fused parameter, which is
    transposed."""
    return bool(config.model_type == "gpt_oss")


def _draw_factors(model: Any, rank: int, names: list[str]) -> dict[str, torch.Tensor]:
    tensors = {}
    for path, (rows, columns) in _linear_layers(model).items():
        if path.rsplit(".", 1)[-1] not in names:
            continue
        prefix = f"base_model.model.{path}"
        a = torch.randn(rank, columns) / columns**0.5
        tensors[f"{prefix}.lora_A.weight"] = a
        tensors[f"{prefix}.lora_B.weight"] = torch.randn(rows, rank) * 0.02
    return tensors


def _write_fused(model: Any, folder: Path, shape: Any, names: list[str]) -> None:
    """Writes gate and up as one pair of A and B with twice the rank."""
    modules, rank = _QWEN[0], shape.rank
    parameters = []
    if "down_proj" in names:
        parameters.append("mlp.experts.down_proj")
    if "gate_proj" in names:
        parameters.append("mlp.experts.gate_up_proj")
    LoraConfig(
        r=rank,
        lora_alpha=shape.alpha,
        target_modules=[name for name in names if name not in modules],
        target_parameters=parameters,
        rank_pattern={r".*\.gate_up_proj": 2 * rank},
        alpha_pattern={r".*\.gate_up_proj": 2 * shape.alpha},
        task_type="CAUSAL_LM",
    ).save_pretrained(folder)
    tensors = _draw_factors(model, rank, names)
    config = model.config.get_text_config()
    count = config.num_local_experts
    decoder = "model" if config is model.config else "model.language_model"
    for layer in range(config.num_hidden_layers):
        prefix = f"base_model.model.{decoder}.layers.{layer}.mlp.experts"

        def take(module: str, factor: str, prefix: str = prefix) -> list[torch.Tensor]:
            return [
                tensors.pop(f"{prefix}.{expert}.{module}.lora_{factor}.weight")
                for expert in range(count)
            ]

        inner = ".base_layer" if "down_proj" in names else ""
        if "down_proj" in names:
            tensors[f"{prefix}.lora_A.weight"] = torch.cat(take("down_proj", "A"))
            b = torch.stack(take("down_proj", "B"), dim=2)
            tensors[f"{prefix}.lora_B.weight"] = b.flatten(1).contiguous()
        if "gate_proj" in names:
            gate_up = zip(take("gate_proj", "A"), take("up_proj", "A"), strict=True)
            a = torch.cat([torch.cat(pair) for pair in gate_up])
            tensors[f"{prefix}{inner}.lora_A.weight"] = a
            gate, up = take("gate_proj", "B"), take("up_proj", "B")
            b = torch.zeros(2 * gate[0].shape[0], 2 * rank, count)
            rows = _rows_of_halves(b.shape[0], config)
            b[rows[0], :rank] = torch.stack(gate, dim=2)
            b[rows[1], rank:] = torch.stack(up, dim=2)
            tensors[f"{prefix}{inner}.lora_B.weight"] = b.flatten(1).contiguous()
    save_file(tensors, folder / "adapter_model.safetensors")


def _rows_of_halves(rows: int, config: Any) -> tuple[slice, slice]:
    """Returns the rows of gate and those of up in a fused B."""
    if _in_turns(config):
        return slice(0, rows, 2), slice(1, rows, 2)
    return slice(0, rows // 2), slice(rows // 2, rows)


def _linear_layers(model: Any) -> dict[str, tuple[int, int]]:
    """Returns the shape of each linear layer by path. Experts have one path each."""
    config = model.config.get_text_config()
    (gate, up, down), block = _spelling(config)
    layers: dict[str, tuple[int, int]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        path = name.removesuffix(".weight")
        is_router = name.endswith(".mlp.router.weight")
        if parameter.ndim == 2 and name.endswith(".weight") and not is_router:
            layers[path] = (parameter.shape[0], parameter.shape[1])
        if parameter.ndim != 3 or ".experts." not in name:
            continue
        experts = path.replace(".mlp.", f".{block}.").rsplit(".", 1)[0]
        count, rows, columns = parameter.shape
        if _in_turns(config):
            rows, columns = columns, rows
        for expert in range(count):
            if path.endswith("gate_up_proj"):
                layers[f"{experts}.{expert}.{gate}"] = (rows // 2, columns)
                layers[f"{experts}.{expert}.{up}"] = (rows // 2, columns)
            else:
                layers[f"{experts}.{expert}.{down}"] = (rows, columns)
    return layers


def of_single_experts(
    fused: dict[str, np.ndarray], config: Any
) -> dict[str, np.ndarray]:
    """Converts the tensors of fused parameters to tensors of single experts. A fused
    A is [E R, in], expert by expert. A fused B is [out, R E], with the experts
    innermost. Gate and up each have half of R and half of B's rows."""
    if not has_experts(config):
        return fused
    (gate, up, down), block = _spelling(config)
    count = getattr(config, "num_local_experts", None) or config.num_experts
    single: dict[str, np.ndarray] = {}
    for name, value in fused.items():
        if ".mlp.experts." not in name:
            single[name] = value
            continue
        path, _, factor = name.rpartition(".lora_")
        path = path.replace(".mlp.", f".{block}.")
        inner = path.endswith(".base_layer")
        path = path.removesuffix(".base_layer")
        for expert in range(count):
            if factor.startswith("A"):
                part = value.reshape(count, -1, value.shape[1])[expert]
            else:
                part = value.reshape(value.shape[0], -1, count)[:, :, expert]
            if inner and factor.startswith("B") and _in_turns(config):
                part = np.concatenate((part[0::2], part[1::2]))
            for module, piece in _pieces(part, factor, (gate, up), down, inner):
                single[f"{path}.{expert}.{module}.lora_{factor}"] = piece
    return single


def keep_halves_apart(parameters: dict[str, Any], config: Any) -> None:
    """Makes the gradient zero outside the diagonal blocks of gate and up in fused B
    matrices [2 F, R E], so that peft trains only what single experts can
    express."""
    for name, parameter in parameters.items():
        if ".mlp.experts.base_layer.lora_B" not in name:
            continue
        mask = torch.zeros_like(parameter)
        rows, columns = _rows_of_halves(mask.shape[0], config), mask.shape[1] // 2
        mask[rows[0], :columns] = 1.0
        mask[rows[1], columns:] = 1.0
        parameter.register_hook(lambda grad, mask=mask: grad * mask)


def _pieces(
    part: np.ndarray, factor: str, gate_up: tuple[str, str], down: str, inner: bool
) -> list[tuple[str, np.ndarray]]:
    if not inner:
        return [(down, part)]
    if factor.startswith("A"):
        return list(zip(gate_up, np.split(part, 2), strict=True))
    halves = [np.split(rows, 2, axis=1) for rows in np.split(part, 2)]
    # peft's fused B has blocks outside the diagonal. They are zero, and single
    # experts do not have them.
    return [(gate_up[0], halves[0][0]), (gate_up[1], halves[1][1])]
