"""Times forward_backward of Weft and of transformers + peft."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import flops
import inputs
import report
from processes import StepBench, scratch

MODEL_FLOPS = "model FLOPs/GEMM rate"
MODEL_FLOPS_TARGET = 0.45  # For a GPU.


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    tokens = inputs.rows(options.model, options.batch, options.length + 1)
    with scratch() as work:
        bench = StepBench(options, tokens, work)
        sides = {"weft": bench.weft, "naive": bench.peer}
        runs = report.take_turns(options.rounds, sides, report.equal_steps(options))
    result = report.make(
        "train_step",
        options,
        runs,
        peers=("naive",),
        work=dict.fromkeys(runs, batch_work(options)),
        config=batch_config(options),
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


def batch_config(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "model": options.model.name,
        "batch": options.batch,
        "length": options.length,
        "rank": options.rank,
    }


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = report.parser("train_step", __doc__)
    add_batch_options(parser)
    return report.parse_with_device(parser, arguments)


def _ratios(options: argparse.Namespace, sides: report.Sides) -> dict[str, Any]:
    value = sides["naive"]["seconds"] / sides["weft"]["seconds"]
    return {
        "speed weft/naive": report.ratio(value),
        MODEL_FLOPS: model_flops_ratio(options, batch_work(options), sides["weft"]),
    }


def model_flops_ratio(
    options: argparse.Namespace, work: report.Work, side: dict[str, Any]
) -> dict[str, Any]:
    """The base's own operations over the GEMM rate, for a side that does `work`."""
    model = flops.model_flops(inputs.config(options.model), work.tokens)
    return report.ratio(
        side["fraction_of_gemm_rate"] * model / work.flops,
        at_least=MODEL_FLOPS_TARGET if options.device == "cuda" else None,
    )
