"""Times sampling: the tokens per second of weftd, timed at the client over gRPC.
They are compared with transformers' generate and (with --llama-python) llama.cpp,
and with the most that the machine could do.

Every sequence has its own prompt and draws the most likely tokens. So all f32 sides
must draw the same tokens. Tokens that are drawn in bf16 must be the likeliest for
transformers too, up to rounding.

On shared machines the rate of memory changes by the minute. On a CPU, one sequence
is therefore drawn many times, each time between two measurements of the rate. Each
draw reaches a fraction of that rate, and the median of these fractions counts.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import daemon
import inputs
import numpy as np
import report
import sample_limits
import tolerance
from peer_options import DTYPES
from processes import expect_resident, resident, run_peer, run_program, running, scratch
from sample_client import GROUP_SIZE, MIXED_ADAPTERS, Points, SampleClient

CONFIG = (
    *("prompt", "tokens", "group_prompt", "group_tokens"),
    *("rank", "device", "threads", "rounds", "reps"),
)
MOST_SEQUENCES = 64  # weftd's default.
DECODE_BENCH = daemon.BUILD_DIR / "tests" / "bench" / "decode_bench"


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    with scratch() as work:
        result = SampleBench(options, work).run()
    report.emit_ratios(options=options, **result)
    return 0


class SampleBench:
    def __init__(self, options: argparse.Namespace, work: Path):
        self._options, self._work = options, work
        # Weft runs in all of these dtypes. transformers, mixed adapters and samples of
        # one prompt run only in the first. In int8 the weights have 8 bits.
        on_cpu = options.device == "cpu"
        self._dtypes = ("f32", "bf16", "int8") if on_cpu else ("bf16",)
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
                self._check(side, sides)
                times = {k: round(v, 3) for k, v in run["seconds"].items()}
                print(f"round {number + 1}: {side} {times}", file=sys.stderr)
        return self._make(sides)

    def _sides(self) -> dict[str, Any]:
        """Returns, for each side, the function that measures it. Weft's sides come
        first, because the other sides are compared with them."""
        sides: dict[str, Any] = {
            f"weft {dtype}": partial(self._weft, dtype) for dtype in self._dtypes
        }
        sides["transformers"] = self._transformers
        if self._options.device == "cpu":
            for dtype in self._dtypes:
                sides[f"limit {dtype}"] = partial(self._limit, dtype)
        if self._options.llama_python is not None:
            for dtype in self._dtypes:
                sides[f"llama.cpp {dtype}"] = partial(self._llama_cpp, dtype)
        return sides

    # A side's function returns `seconds` by the name of the call. All sides except the
    # limits also return `tokens`.

    def _weft(self, dtype: str) -> dict[str, Any]:
        options = self._options
        most = str(max(MOST_SEQUENCES, *options.batches))
        weights = ("--weights", "int8") if dtype == "int8" else ("--dtype", dtype)
        flags = (*weights, "--max-decode-sequences", most)
        slots = resident(options, MIXED_ADAPTERS)
        with running(options, self._work, *flags, *slots) as (process, client):
            side = SampleClient(options, client, self._prompts, self._group)
            on_cpu = options.device == "cpu"
            run = side.measure(
                partial(self._reading_seconds, dtype) if on_cpu else None,
                groups=dtype == self._dtypes[0],
            )
            expect_resident(process.scrape())
        if dtype == self._dtypes[0]:
            drawn = json.dumps(run["tokens"])
            (self._work / "drawn.json").write_text(drawn, "utf-8")
        return run

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
        command = [DECODE_BENCH, options.model, dtype, *map(str, sizes), "cpu"]
        return run_program(command, options.threads)

    def _reading_seconds(self, dtype: str) -> float:
        """Measures the rate of memory. Returns how many seconds an iteration of one
        sequence needs to read its bytes at this rate."""
        run = self._decode(dtype, 1)
        return float(run["bytes_per_iteration"] / run["read_bytes_per_second"])

    def _limit(self, dtype: str) -> dict[str, Any]:
        """Returns the bytes of an iteration for each batch, and the rate of memory."""
        runs = {
            str(batch): self._decode(dtype, batch) for batch in self._options.batches
        }
        rate = max(run["read_bytes_per_second"] for run in runs.values())
        return {
            "seconds": {k: run["seconds"] for k, run in runs.items()},
            "bytes": {k: run["bytes_per_iteration"] for k, run in runs.items()},
            "read_bytes_per_second": rate,
        }

    def _check(self, side: str, sides: dict[str, list[dict[str, Any]]]) -> None:
        """Checks the last run of a side. On a GPU rounding depends on what else is
        in an iteration, so tokens may differ there. With weights of 8 bits,
        llama.cpp rounds the activations too, so its tokens may differ."""
        run, device = sides[side][-1], self._options.device
        if side == "transformers":
            _expect_likely_tokens(run["gaps"], tolerance.summed(DTYPES[device], 1))
        if device == "cpu" and side != "llama.cpp int8":
            dtype = "f32" if side == "transformers" else side.split()[-1]
            _expect_same_tokens(side, run, sides[f"weft {dtype}"][0])

    def _make(self, sides: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
        options = self._options
        best = {side: _best(runs) for side, runs in sides.items()}
        peers = [side for side in best if side.startswith(("trans", "llama"))]
        gemm = max(run["gemm_flops_per_second"] for run in sides["transformers"])
        if options.device == "cuda":
            read = {"bf16": sample_limits.of_device(sides["transformers"], options)}
        else:
            read = {dtype: sides[f"limit {dtype}"] for dtype in self._dtypes}
        limits = {
            dtype: sample_limits.by_batch(runs, gemm, options)
            for dtype, runs in read.items()
        }
        pairs = {dtype: _pairs(sides[f"weft {dtype}"]) for dtype in self._dtypes}
        return {
            "bench": "sample",
            "ours": {
                f"weft {dtype}": {**best[f"weft {dtype}"], "pairs": own}
                for dtype, own in pairs.items()
            },
            "peer": {s: best[s] for s in peers},
            "limit": limits,
            "ratio": sample_limits.ratios(best, limits, pairs, options),
            "config": {
                "model": options.model.name,
                **{name: getattr(options, name) for name in CONFIG},
                "peer_dtype": DTYPES[options.device],
                "peer_versions": {
                    name: version
                    for side in peers
                    for name, version in sides[side][0]["versions"].items()
                },
            },
            "gemm_gflops": gemm / 1e9,
        }


def _best(runs: list[dict[str, Any]]) -> dict[str, Any]:
    names = runs[0]["seconds"]
    return {"seconds": {n: min(run["seconds"][n] for run in runs) for n in names}}


def _pairs(runs: list[dict[str, Any]]) -> list[Points]:
    return [pair for run in runs for pair in run["pairs"]]


def _expect_same_tokens(
    side: str, run: dict[str, Any], reference: dict[str, Any]
) -> None:
    """Compares the batches that both sides have drawn."""
    for batch, rows in run.get("tokens", {}).items():
        if rows != reference["tokens"][batch]:
            raise SystemExit(
                f"{side}: batch {batch} has other tokens than weft's;"
                " times mean nothing"
            )


def _expect_likely_tokens(gaps: dict[str, float], bound: float) -> None:
    """Ends the bench if a gap exceeds `bound`. A gap is the relative difference of two
    logits in transformers: those of the likeliest token and of weft's token."""
    for batch, gap in gaps.items():
        if not gap <= bound:
            raise SystemExit(
                f"weft: batch {batch} has a token that is {gap:.1e} > {bound:.1e} of a"
                " logit from transformers' likeliest; times mean nothing"
            )


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
    options = report.parse_with_device(parser, arguments)
    if 1 not in options.batches:
        parser.error("--batches must have 1")
    return options
