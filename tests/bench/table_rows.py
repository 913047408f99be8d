"""The rows of README's table of figures on a CPU: what each is called, the bench
that measures it, and the function that makes its cells from the bench's JSON line.

All runs together take about half an hour on two cores, so benches have fewer rounds
than by default, and some have less to do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import table_cells as cells
from table_cells import NOT_HERE, Cells, Result

HEAD = "| what (SmolLM2-135M, f32, rank 16 on all linears) | here | peer | ratio |"
# Maps an option of benches to the instruction set that it needs. A CPU without the
# instruction set runs the bench without the option.
OPTION_NEEDS = {"--cpu-bf16": "avx512_bf16"}


@dataclass(frozen=True)
class Row:
    name: str  # The row's key in the file of results.
    label: str  # A format string for the `config` in the bench's JSON line.
    cells: Callable[[Result], Cells]
    needs: str = ""  # An instruction set that the figures require.

    def line(self, result: Result) -> str:
        label = self.label.format(**result["config"])
        lacks = self.needs and self.needs not in result["machine"]["isa"]
        line = (label, *(NOT_HERE if lacks else self.cells(result)))
        return "".join(f"| {cell} " if cell else "| " for cell in line) + "|"


@dataclass(frozen=True)
class Run:
    """One run of a bench, which gives one row or several."""

    arguments: tuple[str, ...]  # The command line after run.py.
    seconds: float  # How long it takes on two cores of an AMD EPYC.
    rows: tuple[Row, ...]


def _run(command: str, seconds: float, *rows: Row) -> Run:
    return Run(tuple(command.split()), seconds, rows)


# Every step is timed twice, after a step that warms up. ONE_ROUND times it twice in one
# process. TWO_ROUNDS times it once in each of two processes, for benches whose
# processes take little time.
ONE_ROUND = "--rounds 1 --reps 2"
TWO_ROUNDS = "--rounds 2 --reps 1"

RUNS = (
    _run(
        f"train_step --cpu-bf16 {ONE_ROUND}",
        215,
        Row("step", "training step, {batch} x {length} tokens", cells.step),
        Row(
            "step in bf16",
            "the same with `--dtype bf16`, on a CPU with AVX512_BF16",
            cells.step_bf16,
            needs="avx512_bf16",
        ),
    ),
    _run(
        f"memory --recomputed {ONE_ROUND}",
        190,
        Row("step, recomputed", "in f32 with every layer recomputed", cells.recomputed),
    ),
    _run(
        f"moe --batch 4 --length 256 {TWO_ROUNDS}",
        190,
        Row(
            "step of experts",
            "training step, {batch} x {length} tokens, LoRA on each of 64 experts",
            cells.moe,
        ),
    ),
    _run(
        f"group_prompt {ONE_ROUND}",
        155,
        Row(
            "completions",
            "{group} completions of {completion} tokens on one prompt of {prompt}",
            cells.group_prompt,
        ),
    ),
    _run(
        "multi_adapter --adapters 8 --sequences 4 --shortest 32 --longest 128"
        f" --spread 1 8 32 {ONE_ROUND}",
        230,
        Row(
            "adapters",
            "{adapters} adapters, each {sequences} sequences of {shortest} to"
            " {longest} tokens, all in flight",
            cells.adapters,
        ),
    ),
    _run(
        "multi_adapter --adapters 8 --sequences 1 --shortest 64 --longest 64"
        " --rounds 1 --reps 3",
        65,
        Row(
            "adapters, short",
            "{adapters} adapters, one sequence of {longest} tokens each",
            cells.adapters,
        ),
    ),
    _run(
        f"sample {ONE_ROUND}",
        450,
        Row(
            "sampling",
            "sampling, 1, 8 and 32 sequences of {prompt} + {tokens} tokens",
            cells.sample,
        ),
        Row(
            "sampling, one sequence",
            "the same, one sequence, in f32 and with weights in bf16",
            cells.one_sequence,
        ),
        Row(
            "sampling, 8 bits",
            "the same, one sequence, with `--weights int8`",
            cells.int8,
        ),
        Row(
            "samples of one prompt",
            "16 samples of {group_tokens} tokens of one prompt of {group_prompt}",
            cells.one_prompt,
        ),
    ),
    _run(
        "mixed_load --trainers 4",
        120,
        Row(
            "first token",
            "first token after a prompt of {prompt} while clients flood training (p95)",
            cells.mixed_load,
        ),
    ),
    _run(
        "load --rounds 2 --reps 4",
        60,
        Row("loading", "reading bf16 shards, page cache and memory warm", cells.load),
    ),
    _run(
        f"logprobs {ONE_ROUND}",
        95,
        Row(
            "log-probabilities",
            "log-probabilities and their gradient, {rows} x {hidden} on {vocab}",
            cells.logprobs,
        ),
    ),
    _run(
        f"rpc_overhead --sequences 1 {TWO_ROUNDS}",
        85,
        Row(
            "large request",
            "a request of {tokens:,} tokens: processor time outside the engine",
            cells.large_request,
        ),
        Row(
            "smallest calls",
            "the smallest calls from Python: forward_backward, optim_step, sample",
            cells.calls,
        ),
    ),
)
