"""Sends a run's values to the server's console, and to the boards that are installed:
TensorBoard, W&B, MLflow."""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from weft.adapter import Adapter

_LOG = logging.getLogger("weft")


class Board(Protocol):
    """Where values go."""

    def add(self, values: Mapping[str, float], step: int) -> None: ...

    def close(self, *, failed: bool) -> None: ...


class _Console:
    """The curves of the run's adapters on the server's console. The values of one of
    several adapters are named VALUE/ADAPTER."""

    # What the server knows itself, and what is no curve of the adapter.
    _LEFT_OUT = frozenset({"grad_norm", "lr", "seconds", "tokens_per_second"})

    def __init__(self, adapters: Sequence[Adapter]) -> None:
        self._adapters = {adapter.id: adapter for adapter in adapters}
        self._only = adapters[0].id if len(adapters) == 1 else ""

    def add(self, values: Mapping[str, float], step: int) -> None:
        curves: dict[str, dict[str, float]] = {}
        for tag, value in values.items():
            name, _, of = tag.partition("/")
            if name not in self._LEFT_OUT:
                curves.setdefault(of or self._only, {})[name] = value
        for of, reported in curves.items():
            if of in self._adapters:
                self._adapters[of].report(reported)

    def close(self, *, failed: bool) -> None:
        pass


class _TensorBoard:
    """Event files in the run's folder."""

    def __init__(self, module: ModuleType, folder: Path) -> None:
        self._writer = module.SummaryWriter(str(folder))

    def add(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self, *, failed: bool) -> None:
        self._writer.close()


class _Wandb:
    """A run of W&B in the project of WANDB_PROJECT."""

    def __init__(self, folder: Path, settings: Mapping[str, object]) -> None:
        import wandb

        self._run = wandb.init(name=folder.name, dir=str(folder), config={**settings})

    def add(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=int(step))

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class _Mlflow:
    """A run of MLflow at MLFLOW_TRACKING_URI."""

    def __init__(self, folder: Path, settings: Mapping[str, object]) -> None:
        import mlflow

        self._mlflow = mlflow
        mlflow.start_run(run_name=folder.name)
        mlflow.log_params(dict(settings))

    def add(self, values: Mapping[str, float], step: int) -> None:
        self._mlflow.log_metrics(dict(values), step=int(step))

    def close(self, *, failed: bool) -> None:
        self._mlflow.end_run(status="FAILED" if failed else "FINISHED")


class Boards:
    """The boards of a run. W&B and MLflow also need their environment variable, because
    they send the values away. settings: the options of the run, for the boards.
    adapters: those that the run trains.

    A board that raises is left out from then on, with a warning, because the training
    must not end with it.
    """

    def __init__(
        self,
        folder: Path,
        settings: Mapping[str, object],
        adapters: Sequence[Adapter] = (),
    ) -> None:
        self._boards: list[Board] = [_Console(adapters)] if adapters else []
        if _installed("tensorboardX"):
            self._open(lambda: _TensorBoard(_tensorboard_x(), folder))
        elif _installed("tensorboard") and _installed("torch"):
            name = "torch.utils.tensorboard"
            self._open(lambda: _TensorBoard(importlib.import_module(name), folder))
        if os.environ.get("WANDB_PROJECT") and _installed("wandb"):
            self._open(lambda: _Wandb(folder, settings))
        if os.environ.get("MLFLOW_TRACKING_URI") and _installed("mlflow"):
            self._open(lambda: _Mlflow(folder, settings))

    def add(self, step: int, row: Mapping[str, float]) -> None:
        """Sends the values of a step."""
        values = {name: value for name, value in row.items() if name != "step"}
        self._each(lambda board: board.add(values, step))

    def close(self, *, failed: bool) -> None:
        """Ends the boards' runs. failed: the run ended by an error."""
        self._each(lambda board: board.close(failed=failed))

    def _open(self, make: Callable[[], Board]) -> None:
        try:
            self._boards.append(make())
        except Exception as error:  # Each board has exceptions of its own.
            _LOG.warning("a board is left out: %r", error)

    def _each(self, act: Callable[[Board], None]) -> None:
        for board in list(self._boards):
            try:
                act(board)
            except Exception as error:  # As in _open.
                self._boards.remove(board)
                name = type(board).__name__.strip("_")
                _LOG.warning("the board %s is left out from now on: %r", name, error)


def _tensorboard_x() -> ModuleType:
    """Imports tensorboardX. It imports torch, if it finds it, for the name of a type
    that no value here has. That takes two seconds, so it does not find it."""
    modules: dict[str, Any] = sys.modules
    hides_torch = "torch" not in modules
    if hides_torch:
        modules["torch"] = None
    try:
        return importlib.import_module("tensorboardX")
    finally:
        if hides_torch:
            modules.pop("torch", None)


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
