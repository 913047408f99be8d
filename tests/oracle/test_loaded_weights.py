"""Tests that the decoder holds what the files hold, bit by bit."""

from __future__ import annotations

import subprocess
from pathlib import Path

import forms
import pytest
import torch
from conftest import SHORT_SMOLLM2, SMOLLM2, model_folder
from daemon import BUILD_DIR
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

DUMP = BUILD_DIR / "tests" / "oracle" / "dump_weights"
DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}
SHARD = "20MB"

# A layer's tensors in the decoder, with the file's tensors that each one stacks.
STACKED = {
    "input_norm": ("input_layernorm.weight",),
    "qkv.weight": tuple(f"self_attn.{p}_proj.weight" for p in "qkv"),
    "o.weight": ("self_attn.o_proj.weight",),
    "mlp_norm": ("post_attention_layernorm.weight",),
    "gate_up.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "down.weight": ("mlp.down_proj.weight",),
}


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


# The model was published in bf16, as one file. All layers of it are loaded in this
# form and dtype. The others have its first layers.
@pytest.mark.parametrize(
    ("source", "form", "dtypes"),
    [
        (SMOLLM2, "safetensors", ("bf16",)),
        (SHORT_SMOLLM2, "safetensors", ("f32",)),
        *((SHORT_SMOLLM2, form, ("bf16", "f32")) for form in forms.FORMS[1:]),
    ],
)
def test_smollm2_from_every_form(
    source: str, form: str, dtypes: tuple[str, ...], tmp_path: Path
) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        model_folder(source), dtype=torch.bfloat16
    )
    folder = forms.write(model, tmp_path / "model", form, SHARD)
    tensors = forms.read(folder)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    expected = _expected(tensors)
    assert len(expected) == 3 + model.config.num_hidden_layers * len(STACKED)
    path = tmp_path / "held.safetensors"
    for dtype in dtypes:
        subprocess.run([DUMP, dtype, folder, path], check=True, timeout=120)
        held = load_file(path)
        assert set(held) == set(expected)
        for name, tensor in expected.items():
            assert held[name].dtype == DTYPES[dtype]
            wanted = tensor.to(DTYPES[dtype])
            assert torch.equal(_bits(held[name]), _bits(wanted)), name
    forms.remove_weights(folder)
    path.unlink()
