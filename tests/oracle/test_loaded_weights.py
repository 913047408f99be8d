"""Tests that the decoder holds what the files hold, bit by bit."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forms
import pytest
import torch
from daemon import BUILD_DIR
from models import demo_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

DUMP = BUILD_DIR / "tests" / "oracle" / "dump_weights"
DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}
SHARD = "100MB"

# The decoder's names of the layers' tensors that it stacks.
STACKED = {
    "input_norm": ("input_layernorm.weight",),
    "qkv.weight": tuple(f"self_attn.{p}_proj.weight" for p in "qkv"),
    "o.weight": ("self_attn.o_proj.weight",),
    "mlp_norm": ("post_attention_layernorm.weight",),
    "gate_up.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "down.weight": ("mlp.down_proj.weight",),
}


@pytest.fixture(scope="module")
def smollm2() -> Any:
    """Loads the model in the dtype in which it was published."""
    return AutoModelForCausalLM.from_pretrained(demo_model(), dtype=torch.bfloat16)


@pytest.fixture(params=forms.FORMS)
def folder(
    request: pytest.FixtureRequest, smollm2: Any, tmp_path: Path
) -> Iterator[Path]:
    path = forms.write(smollm2, tmp_path / "model", request.param, SHARD)
    yield path
    for file in forms.weight_files(path):
        file.unlink()


def _expected(source: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    embedding = source["model.embed_tokens.weight"]
    held = {
        "embedding": embedding,
        "head": embedding,
        "final_norm": source["model.norm.weight"],
    }
    num_layers = sum(name.endswith("q_proj.weight") for name in source)
    for layer in range(num_layers):
        for name, parts in STACKED.items():
            held[f"layers.{layer}.{name}"] = torch.cat(
                [source[f"model.layers.{layer}.{part}"] for part in parts]
            )
    return held


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_smollm2_from_every_form(folder: Path, dtype: str, tmp_path: Path) -> None:
    source = forms.read(folder)
    assert {tensor.dtype for tensor in source.values()} == {torch.bfloat16}
    path = tmp_path / "held.safetensors"
    subprocess.run([DUMP, dtype, folder, path], check=True, timeout=120)
    held, expected = load_file(path), _expected(source)
    path.unlink()
    assert set(held) == set(expected) and len(expected) == 3 + 30 * len(STACKED)
    for name, tensor in expected.items():
        assert held[name].dtype == DTYPES[dtype]
        assert torch.equal(_bits(held[name]), _bits(tensor.to(DTYPES[dtype]))), name
