"""The command line that the examples share."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

MODEL = Path(__file__).resolve().parents[3] / "models/smollm2-135m-instruct"


@dataclass(frozen=True)
class Options:
    """The options of every example."""

    server: str
    model: Path
    steps: int


def arguments(description: str | None, steps: int) -> Options:
    """Parses --server, --model and --steps."""
    parser = argparse.ArgumentParser(
        description=(description or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--server", default="127.0.0.1:50051", help="HOST:PORT of weftd")
    add("--model", type=Path, default=MODEL, help="folder with the tokenizer")
    add("--steps", type=int, default=steps)
    parsed = parser.parse_args()
    return Options(parsed.server, parsed.model, parsed.steps)
