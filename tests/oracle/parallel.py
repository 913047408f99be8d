"""Daemons of several ranks."""

from __future__ import annotations

SIZES = {
    "tensor 2": ("--tensor-parallel-size", "2"),
    "tensor 4": ("--tensor-parallel-size", "4"),
    "data 2": ("--data-parallel-size", "2"),
    "tensor 2, data 2": ("--tensor-parallel-size", "2", "--data-parallel-size", "2"),
}
