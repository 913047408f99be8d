"""Times forward_backward of Weft and of transformers + peft."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import flops
import inputs
import report
from processes import StepBench, scratch

MODEL_FLOPS = "model FLOPs/GEMM rate"
MODEL_FLOPS_TARGET = 0.45  # For a GPU.
# Targets for a CPU with instructions for bf16: the speed-up of Weft in bf16 over Weft
# in f32, and over the peer in bf16.
BF16_TARGET, BF16_PEER_TARGET = 1.6, 1.5
WEFT_BF16, NAIVE_BF16 = "weft bf16", "naive bf16"


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    tokens = inputs.rows(options.model, options.batch, options.length + 1)
    with scratch() as work:
        bench = StepBench(options, tokens, work)
        sides: dict[str, Callable[[], report.Run]] = {
            "weft": bench.weft,
            "naive": bench.peer,
        }
        if options.cpu_bf16:
            sides[WEFT_BF16] = lambda: _bf16(bench.weft("--dtype", "bf16"))
            sides[NAIVE_BF16] = lambda: _bf16(bench.peer("--autocast"))
        runs = report.take_turns(options.rounds, sides, report.equal_steps(options))
    result = report.make(
        "train_step",
        options,
        runs,
        peers=[side for side in runs if side.startswith("naive")],
        work=dict.fromkeys(runs, batch_work(options)),
        config=report.config(options, "batch", "length"),
        ratios=partial(_ratios, options),
    )
    report.emit(result, options.output)
    return 0


def add_batch_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch", type=int, default=8, help="sequences")
    parser.add_argument("--length", type=int, default=512, help="tokens of each")


def batch_work(options: argparse.Namespace) -> report.Work:
    tokens = options.batch * options.length
    runs = [flops.Run(options.length)] * options.batch
    config = inputs.config(options.model)
    return report.Work(tokens, flops.step(config, options.rank, runs, tokens))


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = report.parser("train_step", __doc__)
    add_batch_options(parser)
    parser.add_argument(
        "--cpu-bf16",
        action="store_true",
        help="also weftd --dtype bf16, and transformers + peft in bf16 autocast",
    )
    options = report.parse_with_device(parser, arguments)
    if options.cpu_bf16 and options.device != "cpu":
        parser.error("--cpu-bf16 is for --device cpu")
    return options


def _bf16(run: report.Run) -> report.Run:
    return {**run, "dtype": "bf16"}


def _ratios(options: argparse.Namespace, sides: report.Sides) -> dict[str, Any]:
    def speed(ours: str, peer: str, at_least: float | None = None) -> dict[str, Any]:
        value = sides[peer]["seconds"] / sides[ours]["seconds"]
        return report.ratio(value, at_least=at_least)

    result = {
        "speed weft/naive": speed("weft", "naive"),
        MODEL_FLOPS: model_flops_ratio(options, batch_work(options), sides["weft"]),
    }
    if options.cpu_bf16:
        result["speed weft bf16/weft"] = speed(WEFT_BF16, "weft", BF16_TARGET)
        result["speed weft bf16/naive bf16"] = speed(
            WEFT_BF16, NAIVE_BF16, BF16_PEER_TARGET
        )
    return result


def model_flops_ratio(
    options: argparse.Namespace, work: report.Work, side: dict[str, Any]
) -> dict[str, Any]:
    """Returns the rate of the base model's own operations, as a fraction of the GEMM
    rate, for a side that does `work`."""
    model = flops.model_flops(inputs.config(options.model), work.tokens)
    return report.ratio(
        side["fraction_of_gemm_rate"] * model / work.flops,
        at_least=MODEL_FLOPS_TARGET if options.device == "cuda" else None,
    )
