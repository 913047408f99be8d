"""Exports or saves an adapter and reads the files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file


def files(adapter: Any, folder: Path) -> dict[str, bytes]:
    """Returns name and bytes of every file of the exported adapter."""
    adapter.export(folder)
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def saved(daemon: Any, adapter: Any, name: str) -> dict[str, bytes]:
    """Returns the tensor files of a checkpoint: weights, gradients and both
    moments."""
    import checkpoints

    adapter.save(name, overwrite=True)
    folder = checkpoints.folder(daemon, adapter.id, name)
    return {
        path.name: path.read_bytes() for path in sorted(folder.glob("*.safetensors"))
    }


def weights(adapter: Any, folder: Path) -> dict[str, np.ndarray]:
    """Returns the tensors of the exported adapter."""
    adapter.export(folder)
    return load_file(folder / "adapter_model.safetensors")
