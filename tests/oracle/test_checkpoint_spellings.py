"""Tests that a model gives the same bits if its tensors have other names, or if its
config has another spelling. Other tests compare the original with transformers."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forms
import numpy as np
import pytest
import torch
from conftest import DigestOf
from daemon import WEFTD, running
from models import tiny_model
from parallel import EXPERT_SIZES, SIZES
from safetensors.torch import save_file
from texts import next_token, random_tokens
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

WRAPPED = "gemma3-wrapped"
LENGTHS = (60, 2, 33)


def _copy(kind: str, folder: Path) -> Path:
    """Copies the folder of a tiny model, so that a test can change it."""
    shutil.copytree(tiny_model(kind), folder)
    return folder


def _rename(folder: Path, new_name: Callable[[str], str]) -> set[str]:
    """Writes the tensors under other names. Returns these names."""
    tensors = {new_name(n): t.clone() for n, t in forms.read(folder).items()}
    forms.remove_weights(folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return set(tensors)


def _plain_name(name: str) -> str:
    """Removes the prefix that a wrapper puts before the decoder's tensor names."""
    for prefix in ("model.language_model.", "language_model.model."):
        if name.startswith(prefix):
            return "model." + name.removeprefix(prefix)
    return name.removeprefix("language_model.")


@pytest.mark.parametrize(
    ("decoder", "outer"),
    (
        ("", ""),
        ("model.", ""),
        ("model.language_model.", ""),
        ("language_model.model.", "language_model."),
        ("language_model.", ""),
        ("transformer.", ""),
    ),
)
@pytest.mark.parametrize("kind", ("qwen3", WRAPPED))
def test_prefixes_of_tensor_names(
    kind: str, decoder: str, outer: str, digest_of: DigestOf, tmp_path: Path
) -> None:
    def new_name(name: str) -> str:
        if "vision" in name or "multi_modal" in name:
            return name
        name = _plain_name(name)
        if name.startswith("model."):
            return decoder + name.removeprefix("model.")
        return outer + name

    folder = _copy(kind, tmp_path / "model")
    names = _rename(folder, new_name)
    assert f"{decoder}layers.0.self_attn.q_proj.weight" in names
    assert kind == WRAPPED or f"{outer}lm_head.weight" in names
    assert digest_of(folder) == digest_of(tiny_model(kind))


@pytest.mark.parametrize("kind", ("llama-tied", WRAPPED))
def test_a_model_that_was_saved_without_its_head(
    kind: str, digest_of: DigestOf, tmp_path: Path
) -> None:
    folder = _copy(kind, tmp_path / "model")
    for path in forms.weight_files(folder):
        path.unlink()
    model = AutoModel.from_pretrained(tiny_model(kind))
    model.save_pretrained(tmp_path / "headless")
    for path in forms.weight_files(tmp_path / "headless"):
        shutil.copy(path, folder)
    assert digest_of(folder) == digest_of(tiny_model(kind))


@pytest.mark.parametrize("kind", ("llama-tied", "gemma2", WRAPPED))
def test_a_tied_head_may_be_in_the_file_too(
    kind: str, digest_of: DigestOf, tmp_path: Path
) -> None:
    folder = _copy(kind, tmp_path / "model")
    tensors = forms.read(folder)
    (embedding,) = (n for n in tensors if n.endswith("embed_tokens.weight"))
    assert not any(name.endswith("lm_head.weight") for name in tensors)
    tensors["lm_head.weight"] = tensors[embedding].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert digest_of(folder) == digest_of(tiny_model(kind))


@pytest.mark.parametrize(
    "kind",
    ("qwen3-moe", "qwen2-moe", "mixtral", "qwen3-5-moe", "minimax-m2", "glm4-moe"),
)
def test_one_tensor_may_have_all_experts(
    kind: str, digest_of: DigestOf, tmp_path: Path
) -> None:
    folder = _copy(kind, tmp_path / "model")
    forms.remove_weights(folder)
    model = AutoModelForCausalLM.from_pretrained(tiny_model(kind))
    model.save_pretrained(folder, save_original_format=False)
    tensors = forms.read(folder)
    assert tensors["model.layers.2.mlp.experts.gate_up_proj"].ndim == 3
    assert not any(".experts.0." in name for name in tensors)
    assert digest_of(folder) == digest_of(tiny_model(kind))


