"""Sampling: tokens per second of weftd, timed at the client over gRPC, against
transformers' generate and (with --llama-python) llama.cpp, and against what the
machine could do at most.

Every sequence has a prompt of its own and draws the most likely tokens, so that
all f32 sides must draw the same. The limit of a batch is the larger of (bytes
that one iteration must read) over the rate at which the same threads read memory,
and its floating-point operations over torch's GEMM rate. That rate changes by the
minute on machines that are shared: one sequence is therefore drawn between two
readings of it, again and again, and the middle of these fractions counts.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

import daemon
import flops
import inputs
import numpy as np
import plot
import report
from processes import RANK, run_peer, run_program, running, scratch
from sample_client import (
    GROUP_SIZE,
    MIXED_ADAPTERS,
    Points,
    SampleClient,
    decoding_seconds,
)

DECODE_BENCH = daemon.BUILD_DIR / "tests" / "bench" / "decode_bench"
# Times transformers' tokens per second, or this fraction of the limit if less.
PEER_TARGETS = {1: 2.5, 8: 2.5, 32: 2.0}
LIMIT_TARGET = 0.8
MIXED_TARGET = 0.85
GROUP_TARGET = 4.0


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    with scratch() as work:
        result = SampleBench(options, work).run()
    if options.plot is not None:
        draw(result, options.plot)
    report.emit_ratios(result, options.output)
    return 0


class SampleBench:
    def __init__(self, options: argparse.Namespace, work: Path):
        self._options, self._work = options, work
        most = max(*options.batches, MIXED_ADAPTERS)
        self._prompts = inputs.rows(options.model, most, options.prompt)
        self._group = inputs.rows(options.model, GROUP_SIZE, options.group_prompt)
        np.save(work / "prompts.npy", self._prompts)

    def run(self) -> dict[str, Any]:
        sides: dict[str, list[dict[str, Any]]] = {}
        for number in range(self._options.rounds):
            for side, measure in self._sides().items():
                run = measure()
                sides.setdefault(side, []).append(run)
                dtype = "bf16" if side.endswith("bf16") else "f32"
                self._expect_same_tokens(side, run, sides[f"weft {dtype}"][0])
                times = {k: round(v, 3) for k, v in run["seconds"].items()}
                print(f"round {number + 1}: {side} {times}", file=sys.stderr)
        return self._make(sides)

    def _sides(self) -> dict[str, Any]:
        sides = {
            "weft f32": lambda: self._weft("f32"),
            "weft bf16": lambda: self._weft("bf16"),
            "transformers": self._transformers,
            "limit f32": lambda: self._limit("f32"),
            "limit bf16": lambda: self._limit("bf16"),
        }
        if self._options.llama_python is not None:
            sides["llama.cpp f32"] = lambda: self._llama_cpp("f32")
            sides["llama.cpp bf16"] = lambda: self._llama_cpp("bf16")
        return sides

    # Each returns `seconds` by what was timed; those that draw, also `tokens`.

    def _weft(self, dtype: str) -> dict[str, Any]:
        options = self._options
        with running(options, self._work, "--dtype", dtype) as (_, client):
            side = SampleClient(options, client, self._prompts, self._group)
            return side.measure(lambda: self._reading_seconds(dtype))

    def _transformers(self) -> dict[str, Any]:
        return run_peer(self._options, self._work, "sample_peer.py", *self._sizes())

    def _llama_cpp(self, dtype: str) -> dict[str, Any]:
        options = self._options
        flags = ("--dtype", dtype, *self._sizes())
        return run_peer(
            options, self._work, "llama_peer.py", *flags, python=options.llama_python
        )

    def _sizes(self) -> list[str]:
        batches = map(str, self._options.batches)
        return ["--tokens", str(self._options.tokens), "--batches", *batches]

    def _decode(self, dtype: str, batch: int) -> dict[str, Any]:
        options = self._options
        sizes = (batch, options.prompt, options.tokens, options.threads)
        command = [DECODE_BENCH, options.model, dtype, *map(str, sizes)]
        return run_program(command, options.threads)

    def _reading_seconds(self, dtype: str) -> float:
        """That an iteration of one sequence takes to be read, now."""
        run = self._decode(dtype, 1)
        return run["bytes_per_iteration"] / run["read_bytes_per_second"]

    def _limit(self, dtype: str) -> dict[str, Any]:
        """Bytes of an iteration by batch, and how fast memory is."""
        runs = {
            str(batch): self._decode(dtype, batch) for batch in self._options.batches
        }
        rate = max(run["read_bytes_per_second"] for run in runs.values())
        return {
            "seconds": {k: run["seconds"] for k, run in runs.items()},
            "bytes": {k: run["bytes_per_iteration"] for k, run in runs.items()},
            "read_bytes_per_second": rate,
        }

    def _expect_same_tokens(
        self, side: str, run: dict[str, Any], reference: dict[str, Any]
    ) -> None:
        """Of the batches that both drew."""
        for batch, rows in run.get("tokens", {}).items():
            if rows != reference["tokens"][batch]:
                raise SystemExit(
                    f"{side}: batch {batch} has other tokens than weft's;"
                    " times mean nothing"
                )

    def _make(self, sides: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
        best = {side: _best(runs) for side, runs in sides.items()}
        gemm = max(run["gemm_flops_per_second"] for run in sides["transformers"])
        model = inputs.config(self._options.model)
        limits = {
            dtype: self._limits(sides[f"limit {dtype}"], gemm, model)
            for dtype in ("f32", "bf16")
        }
        peers = [side for side in best if side.startswith(("trans", "llama"))]
        return {
            "bench": "sample",
            "ours": {
                side: {**best[side], "pairs": _pairs(sides[side])}
                for side in ("weft f32", "weft bf16")
            },
            "peer": {s: best[s] for s in peers},
            "limit": limits,
            "ratio": {
                **_speeds(best, limits, self._options),
                **_read_fractions(sides),
            },
            "config": {
                "model": self._options.model.name,
                "prompt": self._options.prompt,
                "tokens": self._options.tokens,
                "group_prompt": self._options.group_prompt,
                "group_tokens": self._options.group_tokens,
                "rank": RANK,
                "threads": self._options.threads,
                "rounds": self._options.rounds,
                "reps": self._options.reps,
                "peer_versions": {
                    name: version
                    for side in peers
                    for name, version in sides[side][0]["versions"].items()
                },
            },
            "gemm_gflops": gemm / 1e9,
        }

    def _limits(
        self, runs: list[dict[str, Any]], gemm: float, model: dict[str, Any]
    ) -> dict[str, Any]:
        """Tokens per second at most, by batch, and what they come from."""
        read = max(run["read_bytes_per_second"] for run in runs)
        length = self._options.prompt + self._options.tokens // 2
        result: dict[str, Any] = {"read_gb_per_second": read / 1e9}
        for batch in self._options.batches:
            reading = runs[0]["bytes"][str(batch)] / read
            working = batch * flops.decode(model, length) / gemm
            result[f"tokens_per_second {batch}"] = batch / max(reading, working)
        return result


def draw(result: dict[str, Any], path: Path) -> None:
    """Tokens per second against batch size."""
    tokens = result["config"]["tokens"]

    def points(side: dict[str, Any]) -> plot.Points:
        batches = sorted(int(k) for k in side["seconds"] if k.isdigit())
        return [(b, b * tokens / side["seconds"][str(b)]) for b in batches]

    limits = {
        f"limit {dtype}": sorted(
            (int(key.split()[1]), value)
            for key, value in limit.items()
            if key.startswith("tokens_per_second")
        )
        for dtype, limit in result["limit"].items()
    }
    sides = {k: points(v) for k, v in {**result["ours"], **result["peer"]}.items()}
    plot.lines(
        path,
        sides,
        title=f"Sampling, {result['config']['model']}",
        x="sequences in the batch",
        y="tokens per second, prompt included",
        limits=limits,
    )


def _best(runs: list[dict[str, Any]]) -> dict[str, Any]:
    names = runs[0]["seconds"]
    return {"seconds": {n: min(run["seconds"][n] for run in runs) for n in names}}


def _pairs(runs: list[dict[str, Any]]) -> list[Points]:
    return [pair for run in runs for pair in run["pairs"]]


def _read_fractions(sides: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Of one sequence, at the client."""
    ratios = {}
    for dtype in ("f32", "bf16"):
        pairs = _pairs(sides[f"weft {dtype}"])
        middle = statistics.median(pair["reading"] / pair["token"] for pair in pairs)
        name = f"fraction of the rate of reading, batch 1, {dtype}"
        ratios[name] = report.ratio(middle, at_least=LIMIT_TARGET)
    return ratios


