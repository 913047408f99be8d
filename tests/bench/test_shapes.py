"""Tests that models of shapes.py have the tensors that transformers expects."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import run  # noqa: F401  Sets sys.path for the imports below.

# isort: split
import shape_peer
import shapes

PUBLISHED = {
    "llama-3.1-8b": 8_030_261_248,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3.5-0.8b": 752_393_024,  # The part that reads images is left out.
    "smollm2-135m": 134_515_008,
}


@pytest.mark.parametrize("name", shapes.SHAPES)
def test_tensors_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = shapes.SHAPES[name]
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    wanted = {n: tuple(p.shape) for n, p in model.named_parameters()}
    assert fused(dict(shape_peer.tensors(config))) == wanted
    total = sum(p.numel() for p in model.parameters())
    assert total == PUBLISHED.get(name, total)


def fused(tensors: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Returns the tensors with each layer's experts fused as in transformers."""
    result = {}
    for name, sizes in tensors.items():
        layer, experts, module = name.partition(".experts.")
        if not experts:
            result[name] = sizes
            continue
        number, module = module.removesuffix(".weight").split(".")
        if module == "up_proj":
            continue
        rows, columns = sizes
        if module == "gate_proj":
            module, rows = "gate_up_proj", 2 * rows
        result[f"{layer}.experts.{module}"] = (int(number) + 1, rows, columns)
    return result
