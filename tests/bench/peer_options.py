"""The options of every peer's program; without torch, which some do not have."""

from __future__ import annotations

import argparse
from pathlib import Path

# What models compute in, on all sides, by device.
DTYPES = {"cpu": "f32", "cuda": "bf16"}


def parser() -> argparse.ArgumentParser:
    """A parser with what processes.run_peer gives to all of them."""
    result = argparse.ArgumentParser()
    result.add_argument("--model", type=Path, required=True)
    result.add_argument("--work", type=Path, required=True)
    result.add_argument("--threads", type=int, required=True)
    result.add_argument("--reps", type=int, required=True)
    result.add_argument("--device", choices=DTYPES, required=True)
    return result
