"""Daemons with several ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import daemon
import pytest

SIZES = {
    "tensor 2": ("--tensor-parallel-size", "2"),
    "tensor 4": ("--tensor-parallel-size", "4"),
    "data 2": ("--data-parallel-size", "2"),
    "tensor 2, data 2": ("--tensor-parallel-size", "2", "--data-parallel-size", "2"),
}

# Only for models with experts.
EXPERT_SIZES = {
    "tensor 2, experts 2": (*SIZES["tensor 2"], "--expert-parallel-size", "2"),
    "tensor 4, experts 2": (*SIZES["tensor 4"], "--expert-parallel-size", "2"),
}
RANK_FLAGS = ("--tensor-parallel-size", "--data-parallel-size")


def num_ranks(flags: Sequence[str]) -> int:
    """Returns how many ranks a daemon with these flags has."""
    pairs = zip(flags[::2], flags[1::2], strict=True)
    return math.prod(int(size) for flag, size in pairs if flag in RANK_FLAGS)


def need_devices(flags: Sequence[str]) -> None:
    """Skips the test if each rank needs a device and there are too few."""
    ranks, devices = num_ranks(flags), daemon.num_devices()
    if daemon.DEVICE == "cuda" and ranks > devices:
        pytest.skip(f"{ranks} ranks need as many CUDA devices; there are {devices}")
