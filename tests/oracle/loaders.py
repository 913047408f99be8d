"""What programs make of a PEFT folder: the matrices that they add to a model's weights,
by rules that were read in their sources and are written here anew."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import load_file

Array = np.ndarray
# The classes of vLLM with is_3d_moe_weight (vllm/model_executor/models). They take the
# experts of a layer as one parameter, and all others take single experts.
FUSED_IN_VLLM = ("gpt_oss", "qwen3_vl_moe", "qwen3_5_moe")
# Mixtral's names of an expert's projections.
MIXTRAL = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
FUSED = re.compile(r"(.+\.mlp\.experts)(\.base_layer)?")
SINGLE = re.compile(r"(.+)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)")


class Delta(NamedTuple):
    """What is added to a weight, [out, in], and how far f32 may round that."""

    values: Array
    bound: Array


class Pair(NamedTuple):
    a: Array  # [rank, in], or of all experts [experts * rank, in].
    b: Array  # [out, rank], or of all experts [out, rank * experts].

    def delta(self, scale: float) -> Delta:
        bound = abs(self.b) @ abs(self.a) * (scale * 2.0**-22)
        return Delta(scale * (self.b @ self.a), bound)

    def experts(self, count: int) -> list[Pair]:
        """B has the experts innermost (peft/tuners/lora/layer.py, ParamWrapper)."""
        a = self.a.reshape(count, -1, self.a.shape[1])
        b = self.b.reshape(len(self.b), -1, count)
        return [Pair(a[e], b[:, :, e]) for e in range(count)]


class Folder:
    def __init__(self, path: Path) -> None:
        self.config: dict[str, Any] = json.loads(
            (path / "adapter_config.json").read_text("utf-8")
        )
        found: dict[str, dict[str, Array]] = {}
        for name, tensor in load_file(path / "adapter_model.safetensors").items():
            match = re.fullmatch(
                r"base_model\.model\.(.+)\.lora_(?:embedding_)?([AB])(?:\.weight)?",
                name,
            )
            assert match, name
            found.setdefault(match[1], {})[match[2]] = tensor.astype(np.float64)
        self.pairs = {path: Pair(pair["A"], pair["B"]) for path, pair in found.items()}

    def deltas(
        self, scale_of: Callable[[str, Pair], float], num_experts: int
    ) -> dict[str, Delta]:
        """Returns what is added by path, with plain names and each expert's gate and
        up as one."""
        deltas: dict[str, Delta] = {}
        for path, pair in self.pairs.items():
            scale = scale_of(path, pair)
            plain = path.replace("language_model.", "")
            if match := FUSED.fullmatch(plain):
                part = "gate_up_proj" if match[2] else "down_proj"
                for e, one in enumerate(pair.experts(num_experts)):
                    deltas[f"{match[1]}.{e}.{part}"] = one.delta(scale)
            elif match := SINGLE.fullmatch(plain):
                part = MIXTRAL.get(match[3], match[3])
                deltas[f"{match[1]}.mlp.experts.{match[2]}.{part}"] = pair.delta(scale)
            else:
                deltas[plain] = pair.delta(scale)
        for path in [path for path in deltas if re.search(r"\.\d+\.gate_proj$", path)]:
            stem = path.removesuffix("gate_proj")
            both = zip(deltas.pop(path), deltas.pop(f"{stem}up_proj"), strict=True)
            deltas[f"{stem}gate_up_proj"] = Delta(*map(np.concatenate, both))
        return deltas


def in_peft(folder: Folder, num_experts: int) -> dict[str, Delta]:
    """peft/utils/other.py, get_pattern_key: a key matches the end of a name. The name
    of a parameter is that of its module, and its own."""
    config = folder.config

    def scale_of(path: str, _: Pair) -> float:
        name = path
        if FUSED.fullmatch(path.replace("language_model.", "")):
            inner = path.endswith(".base_layer")
            part = "gate_up_proj" if inner else "down_proj"
            name = f"{path.removesuffix('.base_layer')}.{part}"
        elif f"{path}.weight" in (config.get("target_parameters") or ()):
            name = f"{path}.weight"

        def value(pattern: str, usual: str) -> float:
            for key, found in config.get(pattern, {}).items():
                if re.match(rf"(.*\.)?({key})$", name):
                    return float(found)
            return float(config[usual])

        return value("alpha_pattern", "lora_alpha") / value("rank_pattern", "r")

    return folder.deltas(scale_of, num_experts)


def in_vllm(
    folder: Folder, num_experts: int, model_type: str, is_wrapped: bool
) -> dict[str, Delta]:
    """vllm/lora/peft_helper.py: one scale, without patterns. vllm/lora/lora_model.py:
    names that match no module are refused, or, before an unknown prefix, left out."""
    stem = "model.language_model." if is_wrapped else "model."
    for path in folder.pairs:
        assert path.startswith((stem, "lm_head")), path
        assert path.startswith("model.language_model.") <= is_wrapped, path
        if ".experts" in path:
            is_fused = FUSED.fullmatch(path.replace("language_model.", "")) is not None
            assert is_fused == (model_type in FUSED_IN_VLLM), path
    scale = folder.config["lora_alpha"] / folder.config["r"]
    return folder.deltas(lambda *_: scale, num_experts)


def in_llama_cpp(folder: Folder) -> dict[str, Delta]:
    """src/llama-adapter.h, get_scale: the rank is that of the tensor. Its converter has
    no names for experts in one parameter."""
    for path in folder.pairs:
        assert not FUSED.fullmatch(path), path
    alpha = folder.config["lora_alpha"]
    return folder.deltas(lambda _, pair: alpha / pair.b.shape[1], 0)
