"""Shows and stores a run's progress: lines, a log, TensorBoard events, a plot."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from weft.errors import InvalidArgument

Row = dict[str, float]
FORMATS = ("jsonl", "csv")
NUMBER = "adapter_step"
# The plot's moving average covers this many values, or a fifth of all values if that
# is less.
SMOOTHED = 10


class _Board(Protocol):
    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None: ...

    def close(self) -> None: ...


class Watch:
    """Prints a line for each step, and writes log.jsonl or log.csv to the folder.

    Continues an existing log after its step `done`. If the existing log has later
    steps, keeps it as log.old.jsonl or log.old.csv. The folder also gets event files if
    tensorboardX, or tensorboard and torch, are installed. total: the number of steps of
    the run. It is a context manager. Raises InvalidArgument for an unknown form, and
    for an existing file that is not a log.
    """

    def __init__(
        self, folder: Path, total: int, form: str = "jsonl", *, done: int = 0
    ) -> None:
        self._path = _log_path(folder, form)
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._total = total
        rows = _read(self._path)
        self._rows = [row for row in rows if done and row["step"] <= done]
        if len(self._rows) < len(rows):
            os.replace(self._path, folder / f"log.old.{form}")
        self._board = _open_board(folder)
        self._start = self._last = time.monotonic()
        self._num_new = 0

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        if self._board is not None:
            self._board.close()

    @property
    def rows(self) -> Sequence[Mapping[str, float]]:
        """Returns the log, with one row per step. The log includes the rows of earlier
        runs that this run continues."""
        return self._rows

    def step(
        self,
        step: int,
        num_tokens: int,
        values: Mapping[str, float],
        *,
        number: int | None = None,
    ) -> None:
        """Logs the end of step `step`, counted from 1, which took num_tokens tokens.

        number: the adapter's last step number, logged as "adapter_step".
        """
        now = time.monotonic()
        seconds, self._last = now - self._last, now
        self._num_new += 1
        rate = num_tokens / max(seconds, 1e-9)
        row = {"step": step, **values, "tokens_per_second": rate, "seconds": seconds}
        logged = row if number is None else {**row, NUMBER: number}
        self._rows.append(logged)
        self._write()
        left = (now - self._start) / self._num_new * (self._total - step)
        shown = [f"{name} {value:.4g}" for name, value in values.items()]
        shown += [f"{rate:.0f} tokens/s", f"ETA {_clock(left)}"]
        print(f"step {step}/{self._total}", *shown, sep="  ", flush=True)
        self._to_board(step, row)

    def note(self, step: int, name: str, value: float) -> None:
        """Logs a value that only some steps have, such as the loss of an evaluation.

        Adds the value to the last row if that row is of the same step. Otherwise adds a
        new row.
        """
        if not self._rows or self._rows[-1]["step"] != step:
            self._rows.append({"step": step})
        self._rows[-1][name] = value
        self._write()
        print(f"step {step}/{self._total}  {name} {value:.4f}", flush=True)
        self._to_board(step, {name: value})
        self._last = time.monotonic()

    def plot(self, names: Sequence[str], title: str) -> Path | None:
        """Plots the logged values with these names by step. Returns the path of
        plot.png, or None if matplotlib is missing."""
        if importlib.util.find_spec("matplotlib") is None:
            return None
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7.2, 4.0), dpi=110, layout="constrained")
        axes = figure.add_subplot()
        for index, name in enumerate(names):
            pairs = [(row["step"], row[name]) for row in self._rows if name in row]
            if not pairs:
                continue
            steps = [step for step, _ in pairs]
            values = [value for _, value in pairs]
            color = f"C{index}"
            # An evaluation runs seldom, so it has too few values to average.
            if len(pairs) < len(self._rows) // 2:
                axes.plot(steps, values, "o-", color=color, linewidth=2, label=name)
                continue
            width = max(1, min(SMOOTHED, len(values) // 5))
            axes.plot(steps, values, color=color, alpha=0.3, linewidth=0.9)
            axes.plot(
                steps, _average(values, width), color=color, linewidth=2, label=name
            )
        axes.set(title=title, xlabel="step")
        axes.legend()
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        path = self._folder / "plot.png"
        figure.savefig(path)
        return path

    def _write(self) -> None:
        """Writes the whole log again, because `note` may change the last row."""
        names = list(dict.fromkeys(name for row in self._rows for name in row))
        # A run may be killed at any moment, so the old log stays until the new one is
        # whole.
        draft = self._path.with_suffix(".tmp")
        with draft.open("w", encoding="utf-8", newline="") as file:
            if self._path.suffix == ".csv":
                writer = csv.DictWriter(file, names)
                writer.writeheader()
                writer.writerows(self._rows)
            else:
                file.writelines(json.dumps(row) + "\n" for row in self._rows)
        os.replace(draft, self._path)

    def _to_board(self, step: int, row: Mapping[str, float]) -> None:
        if self._board is not None:
            for name, value in row.items():
                if name != "step":
                    self._board.add_scalar(name, value, step)


def _average(values: Sequence[float], width: int) -> list[float]:
    """Returns the moving average: at each position the mean of the last `width` values,
    or of all values so far if they are fewer."""
    ends = range(1, len(values) + 1)
    parts = [values[max(end - width, 0) : end] for end in ends]
    return [sum(part) / len(part) for part in parts]


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _csv_row(row: Mapping[str, str]) -> Row:
    return {name: float(text) for name, text in row.items() if text}


def last_number(folder: Path, form: str) -> int | None:
    """Returns the adapter's last step number in the folder's log, or None if the log
    has none. Raises InvalidArgument as Watch does."""
    rows = _read(_log_path(folder, form))
    number = rows[-1].get(NUMBER) if rows else None
    return None if number is None else int(number)


def _log_path(folder: Path, form: str) -> Path:
    if form not in FORMATS:
        raise InvalidArgument(f"log format {form!r}: one of {', '.join(FORMATS)}")
    return folder / f"log.{form}"


def _read(path: Path) -> list[Row]:
    if not path.is_file():
        return []
    try:
        with path.open(encoding="utf-8", newline="") as file:
            if path.suffix == ".csv":
                rows = [_csv_row(row) for row in csv.DictReader(file)]
            else:
                rows = [{**json.loads(line)} for line in file]
            return sorted(rows, key=lambda row: row["step"])
    except (ValueError, TypeError, KeyError) as error:
        raise InvalidArgument(f"{path} is not a log of a run: {error!r}") from None


def _open_board(folder: Path) -> _Board | None:
    if importlib.util.find_spec("tensorboardX") is not None:
        from tensorboardX import SummaryWriter
    elif importlib.util.find_spec("tensorboard") and importlib.util.find_spec("torch"):
        from torch.utils.tensorboard import SummaryWriter
    else:
        return None
    board: _Board = SummaryWriter(str(folder))
    return board
