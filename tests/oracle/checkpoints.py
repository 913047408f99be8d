"""Reads the daemon's checkpoint folders, as far as tests need it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from daemon import Daemon
from safetensors.numpy import load_file


def folder(daemon: Daemon, adapter_id: str, name: str) -> Path:
    """Returns the folder of a checkpoint."""
    return daemon.checkpoint_dir / adapter_id / name


def buffer(
    daemon: Daemon, adapter_id: str, name: str, kind: str
) -> dict[str, np.ndarray]:
    """Returns one buffer of a checkpoint, by plain tensor name.

    kind: gradient, exp_avg or exp_avg_sq.
    """
    path = folder(daemon, adapter_id, name) / "optimizer.safetensors"
    prefix = kind + "."
    return {
        tensor.removeprefix(prefix): value
        for tensor, value in load_file(path).items()
        if tensor.startswith(prefix)
    }


def gradients(daemon: Daemon, adapter: Any) -> dict[str, np.ndarray]:
    """Returns the adapter's accumulated gradients, by saving a checkpoint."""
    adapter.save("gradients", overwrite=True)
    return buffer(daemon, adapter.id, "gradients", "gradient")
