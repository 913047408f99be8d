"""Checkpoints as torch.save writes them: the same numbers as from safetensors."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from daemon import Daemon, running
from huggingface_hub import split_torch_state_dict_into_shards
from models import SMALL_SHARD, tiny_model
from texts import next_token, sequences
from transformers import AutoModelForCausalLM

Write = Callable[[Any, Path], None]


def _state_dict(model: Any, folder: Path) -> None:
    """An OrderedDict with _metadata; a tied head is there twice, in one storage."""
    torch.save(model.state_dict(), folder / "pytorch_model.bin")


def _parameters(model: Any, folder: Path) -> None:
    """A dict of Parameters that want gradients."""
    torch.save(dict(model.named_parameters()), folder / "pytorch_model.bin")


def _one_storage(model: Any, folder: Path) -> None:
    """Views of one flat buffer, by the newest pickle protocol."""
    state = model.state_dict()
    flat = torch.cat([tensor.reshape(-1) for tensor in state.values()])
    views = flat.split([tensor.numel() for tensor in state.values()])
    torch.save(
        {n: v.view_as(t) for (n, t), v in zip(state.items(), views, strict=True)},
        folder / "pytorch_model.bin",
        pickle_protocol=5,
    )


def _shards(model: Any, folder: Path) -> None:
    """What save_pretrained(safe_serialization=False) wrote up to transformers 4."""
    state = model.state_dict()
    split = split_torch_state_dict_into_shards(
        state,
        filename_pattern="pytorch_model{suffix}.bin",
        max_shard_size=SMALL_SHARD,
    )
    assert split.is_sharded
    for name, tensors in split.filename_to_tensors.items():
        torch.save({tensor: state[tensor] for tensor in tensors}, folder / name)
    index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
    path = folder / "pytorch_model.bin.index.json"
    path.write_text(json.dumps(index), "utf-8")


def _folders(
    kind: str, dtype: torch.dtype, write: Write, root: Path
) -> tuple[Path, Path]:
    """The same weights as safetensors and as .bin."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model(kind), dtype=dtype)
    model.save_pretrained(root / "safetensors")
    model.config.save_pretrained(root / "bin")
    model.generation_config.save_pretrained(root / "bin")
    write(model, root / "bin")
    assert not list((root / "bin").glob("*.safetensors"))
    return root / "safetensors", root / "bin"


def _logprobs(folder: Path, kind: str, scratch: Path) -> list[np.ndarray]:
    vocab = json.loads((folder / "config.json").read_text("utf-8"))["vocab_size"]
    data = [next_token(t) for t in sequences(kind, folder, vocab)]
    with running(folder, scratch) as daemon, daemon.client() as client:
        return [np.asarray(r.logprobs) for r in client.forward(data).results]


@pytest.mark.parametrize(
    ("kind", "dtype", "write"),
    [
        ("llama-tied", torch.float32, _state_dict),
        ("llama-untied", torch.bfloat16, _shards),
        ("qwen3", torch.float16, _parameters),
        ("llama-bias", torch.bfloat16, _one_storage),
    ],
    ids=["state-dict-f32", "shards-bf16", "parameters-f16", "one-storage-bf16"],
)
def test_logprobs_are_those_of_the_safetensors_folder(
    kind: str, dtype: torch.dtype, write: Write, tmp_path: Path
) -> None:
    safetensors, bin_folder = _folders(kind, dtype, write, tmp_path)
    expected = _logprobs(safetensors, kind, tmp_path / "a")
    measured = _logprobs(bin_folder, kind, tmp_path / "b")
    for left, right in zip(expected, measured, strict=True):
        np.testing.assert_array_equal(left, right)


class _Command:
    """Unpickles as the return value of a shell command."""

    def __init__(self, command: str):
        self._command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self._command,)


def _hostile(model: Any, folder: Path) -> None:
    state = {**model.state_dict(), "x": _Command(f"touch {folder / 'was-here'}")}
    torch.save(state, folder / "pytorch_model.bin")


def _legacy(model: Any, folder: Path) -> None:
    torch.save(
        model.state_dict(),
        folder / "pytorch_model.bin",
        _use_new_zipfile_serialization=False,
    )


@pytest.mark.parametrize(
    ("write", "message"),
    [(_hostile, "names 'posix system'"), (_legacy, "torch's old format")],
    ids=["command", "legacy"],
)
def test_refuses_to_start_with(write: Write, message: str, tmp_path: Path) -> None:
    _, folder = _folders("llama-tied", torch.float32, write, tmp_path)
    daemon = Daemon(folder, tmp_path / "daemon")
    daemon.launch()
    assert daemon.wait() != 0
    log = daemon.log_tail()
    assert "pytorch_model.bin: " in log and message in log
    assert not (folder / "was-here").exists()
