"""Times forward_backward of a group of completions of one prompt. Weft runs the
prompt once (shared) or repeats it (repeated). transformers + peft (peer) repeats it
and computes only the logits of scored rows.

On all sides, tokens per second count the prompt once for each completion.
"""

from __future__ import annotations

import argparse
from typing import Any

import flops
import inputs
import report
from processes import StepBench, scratch

# Target speeds of shared relative to repeated, by (group, prompt, completion).
TARGETS = {(8, 512, 64): 3.3, (16, 2048, 64): 7.0}


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    tokens = inputs.group(
        options.model, options.group, options.prompt, options.completion + 1
    )
    with scratch() as folder:
        bench = StepBench(options, tokens, folder, options.prompt)
        runs = report.take_turns(
            options.rounds,
            {
                "repeated": lambda: bench.weft("--no-share-prompts"),
                "shared": lambda: bench.weft("--share-prompts"),
                "peer": lambda: bench.peer("--slice", str(options.slice)),
            },
            report.equal_steps(options),
        )
    result = report.make(
        "group_prompt",
        options,
        runs,
        peers=("peer",),
        work=work(options),
        config=report.config(options, "group", "prompt", "completion", "slice"),
        ratios=lambda sides: _ratios(sides, options),
    )
    report.emit(result, options.output)
    return 0


def work(options: argparse.Namespace) -> dict[str, report.Work]:
    group, prompt, completion = options.group, options.prompt, options.completion
    repeated = [flops.Run(prompt + completion)] * group
    shared = [flops.Run(prompt)] + [flops.Run(completion, before=prompt)] * group
    model, scored = inputs.config(options.model), group * (completion + 1)
    tokens = group * (prompt + completion)
    return {
        side: report.Work(tokens, flops.step(model, options.rank, runs, scored))
        for side, runs in (
            ("repeated", repeated),
            ("shared", shared),
            ("peer", repeated),
        )
    }


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = report.parser("group_prompt", __doc__)
    parser.add_argument("--group", type=int, default=8, help="completions")
    parser.add_argument("--prompt", type=int, default=512, help="tokens")
    parser.add_argument("--completion", type=int, default=64, help="tokens of each")
    parser.add_argument(
        "--slice", type=int, help="sequences of the peer at a time; 4096 tokens or one"
    )
    options = report.parse_with_device(parser, arguments)
    options.slice = options.slice or max(
        4096 // (options.prompt + options.completion), 1
    )
    return options


def _ratios(sides: report.Sides, options: argparse.Namespace) -> dict[str, Any]:
    size = (options.group, options.prompt, options.completion)
    shared = sides["shared"]["seconds"]
    speed = sides["repeated"]["seconds"] / shared
    group, prompt, completion = size
    most = group * (prompt + completion) / (prompt + group * completion)
    return {
        "speed shared/repeated": report.ratio(speed, at_least=TARGETS.get(size)),
        "speed shared/repeated over that of the tokens": report.ratio(speed / most),
        "speed shared/peer": report.ratio(sides["peer"]["seconds"] / shared),
    }