def _speeds(
    best: dict[str, Any], limits: dict[str, Any], options: argparse.Namespace
) -> dict[str, Any]:
    ours, peer = best["weft f32"]["seconds"], best["transformers"]["seconds"]
    ratios: dict[str, Any] = {}
    for batch in options.batches:
        speed = peer[str(batch)] / ours[str(batch)]
        limit = limits["f32"][f"tokens_per_second {batch}"]
        fraction = _decode_rate(ours, batch, options.tokens) / limit
        ratios[f"speed weft/transformers, batch {batch}"] = report.ratio(speed)
        ratios[f"fraction of the limit, batch {batch}"] = report.ratio(fraction)
        if batch in PEER_TARGETS:
            # Either target will do.
            reached = max(speed / PEER_TARGETS[batch], fraction / LIMIT_TARGET)
            ratios[f"of the target, batch {batch}"] = report.ratio(reached, at_least=1)
    for dtype in ("f32", "bf16"):
        side = best[f"weft {dtype}"]["seconds"]
        if f"llama.cpp {dtype}" in best:
            other = best[f"llama.cpp {dtype}"]["seconds"]["1"]
            ratios[f"speed weft/llama.cpp, batch 1, {dtype}"] = report.ratio(
                other / side["1"], at_least=1
            )
    ratios["speed mixed/one adapter"] = report.ratio(
        ours["one adapter"] / ours["mixed adapters"], at_least=MIXED_TARGET
    )
    ratios["speed group/separate"] = report.ratio(
        ours["separate"] / ours["group"], at_least=GROUP_TARGET
    )
    return ratios


def _decode_rate(seconds: Points, batch: int, tokens: int) -> float:
    """Tokens per second without prefill and first token."""
    prefill = seconds[f"{batch} prefill"]
    return batch * (tokens - 1) / decoding_seconds(seconds[str(batch)], prefill)


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = report.parser("sample", __doc__)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt", type=int, default=32, help="tokens")
    parser.add_argument("--tokens", type=int, default=64, help="drawn by a sequence")
    parser.add_argument("--group-prompt", type=int, default=512, help="tokens")
    parser.add_argument("--group-tokens", type=int, default=32, help="drawn")
    parser.add_argument(
        "--llama-python", help="a Python with llama-cpp-python, to measure it too"
    )
    parser.add_argument("--plot", type=Path, help="PNG of tokens/s against batch")
    options = report.parse_with_model(parser, arguments)
    if 1 not in options.batches:
        parser.error("--batches must have 1")
    return options
