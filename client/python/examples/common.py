"""The command line that the examples share."""

from __future__ import annotations

import argparse
from dataclasses import dataclass


@dataclass(frozen=True)
class Options:
    """The options of every example."""

    server: str
    steps: int


def parser(description: str | None, steps: int) -> argparse.ArgumentParser:
    """Returns a parser of --server and --steps."""
    parser = argparse.ArgumentParser(
        description=(description or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--server", default="127.0.0.1:50051", help="HOST:PORT of weftd")
    add("--steps", type=int, default=steps)
    return parser


def arguments(description: str | None, steps: int) -> Options:
    """Parses --server and --steps."""
    parsed = parser(description, steps).parse_args()
    return Options(parsed.server, parsed.steps)
