"""Computes the highest rate at which a machine could sample, and the fraction of this
rate that was reached.

The limit of a batch follows from the least time of one iteration. This time is the
larger of two numbers: the bytes to read divided by the rate of memory, and the
floating-point operations divided by torch's GEMM rate.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import flops
import inputs
import report
from peer_options import DTYPES
from sample_client import Points, decoding_seconds

# The target is PEER_TARGETS[batch] times transformers' tokens per second, or
# LIMIT_TARGETS[device] times the limit, whichever is less.
PEER_TARGETS = {1: 2.5, 8: 2.5, 32: 2.0}
LIMIT_TARGETS = {"cpu": 0.8, "cuda": 0.75}
MIXED_TARGET = 0.85
INT8_TARGET = 1.7
GROUP_TARGET = 4.0
BF16_BYTES = 2

Runs = list[dict[str, Any]]


def by_batch(runs: Runs, gemm: float, options: argparse.Namespace) -> dict[str, Any]:
    """Returns the most tokens per second of each batch size, and the reading rate from
    which they are computed. Each run has the bytes of an iteration by batch size."""
    read = max(run["read_bytes_per_second"] for run in runs)
    length = options.prompt + options.tokens // 2
    model = inputs.config(options.model)
    result: dict[str, Any] = {"read_gb_per_second": read / 1e9}
    for batch in options.batches:
        reading = runs[0]["bytes"][str(batch)] / read
        working = batch * flops.decode(model, length) / gemm
        result[f"tokens_per_second {batch}"] = batch / max(reading, working)
    return result


def of_device(peers: Runs, options: argparse.Namespace) -> Runs:
    """Returns runs in the form that by_batch takes. Their reading rate is torch's rate
    of copying or of reading on the device, whichever is higher."""
    model = inputs.config(options.model)
    length = options.prompt + options.tokens // 2
    bytes_read = {
        str(batch): flops.decode_bytes(model, batch, length, BF16_BYTES, BF16_BYTES)
        for batch in options.batches
    }
    return [
        {
            "bytes": bytes_read,
            "read_bytes_per_second": max(
                run["read_bytes_per_second"], run["copy_bytes_per_second"]
            ),
        }
        for run in peers
    ]


def ratios(
    best: dict[str, Any],
    limits: dict[str, Any],
    pairs: dict[str, list[Points]],
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Returns the ratios to report. `best` has the best seconds of each side. `limits`
    and `pairs` are by dtype."""
    dtype = DTYPES[options.device]
    ours, peer = best[f"weft {dtype}"]["seconds"], best["transformers"]["seconds"]
    result: dict[str, Any] = {}
    for batch in options.batches:
        speed = peer[str(batch)] / ours[str(batch)]
        limit = limits[dtype][f"tokens_per_second {batch}"]
        fraction = _decode_rate(ours, batch, options.tokens) / limit
        result |= _of_batch(batch, speed, fraction, options.device)
    for other in (side for side in best if side.startswith("llama.cpp")):
        own = best[other.replace("llama.cpp", "weft")]["seconds"]["1"]
        name = f"speed weft/llama.cpp, batch 1, {other.split()[1]}"
        speed = best[other]["seconds"]["1"] / own
        result[name] = report.ratio(speed, at_least=1)
    if "weft int8" in best:
        speed = best["weft bf16"]["seconds"]["1"] / best["weft int8"]["seconds"]["1"]
        result["speed int8/bf16, batch 1"] = report.ratio(speed, at_least=INT8_TARGET)
    result["speed mixed/one adapter"] = report.ratio(
        ours["one adapter"] / ours["mixed adapters"], at_least=MIXED_TARGET
    )
    result["speed group/separate"] = report.ratio(
        ours["separate"] / ours["group"], at_least=GROUP_TARGET
    )
    for name, own_pairs in pairs.items():
        if own_pairs:
            middle = statistics.median(p["reading"] / p["token"] for p in own_pairs)
            result[f"fraction of the rate of reading, batch 1, {name}"] = report.ratio(
                middle, at_least=LIMIT_TARGETS["cpu"]
            )
    return result


def _of_batch(batch: int, speed: float, fraction: float, device: str) -> dict[str, Any]:
    least = LIMIT_TARGETS[device]
    result = {
        f"speed weft/transformers, batch {batch}": report.ratio(speed),
        f"fraction of the limit, batch {batch}": report.ratio(
            fraction, at_least=least if (device, batch) == ("cuda", 1) else None
        ),
    }
    if device == "cpu" and batch in PEER_TARGETS:
        # It is enough to reach one of the two targets.
        reached = max(speed / PEER_TARGETS[batch], fraction / least)
        result[f"of the target, batch {batch}"] = report.ratio(reached, at_least=1)
    return result


def _decode_rate(seconds: Points, batch: int, tokens: int) -> float:
    """Returns the tokens per second without prefill and first token."""
    prefill = seconds[f"{batch} prefill"]
    return batch * (tokens - 1) / decoding_seconds(seconds[str(batch)], prefill)
