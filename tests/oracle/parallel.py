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


def num_ranks(flags: Sequence[str]) -> int:
    """Returns how many ranks a daemon with these flags has."""
    return math.prod(int(size) for size in flags[1::2])


def need_devices(flags: Sequence[str]) -> None:
    """Skips the test if each rank needs a device and there are too few."""
    ranks, devices = num_ranks(flags), daemon.num_devices()
    if daemon.DEVICE == "cuda" and ranks > devices:
        pytest.skip(f"{ranks} ranks need as many CUDA devices; there are {devices}")
