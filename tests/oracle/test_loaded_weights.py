"""Tests that the decoder holds what the files hold, bit by bit."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
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


# The published form of the model has all layers. The other forms have only the
# first four.
@pytest.fixture(scope="module", params=forms.FORMS)
def folder_and_layers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, int]]:
    published = request.param == "safetensors"
    source = model_folder(SMOLLM2 if published else SHORT_SMOLLM2)
    # The model was published in bf16.
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    path = tmp_path_factory.mktemp("form") / "model"
    yield forms.write(model, path, request.param, SHARD), 30 if published else 4
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
def test_smollm2_from_every_form(
    folder_and_layers: tuple[Path, int], dtype: str, tmp_path: Path
) -> None:
    folder, num_layers = folder_and_layers
    source = forms.read(folder)
    assert {tensor.dtype for tensor in source.values()} == {torch.bfloat16}
    path = tmp_path / "held.safetensors"
    subprocess.run([DUMP, dtype, folder, path], check=True, timeout=120)
    held, expected = load_file(path), _expected(source)
    path.unlink()
    assert set(held) == set(expected)
    assert len(expected) == 3 + num_layers * len(STACKED)
    for name, tensor in expected.items():
        assert held[name].dtype == DTYPES[dtype]
        assert torch.equal(_bits(held[name]), _bits(tensor.to(DTYPES[dtype]))), name
