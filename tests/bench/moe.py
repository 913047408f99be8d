"""Times forward_backward of a mixture of experts with LoRA on every expert. Compares
Weft with transformers + peft, whose experts run as eager and as grouped_mm."""

from __future__ import annotations

from functools import partial
from typing import Any

import inputs
import report
from processes import StepBench, scratch
from train_step import add_batch_options, batch_work

PEERS = ("eager", "grouped_mm")
PEER_TARGET = 1.5  # Speed relative to the faster peer.


def main(arguments: list[str]) -> int:
    parser = report.parser("moe", __doc__)
    add_batch_options(parser)
    parser.set_defaults(shape="moe-64")
    options = report.parse_with_device(parser, arguments)
    tokens = inputs.rows(options.model, options.batch, options.length + 1)
    with scratch() as work:
        bench = StepBench(options, tokens, work)
        peers = {name: partial(bench.peer, "--experts", name) for name in PEERS}
        runs = report.take_turns(
            options.rounds, {"weft": bench.weft, **peers}, report.equal_steps(options)
        )
    result = report.make(
        "moe",
        options,
        runs,
        peers=PEERS,
        work=dict.fromkeys(runs, batch_work(options)),
        config=report.config(options, "batch", "length"),
        ratios=_ratios,
    )
    report.emit(result, options.output)
    return 0


def _ratios(sides: report.Sides) -> dict[str, Any]:
    peer = min(sides[name]["seconds"] for name in PEERS)
    value = peer / sides["weft"]["seconds"]
    return {"speed weft/better peer": report.ratio(value, at_least=PEER_TARGET)}
