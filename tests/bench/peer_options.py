"""The options of every peer's program. This module does not import torch, because some
peers do not have it."""

from __future__ import annotations

import argparse
from pathlib import Path

# The dtype in which models compute on all sides, by device.
DTYPES = {"cpu": "f32", "cuda": "bf16"}


def parser() -> argparse.ArgumentParser:
    """Returns a parser with the options that processes.run_peer passes to every
    peer."""
    result = argparse.ArgumentParser()
    result.add_argument("--model", type=Path, required=True)
    result.add_argument("--work", type=Path, required=True)
    result.add_argument("--threads", type=int, required=True)
    result.add_argument("--reps", type=int, required=True)
    result.add_argument("--device", choices=DTYPES, required=True)
    return result
