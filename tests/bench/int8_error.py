"""Measures what the rounding of weights to 8 bits does to the base model's predictions.
A weftd with --weights int8 and one with unrounded weights score the same text over
gRPC.

The differences are those of the log-probabilities of the text's tokens, in nats.
`same_likeliest_token` is the share of tokens for which both models have the same
likeliest token. On a GPU the unrounded weights are bf16, so there the differences
include roundings of bf16.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any, NamedTuple

import inputs
import numpy as np
import report
from peer_options import DTYPES
from processes import running, scratch


class Scores(NamedTuple):
    """The log-probabilities of the text's tokens, and the likeliest tokens in their
    places. Each sequence lacks its first token, which is not predicted."""

    logprobs: np.ndarray
    likeliest: np.ndarray


def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    rows = inputs.rows(options.model, options.sequences, options.length)
    with scratch() as work:
        exact = _score(options, work, rows)
        rounded = _score(options, work, rows, "--weights", "int8")
    ours = compare(exact, rounded)
    report.emit_ratios(
        "int8_error",
        options,
        ours={"int8": ours},
        peer={"exact": {"mean_logprob": float(exact.logprobs.mean())}},
        ratio={
            name.replace("_", " "): report.ratio(value)
            for name, value in ours.items()
            if name != "tokens"
        },
        config=report.config(
            options, "device", "sequences", "length", dtype=DTYPES[options.device]
        ),
    )
    return 0


def compare(exact: Scores, other: Scores) -> dict[str, Any]:
    difference = np.abs(exact.logprobs - other.logprobs)
    return {
        "tokens": len(difference),
        "mean_difference": float(difference.mean()),
        "largest_difference": float(difference.max()),
        "same_likeliest_token": float((exact.likeliest == other.likeliest).mean()),
    }


def _score(
    options: argparse.Namespace, work: Path, rows: np.ndarray, *flags: str
) -> Scores:
    logprobs: list[float] = []
    likeliest: list[int] = []
    with running(options, work, *flags) as (_, client):
        for row in rows:
            result = client.sample(
                row, max_tokens=1, prompt_logprobs=True, prompt_top_logprobs=1
            )
            logprobs += list(result.prompt_logprobs[1:])
            likeliest += [top[0][0] for top in result.prompt_top_logprobs[1:]]
    return Scores(np.array(logprobs, np.float64), np.array(likeliest))


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="run.py int8_error",
        description=__doc__,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--length", type=int, default=256, help="tokens of each")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--device", choices=DTYPES, default="cpu")
    parser.add_argument("--output", type=Path, help="also write the JSON line here")
    parser.set_defaults(rank=report.RANK)
    return report.parse_with_model(parser, arguments)
