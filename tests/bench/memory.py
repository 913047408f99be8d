"""Measures peak memory and speed of a step. Weft recomputes every layer (all) or none
(off). transformers + peft run with their defaults (naive), and with their gradient
checkpointing and a loss in chunks (lean).

Memory is what a process needs in addition to what it has loaded. A process loads model
and adapter and reads two tokens, and then the high-water mark of resident memory is
reset. The figure is the mark after all steps minus the memory at the reset. On both
sides the kernel counts this memory, and the allocator is the same. Weft splits the
batch by its default --max-batch-tokens.

The last part shows how the memory of Weft's head grows. A step of one micro-batch runs
with more and more scored rows, from one chunk of logits to four. The memory of the same
step with one scored row per sequence is subtracted. All layers are recomputed, so they
always cost the same.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from typing import Any

import inputs
import machine
import numpy as np
import report
from processes import StepBench, scratch
from train_step import add_batch_options, batch_work

import weft

PEERS = ("naive", "lean")
RECOMPUTED = ("all", "lean")
HEAD_CHUNKS = (1, 2, 4)  # The numbers of scored rows, as multiples of --chunk.
HEAD_GROWTH = 1.10


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    tokens = inputs.rows(options.model, options.batch, options.length + 1)
    with scratch() as work:
        bench = StepBench(options, tokens, work)
        sides: dict[str, Callable[[], report.Run]] = {
            "naive": bench.peer,
            "all": lambda: bench.weft("--gradient-checkpointing", "all"),
            "lean": lambda: bench.peer("--checkpoint", "--chunk", _chunk(options)),
            "off": lambda: bench.weft("--gradient-checkpointing", "off"),
        }
        if options.recomputed:
            sides = {side: sides[side] for side in RECOMPUTED}
        runs = report.take_turns(options.rounds, sides, report.equal_steps(options))
        head = {}
        if not options.recomputed:
            head = _head_bytes(options, bench, tokens, runs["naive"][0])
    result = report.make(
        "memory",
        options,
        runs,
        peers=[side for side in runs if side in PEERS],
        work=dict.fromkeys(runs, batch_work(options)),
        config=report.config(options, "batch", "length", "chunk"),
        ratios=lambda sides: ratios(sides, head),
    )
    if head:
        result["head_bytes_by_rows"] = head
    report.emit(result, options.output)
    return 0


def ratios(sides: report.Sides, head: Mapping[int, int]) -> dict[str, Any]:
    def over(name: str, ours: str, peer: str) -> float:
        return float(sides[ours][name] / sides[peer][name])

    memory, speed = "extra_rss_bytes", "tokens_per_second"
    result = {
        "speed all/lean": report.ratio(over(speed, "all", "lean"), at_least=1.15),
        "memory all/lean": report.ratio(over(memory, "all", "lean")),
    }
    if not head:
        return result
    growth = max(head.values()) / min(head.values())
    return {
        **result,
        "memory all/naive": report.ratio(over(memory, "all", "naive"), at_most=1 / 8),
        "memory off/naive": report.ratio(over(memory, "off", "naive"), at_most=1 / 2),
        "speed off/naive": report.ratio(over(speed, "off", "naive"), at_least=1.2),
        "head growth": report.ratio(growth, at_most=HEAD_GROWTH),
    }


def scored(tokens: np.ndarray, rows: int) -> list[weft.Datum]:
    """Returns data in which `rows` rows are scored: equally many at the end of each
    sequence."""
    each = rows // len(tokens)
    return [weft.Datum.next_token(row, prompt_length=len(row) - each) for row in tokens]


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = report.parser("memory", __doc__)
    add_batch_options(parser)
    parser.add_argument("--chunk", type=int, default=1024, help="rows of logits")
    parser.add_argument(
        "--recomputed",
        action="store_true",
        help="only the sides that recompute every layer: all and lean",
    )
    options = report.parse_with_model(parser, arguments)
    most = max(HEAD_CHUNKS) * options.chunk
    if most > options.batch * options.length:
        parser.error(f"{most} rows to score > the tokens of the batch")
    return options


def _chunk(options: argparse.Namespace) -> str:
    return str(options.chunk)


def _head_bytes(
    options: argparse.Namespace,
    bench: StepBench,
    tokens: np.ndarray,
    reference: report.Run,
) -> dict[int, int]:
    """Measures the memory that scoring takes, by the number of rows."""
    counts = [options.batch, *(chunks * options.chunk for chunks in HEAD_CHUNKS)]
    extra = {}
    for rows in counts:
        run = bench.weft(
            *("--gradient-checkpointing", "all"),
            *("--loss-chunk-size", _chunk(options)),
            *("--max-batch-tokens", str(tokens.size)),
            data=scored(tokens, rows),
            reps=0,
        )
        extra[rows] = run["extra_rss_bytes"]
        print(f"{rows} rows: {extra[rows] / 2**20:.0f} MiB", file=sys.stderr)
        if rows == options.batch * options.length:
            report.equal_steps(options)(run, reference)
    base = extra.pop(options.batch)
    return {rows: max(used - base, machine.PAGE_BYTES) for rows, used in extra.items()}
