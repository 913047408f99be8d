"""Times loading a model: Weft's loader compared with `cat` of the same files, with a
warm page cache. Also measures the loader's peak memory and the bytes that it reads.

The model is a Llama with random bf16 weights in shards, loaded as bf16. Sides take
turns, and the best time counts. A process loads several times and keeps its memory
between loads, so only the first load waits until the machine provides memory. This wait
would distort the comparison: cat has no such wait, and on a virtual machine the wait
may be longer than the rest of the load. `first_seconds` is the time of the first load.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import daemon
import report
import timing
from processes import scratch

LOAD_BENCH = daemon.BUILD_DIR / "tests" / "bench" / "load_bench"
# With these settings glibc reuses freed memory, whatever its size.
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
LEAST_RATE = 0.8  # Least rate of the loader, as a multiple of cat's.
MOST_MEMORY = 1.05  # Most memory, as a multiple of the bytes of the kept weights.
SPARE_BYTES = 150e6  # Memory that the process may use beyond the weights.
SPARE_READ_BYTES = 1e6  # Bytes that may be read per file beyond the weights.


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    with scratch(options.scratch) as folder:
        write_model(folder, options.layers, options.shard)
        files = sorted(folder.glob("*.safetensors"))
        _cat(files)
        runs: dict[str, list[dict[str, Any]]] = {"cat": [], "weft": []}
        for _ in range(options.rounds):
            runs["cat"].append(
                {"seconds": min(_cat(files) for _ in range(options.reps))}
            )
            runs["weft"].append(load(folder, "bf16", options.reps))
        size = sum(file.stat().st_size for file in files)
    result = _make(options, runs, size)
    print(f"load: {size / 1e9:.2f} GB", file=sys.stderr)
    report.emit_ratios(options=options, **result)
    return 0


def write_model(folder: Path, layers: int, shard: str) -> None:
    """Writes random weights with transformers' names and shapes, in shards."""
    import torch
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "llama",
        hidden_size=2560,
        intermediate_size=6912,
        num_hidden_layers=layers,
        num_attention_heads=20,
        num_key_value_heads=20,
        vocab_size=32000,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    state = model.state_dict()
    split = split_torch_state_dict_into_shards(state, max_shard_size=shard)
    for name, tensors in split.filename_to_tensors.items():
        values = {n: torch.empty(state[n].shape, dtype=torch.bfloat16) for n in tensors}
        for value in values.values():
            value.uniform_(-0.02, 0.02)
        save_file(values, folder / name, metadata={"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index), "utf-8")
    config.save_pretrained(folder)


def load(folder: Path, dtype: str, reps: int) -> dict[str, Any]:
    """Runs one process of load_bench and returns what it prints."""
    command = [str(LOAD_BENCH), str(folder), dtype, str(reps)]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, env={**os.environ, **KEEP_MEMORY}, check=True
    )
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def memory_limit(run: dict[str, Any]) -> float:
    return float(run["kept_bytes"] * MOST_MEMORY + SPARE_BYTES)


def read_limit(run: dict[str, Any]) -> float:
    """Returns the most bytes that a load may read, if the files have the weights in the
    dtype that is loaded."""
    return float(run["kept_bytes"] + SPARE_READ_BYTES * run["files"])


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="run.py load",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=3, help="processes of each side")
    parser.add_argument("--reps", type=int, default=4, help="loads of a process")
    parser.add_argument("--layers", type=int, default=24, help="159 MB each")
    parser.add_argument("--shard", default="1GB", help="largest file")
    parser.add_argument("--scratch", type=Path, help="where the model is written")
    parser.add_argument("--output", type=Path, help="also write the JSON line here")
    return parser.parse_args(arguments)


def _cat(files: list[Path]) -> float:
    command = ["cat", *map(str, files)]
    return timing.once(
        lambda: subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    )


def _make(
    options: argparse.Namespace, runs: dict[str, list[dict[str, Any]]], size: int
) -> dict[str, Any]:
    best = {side: min(run["seconds"] for run in runs[side]) for side in runs}
    peak = max(runs["weft"], key=lambda run: run["peak_rss_bytes"])
    ratios = {
        "rate weft/cat": report.ratio(best["cat"] / best["weft"], at_least=LEAST_RATE),
        "peak memory/limit": report.ratio(
            peak["peak_rss_bytes"] / memory_limit(peak), at_most=1
        ),
        "bytes read/limit": report.ratio(
            peak["rchar_bytes"] / read_limit(peak), at_most=1
        ),
    }
    sides = {
        side: {
            "seconds": best[side],
            "all_seconds": [run["seconds"] for run in runs[side]],
            "bytes_per_second": size / best[side],
        }
        for side in runs
    }
    sides["weft"]["first_seconds"] = [run["first_seconds"] for run in runs["weft"]]
    for name in ("peak_rss_bytes", "bytes_read", "rchar_bytes"):
        sides["weft"][name] = peak[name]
    return {
        "bench": "load",
        "ours": {"weft": sides["weft"]},
        "peer": {"cat": sides["cat"]},
        "ratio": ratios,
        "config": {
            "bytes": size,
            "kept_bytes": peak["kept_bytes"],
            "files": peak["files"],
            "layers": options.layers,
            "rounds": options.rounds,
            "reps": options.reps,
        },
    }