def _write_mxfp4(tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Replaces the experts' matrices in `tensors` by random MXFP4 values, which
    transformers widens to f32. Writes all tensors into the folder, with the experts'
    matrices in MXFP4."""
    generator = torch.Generator().manual_seed(4)
    stored = {}
    for name, tensor in tensors.items():
        if tensor.ndim != 3:
            stored[name] = tensor
            continue
        count, columns, rows = tensor.shape
        shape = (count, rows, columns // 32)
        blocks = torch.randint(
            0, 256, (*shape, 16), dtype=torch.uint8, generator=generator
        )
        scales = torch.randint(120, 126, shape, dtype=torch.uint8, generator=generator)
        stored[f"{name}_blocks"], stored[f"{name}_scales"] = blocks, scales
        wide = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        assert wide.shape == tensor.shape
        tensors[name] = wide.contiguous()
    config = json.loads((folder / "config.json").read_text("utf-8"))
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})


def _wide_and_narrow(root: Path) -> tuple[Path, Path]:
    """Writes a model with its experts in f32, and with the same values in MXFP4."""
    wide, narrow = (_copy("gpt-oss", root / name) for name in ("wide", "narrow"))
    tensors = forms.read(wide)
    for folder in (wide, narrow):
        forms.remove_weights(folder)
    _write_mxfp4(tensors, narrow)
    save_file(tensors, wide / "model.safetensors", metadata={"format": "pt"})
    return wide, narrow


def test_experts_in_four_bits(digest_of: DigestOf, tmp_path: Path) -> None:
    wide, narrow = _wide_and_narrow(tmp_path)
    assert digest_of(narrow) == digest_of(wide) != digest_of(tiny_model("gpt-oss"))


@pytest.mark.parametrize(
    "flags",
    (SIZES["tensor 2"], EXPERT_SIZES["tensor 2, experts 2"]),
    ids=("two ranks", "experts of two ranks"),
)
def test_ranks_divide_experts_in_four_bits(
    flags: tuple[str, ...], tmp_path: Path
) -> None:
    data = [next_token(random_tokens(320, n, n)) for n in LENGTHS]
    results = []
    for folder in _wide_and_narrow(tmp_path):
        with (
            running(folder, tmp_path / f"weftd-{folder.name}", *flags) as daemon,
            daemon.client() as client,
        ):
            results.append(client.forward(data).results)
    for left, right in zip(*results, strict=True):
        np.testing.assert_array_equal(left.logprobs, right.logprobs)


def _bad_scale(tensors: dict[str, torch.Tensor]) -> str:
    tensors["model.layers.1.mlp.experts.down_proj_scales"][2, 3, 0] = 255
    return "expert 2: MXFP4 block 9 has scale 255"


def _missing_scales(tensors: dict[str, torch.Tensor]) -> str:
    del tensors["model.layers.1.mlp.experts.down_proj_scales"]
    return "mlp.experts.down_proj_scales"


def _short_blocks(tensors: dict[str, torch.Tensor]) -> str:
    name = "model.layers.0.mlp.experts.gate_up_proj_blocks"
    tensors[name] = tensors[name][:, 2:].clone()
    return "expected [6, 192, 2, 16]"


def _refusal(folder: Path) -> str:
    """Returns what weftd says when it does not start with the model."""
    listen = ("--listen", "127.0.0.1:0", "--metrics-listen=")
    done = subprocess.run(
        [WEFTD, "--model", folder, "--device", "cpu", *listen],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode != 0
    return done.stderr


@pytest.mark.parametrize("damage", (_bad_scale, _missing_scales, _short_blocks))
def test_damaged_four_bit_experts_are_refused(damage: Any, tmp_path: Path) -> None:
    folder = _copy("gpt-oss", tmp_path / "model")
    tensors = forms.read(folder)
    forms.remove_weights(folder)
    _write_mxfp4(tensors, folder)
    stored = forms.read(folder)
    message = damage(stored)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    assert message in _refusal(folder)


def test_experts_in_both_forms_are_refused(tmp_path: Path) -> None:
    folder = _copy("mixtral", tmp_path / "model")
    single = forms.read(folder)
    name = "model.layers.0.block_sparse_moe.experts.1.w1.weight"
    fused = {
        "model.layers.0.mlp.experts.gate_up_proj": torch.zeros(
            4, 2 * single[name].shape[0], single[name].shape[1]
        )
    }
    save_file({**single, **fused}, folder / "model.safetensors")
    refusal = _refusal(folder)
    assert "block_sparse_moe.experts" in refusal and "no place" in refusal


def _as_transformers_4(config: dict[str, Any], kind_key: str) -> dict[str, Any]:
    """Turns a config.json of transformers 5 into the older spelling.

    kind_key: the key of rope_scaling's kind, "rope_type" or "type".
    """
    old = {**config, "transformers_version": "4.50.0"}
    old["torch_dtype"] = old.pop("dtype", "float32")
    if "text_config" in old:
        old["text_config"] = _as_transformers_4(old["text_config"], kind_key)
        return old
    types = old.get("layer_types") or []
    if "linear_attention" not in types:
        old.pop("layer_types", None)
    rope = old.pop("rope_parameters")
    if "full_attention" in rope:
        old["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        old["sliding_window_pattern"] = types.index("full_attention") + 1
        old.pop("_sliding_window_pattern", None)
        rope = rope["full_attention"]
    scaling = {**rope}
    old["rope_theta"] = scaling.pop("rope_theta")
    if "partial_rotary_factor" in scaling:
        old["partial_rotary_factor"] = scaling.pop("partial_rotary_factor")
    scaling[kind_key] = scaling.pop("rope_type")
    old["rope_scaling"] = None if scaling == {kind_key: "default"} else scaling
    return old


def _meaning(folder: Path) -> Any:
    """Returns what transformers reads from a folder's config.json, without the
    fields that depend on the spelling."""
    spelling = {
        "transformers_version",
        "_name_or_path",
        "dtype",
        "type",
        "sliding_window_pattern",
        "_sliding_window_pattern",
        "partial_rotary_factor",
    }
    return _without(AutoConfig.from_pretrained(folder).to_dict(), spelling)


def _without(value: Any, names: set[str]) -> Any:
    if not isinstance(value, dict):
        return value
    return {n: _without(v, names) for n, v in value.items() if n not in names}


@pytest.mark.parametrize(
    "kind",
    (
        "qwen2",
        "qwen2-moe",
        "qwen3",
        "qwen2-5-vl",
        "gemma2",
        "gemma3",
        "gpt-oss",
        "olmo3",
    ),
)
def test_windows_are_in_the_layers_of_transformers(
    kind: str, digest_of: DigestOf, tmp_path: Path
) -> None:
    """A file without layer_types, and one with those that transformers fills in."""
    bare, told = (_copy(kind, tmp_path / name) for name in ("bare", "told"))
    config = json.loads((bare / "config.json").read_text("utf-8"))
    text = config.get("text_config", config)
    del text["layer_types"]
    text["sliding_window"] = 20
    if "max_window_layers" in text:
        text |= {"use_sliding_window": True, "max_window_layers": 2}
    (bare / "config.json").write_text(json.dumps(config), "utf-8")
    filled = AutoConfig.from_pretrained(bare).get_text_config()
    assert "sliding_attention" in filled.layer_types
    text["layer_types"] = filled.layer_types
    (told / "config.json").write_text(json.dumps(config), "utf-8")
    assert digest_of(bare) == digest_of(told)


@pytest.mark.parametrize(
    ("kind", "kind_key"),
    (
        ("llama-tied", "rope_type"),
        ("llama-untied", "rope_type"),
        ("llama-linear-rope", "type"),
        ("llama3-rope", "rope_type"),
        ("mistral", "rope_type"),
        ("qwen2", "rope_type"),
        ("qwen3", "rope_type"),
        ("gemma2", "rope_type"),
        ("gemma3", "rope_type"),
        (WRAPPED, "rope_type"),
        ("qwen2-yarn", "type"),
        ("qwen2-moe", "rope_type"),
        ("qwen3-moe", "rope_type"),
        ("mixtral", "rope_type"),
        ("gpt-oss", "rope_type"),
        ("smollm3", "rope_type"),
        ("olmo2", "rope_type"),
        ("granite", "rope_type"),
        ("phi3", "type"),
        ("phi3-partial", "type"),
        ("glm4", "rope_type"),
        ("seed-oss", "rope_type"),
        ("glm4-moe", "rope_type"),
        ("minimax-m2", "rope_type"),
        ("qwen2-5-vl", "type"),
        ("qwen3-vl", "rope_type"),
        ("qwen3-next", "rope_type"),
    ),
)
def test_the_spelling_of_transformers_4(
    kind: str, kind_key: str, digest_of: DigestOf, tmp_path: Path
) -> None:
    folder = _copy(kind, tmp_path / "model")
    path = folder / "config.json"
    config = json.loads(path.read_text("utf-8"))
    old = _as_transformers_4(config, kind_key)
    path.write_text(json.dumps(old), "utf-8")
    assert "rope_parameters" not in old.get("text_config", old)
    assert _meaning(folder) == _meaning(tiny_model(kind))
    assert digest_of(folder) == digest_of(tiny_model(kind))


def test_the_daemon_reads_other_spellings(daemon_for: Any, tmp_path: Path) -> None:
    kind = "qwen3"
    folder = _copy(kind, tmp_path / "model")
    _rename(folder, lambda name: re.sub(r"^model\.", "transformer.", name))
    path = folder / "config.json"
    old = _as_transformers_4(json.loads(path.read_text("utf-8")), "rope_type")
    path.write_text(json.dumps(old), "utf-8")
    data = [next_token(random_tokens(320, n, n)) for n in LENGTHS]
    with daemon_for(kind).client() as client:
        expected = client.forward(data).results
    with running(folder, tmp_path / "weftd") as daemon, daemon.client() as client:
        results = client.forward(data).results
    for left, right in zip(results, expected, strict=True):
        np.testing.assert_array_equal(left.logprobs, right.logprobs)
