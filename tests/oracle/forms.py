"""Writes a model in each of the forms that Hugging Face folders have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import load_file

FORMS = ("safetensors", "safetensors-shards", "bin", "bin-shards")
_NO_SHARDS = "100GB"


def write(model: Any, folder: Path, form: str, shard: str) -> Path:
    """Writes config and weights of a transformers model.

    form: one of FORMS. shard: size of the largest shard, such as "40KB". The model
    must be larger than one shard.
    """
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    shard = shard if form.endswith("-shards") else _NO_SHARDS
    if form.startswith("safetensors"):
        model.save_pretrained(folder, max_shard_size=shard)
    else:
        _save_bin(model.state_dict(), folder, shard)
    assert len(weight_files(folder)) > 1 or not form.endswith("-shards")
    return folder


def weight_files(folder: Path) -> list[Path]:
    return sorted((*folder.glob("*.safetensors"), *folder.glob("*.bin")))


def remove_weights(folder: Path) -> None:
    """Removes the files with weights and their index."""
    for path in (*weight_files(folder), *folder.glob("*.index.json")):
        path.unlink()


def read(folder: Path) -> dict[str, torch.Tensor]:
    """Returns all tensors of a folder, read by the formats' own libraries."""
    tensors: dict[str, torch.Tensor] = {}
    for path in weight_files(folder):
        is_bin = path.suffix == ".bin"
        file = torch.load(path, weights_only=True) if is_bin else load_file(path)
        tensors.update(file)
    return tensors


def _save_bin(state: dict[str, torch.Tensor], folder: Path, shard: str) -> None:
    """Writes what save_pretrained(safe_serialization=False) wrote in transformers 4
    and earlier.

    A tied head is written besides the embedding. Both share one storage.
    """
    split = split_torch_state_dict_into_shards(
        state, filename_pattern="pytorch_model{suffix}.bin", max_shard_size=shard
    )
    if not split.is_sharded:
        torch.save(state, folder / "pytorch_model.bin")
        return
    for name, tensors in split.filename_to_tensors.items():
        torch.save({tensor: state[tensor] for tensor in tensors}, folder / name)
    index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
    path = folder / "pytorch_model.bin.index.json"
    path.write_text(json.dumps(index), "utf-8")
