"""Sends a run's values to the boards that are installed: TensorBoard, W&B, MLflow."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol


class Board(Protocol):
    """Where values go."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None: ...

    def close(self) -> None: ...


class _Wandb:
    """A run of W&B in the project of WANDB_PROJECT."""

    def __init__(self, folder: Path, settings: Mapping[str, object]) -> None:
        import wandb

        self._run = wandb.init(name=folder.name, dir=str(folder), config={**settings})

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self._run.log({tag: scalar_value}, step=int(global_step))

    def close(self) -> None:
        self._run.finish()


class _Mlflow:
    """A run of MLflow at MLFLOW_TRACKING_URI."""

    def __init__(self, folder: Path, settings: Mapping[str, object]) -> None:
        import mlflow

        self._mlflow = mlflow
        mlflow.start_run(run_name=folder.name)
        mlflow.log_params(dict(settings))

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self._mlflow.log_metric(tag, scalar_value, step=int(global_step))

    def close(self) -> None:
        self._mlflow.end_run()


def open_boards(folder: Path, settings: Mapping[str, object]) -> list[Board]:
    """Opens the boards. W&B and MLflow also need their environment variable, because
    they send the values away. settings: the options of the run."""
    boards: list[Board] = []
    if _installed("tensorboardX"):
        from tensorboardX import SummaryWriter

        boards.append(SummaryWriter(str(folder)))
    elif _installed("tensorboard") and _installed("torch"):
        from torch.utils.tensorboard import SummaryWriter

        boards.append(SummaryWriter(str(folder)))
    if os.environ.get("WANDB_PROJECT") and _installed("wandb"):
        boards.append(_Wandb(folder, settings))
    if os.environ.get("MLFLOW_TRACKING_URI") and _installed("mlflow"):
        boards.append(_Mlflow(folder, settings))
    return boards


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
