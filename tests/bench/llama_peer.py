"""Runs one process of llama.cpp, one sequence at a time, and prints one JSON line.
sample.py starts the process and sets allocator and threads. The process needs the
package llama-cpp-python and the demo model. It writes a copy of the model's GGUF file
with matrices in f32, bf16 or 8 bits (Q8_0)."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import gguf
import llama_cpp
import numpy as np
import peer_options
import timing
from gguf.quants import dequantize, quantize

sys.path.append(str(Path(__file__).resolve().parents[2] / "deploy"))

import prepare_demo_model

DTYPES = {
    "f32": gguf.GGMLQuantizationType.F32,
    "bf16": gguf.GGMLQuantizationType.BF16,
    "int8": gguf.GGMLQuantizationType.Q8_0,
}
ADDED_BY_WRITER = ("GGUF.version", "GGUF.tensor_count", "GGUF.kv_count")


def main() -> None:
    options = _parse()
    path = options.work / f"model-{options.dtype}.gguf"
    if not path.exists():
        write_model(path, options.dtype)
    prompt = [int(token) for token in np.load(options.work / "prompts.npy")[0]]
    model = llama_cpp.Llama(
        str(path),
        n_ctx=len(prompt) + options.tokens + 16,
        n_threads=options.threads,
        n_threads_batch=options.threads,
        type_k=llama_cpp.GGML_TYPE_F32,
        type_v=llama_cpp.GGML_TYPE_F32,
        verbose=False,
    )
    tokens = _draw(model, prompt, options.tokens)
    seconds = min(
        timing.each(lambda: _draw(model, prompt, options.tokens), options.reps)
    )
    print(
        json.dumps(
            {
                "seconds": {"1": seconds},
                "tokens": {"1": [tokens]},
                "versions": {"llama_cpp": llama_cpp.__version__},
            }
        )
    )


def write_model(path: Path, dtype: str) -> None:
    """Writes a copy of the demo model's GGUF file with matrices in `dtype`."""
    reader = gguf.GGUFReader(prepare_demo_model.find_gguf())
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(path, architecture)
    for name, field in reader.fields.items():
        if name in (*ADDED_BY_WRITER, "general.architecture", "general.file_type"):
            continue
        inner = field.types[1] if len(field.types) > 1 else None
        writer.add_key_value(name, field.contents(), field.types[0], sub_type=inner)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        kind = DTYPES[dtype] if values.ndim > 1 else DTYPES["f32"]
        data = values if kind == DTYPES["f32"] else quantize(values, kind)
        writer.add_tensor(tensor.name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _draw(model: llama_cpp.Llama, prompt: list[int], count: int) -> list[int]:
    """Returns the `count` most likely tokens after the prompt. Reads the prompt
    again each time."""
    drawn: list[int] = []
    for token in model.generate(prompt, temp=0.0, reset=True):
        drawn.append(int(token))
        if len(drawn) == count:
            break
    # The next call must not find the prompt in the cache.
    model.reset()
    model._ctx.kv_cache_clear()
    return drawn


def _parse() -> argparse.Namespace:
    parser = peer_options.parser()
    parser.add_argument("--dtype", choices=DTYPES, required=True)
    parser.add_argument("--batches", type=int, nargs="+", help="only 1 is drawn")
    parser.add_argument("--tokens", type=int, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
