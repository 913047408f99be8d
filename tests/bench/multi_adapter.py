"""Times forward_backward of many adapters at once, each with its own sequences of
different lengths. Weft has the steps of all adapters in flight. It also runs the
same sequences with other numbers of adapters (--spread). transformers + peft
(peer) runs the adapters one by one, each with a padded batch.

Tokens per second count real tokens without padding.
"""

from __future__ import annotations

import argparse
import functools
from pathlib import Path
from typing import Any

import flops
import inputs
import machine
import numpy as np
import report
import timing
from peer_options import DTYPES
from processes import StepBench, expect_resident, resident, run_peer, running, scratch
from train_step import MODEL_FLOPS, model_flops_ratio

import weft

# PEER_TARGETS has target speeds relative to the peer, by (adapters, sequences of each,
# greatest length). SINGLE_TARGETS has target speeds relative to one adapter that trains
# all the sequences, by the number of adapters.
PEER_TARGETS = {(8, 8, 512): 1.8, (8, 1, 64): 2.0}
SINGLE_TARGETS = {8: 0.95, 64: 0.85}


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    sequences = ragged(options)
    with scratch() as folder:
        bench = AdapterBench(options, sequences, folder)
        runs = report.take_turns(
            options.rounds,
            {
                # The side with which the peer is compared comes first.
                **{
                    _side(n): functools.partial(bench.weft_of, n)
                    for n in sorted(options.spread, key=options.adapters.__ne__)
                },
                "peer": bench.peer_loop,
            },
            functools.partial(_expect_same_step, DTYPES[options.device]),
        )
    lengths = [len(row) - 1 for rows in sequences for row in rows]
    model = inputs.config(options.model)
    work = report.Work(
        sum(lengths),
        flops.step(model, options.rank, [flops.Run(n) for n in lengths], sum(lengths)),
    )
    result = report.make(
        "multi_adapter",
        options,
        runs,
        peers=("peer",),
        work=dict.fromkeys(runs, work),
        config=report.config(options, "adapters", "sequences", "shortest", "longest"),
        ratios=lambda sides: _ratios(sides, options, work),
    )
    report.emit(result, options.output)
    return 0


def _side(adapters: int) -> str:
    return f"{adapters} adapters"


def ragged(options: argparse.Namespace) -> list[list[np.ndarray]]:
    """Returns each adapter's sequences. A sequence of length n has n + 1 tokens,
    because each token predicts the next one. Lengths are spread evenly from the
    shortest to the longest and assigned at random."""
    count = options.adapters * options.sequences
    lengths = np.linspace(options.shortest, options.longest, count).astype(int)
    np.random.default_rng(inputs.SEED).shuffle(lengths)
    text = inputs.rows(options.model, count, options.longest + 1)
    rows = [row[: length + 1] for row, length in zip(text, lengths, strict=True)]
    step = options.sequences
    return [rows[i : i + step] for i in range(0, count, step)]


class AdapterBench(StepBench):
    def __init__(
        self, options: argparse.Namespace, sequences: list[list[np.ndarray]], work: Path
    ):
        rows = [row for of_adapter in sequences for row in of_adapter]
        padded = np.zeros((len(rows), max(map(len, rows))), dtype=np.int64)
        for target, row in zip(padded, rows, strict=True):
            target[: len(row)] = row
        super().__init__(options, padded, work)
        np.save(work / "lengths.npy", np.array([len(row) - 1 for row in rows]))
        self._sequences = [weft.Datum.next_token(row) for row in rows]

    def weft_of(self, adapters: int) -> report.Run:
        """Distributes the sequences evenly to this many adapters."""
        each = len(self._sequences) // adapters
        return self._step(
            [self._sequences[i * each : (i + 1) * each] for i in range(adapters)]
        )

    def peer_loop(self) -> report.Run:
        adapters = ("--adapters", str(self._options.adapters))
        return run_peer(self._options, self._work, "multi_adapter_peer.py", *adapters)

    def _step(self, data: list[list[weft.Datum]]) -> report.Run:
        """Runs one step of each adapter, with all steps in flight. The client times
        it from the first request to the last reply."""
        flags = resident(self._options, len(data))
        with running(self._options, self._work, *flags) as (process, client):
            adapters = [
                client.import_adapter(f"bench-{i}", self._work / "adapter")
                for i in range(len(data))
            ]

            def step() -> float:
                futures = [
                    adapter.submit.forward_backward(own)
                    for adapter, own in zip(adapters, data, strict=True)
                ]
                return float(sum(f.result().metrics["loss:sum"] for f in futures))

            adapters[0].forward([weft.Datum.next_token(self._tokens[0, :3])])
            memory = machine.PeakMemory(process.pid, self._options.device)
            loss = step()
            # Steps with learning rate 0 return the norms and clear the
            # gradients.
            norms = [a.optim_step(learning_rate=0.0).grad_norm for a in adapters]
            seconds = timing.each(step, self._options.reps)
            expect_resident(process.scrape())
            return {
                "seconds": seconds,
                "loss": loss,
                "grad_norms": norms,
                **memory.read(),
            }


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = report.parser("multi_adapter", __doc__)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--sequences", type=int, default=8, help="of each adapter")
    parser.add_argument("--shortest", type=int, default=32, help="tokens")
    parser.add_argument("--longest", type=int, default=512, help="tokens")
    parser.add_argument(
        "--spread", type=int, nargs="+", help="adapters; 1 and --adapters by default"
    )
    options = report.parse_with_device(parser, arguments)
    options.spread = sorted({1, options.adapters, *(options.spread or ())})
    total = options.adapters * options.sequences
    if any(total % count for count in options.spread):
        parser.error(f"--spread: {total} sequences cannot be dealt out evenly")
    return options


def _expect_same_step(dtype: str, run: report.Run, reference: report.Run) -> None:
    """Compares the loss. If both runs have the same number of adapters, also
    compares each adapter's gradient norm, which shows a row that went to the wrong
    adapter."""
    bounds = report.bounds(dtype)
    report.expect_close("loss", run["loss"], reference["loss"], bounds["loss"])
    if len(run["grad_norms"]) == len(reference["grad_norms"]):
        for norms in zip(run["grad_norms"], reference["grad_norms"], strict=True):
            report.expect_close("grad_norm", *norms, bounds["grad_norm"])


def _ratios(
    sides: report.Sides, options: argparse.Namespace, work: report.Work
) -> dict[str, Any]:
    size = (options.adapters, options.sequences, options.longest)
    single = sides[_side(1)]["seconds"]
    ratios = {
        "speed weft/peer": report.ratio(
            sides["peer"]["seconds"] / sides[_side(options.adapters)]["seconds"],
            at_least=PEER_TARGETS.get(size),
        ),
        MODEL_FLOPS: model_flops_ratio(options, work, sides[_side(options.adapters)]),
    }
    for count in options.spread[1:]:
        ratios[f"speed {_side(count)}/one"] = report.ratio(
            single / sides[_side(count)]["seconds"], at_least=SINGLE_TARGETS.get(count)
        )
    return ratios
