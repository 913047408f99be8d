"""Shows and stores a run's progress: lines, a log, a plot, and boards."""

from __future__ import annotations

import csv
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from weft.adapter import Adapter
from weft.errors import InvalidArgument
from weft.recipes import plots
from weft.recipes.boards import Boards

Row = dict[str, float]
FORMATS = ("jsonl", "csv")


@dataclass(frozen=True)
class Plot:
    """What plot.png shows: the logged values with these names, by step."""

    names: Sequence[str]
    title: str
    value: str  # What the values are, with their unit.


class Watch:
    """Prints a line for each step, and writes log.jsonl or log.csv to the folder.

    At its exit, also after an error, it draws plot.png if matplotlib is installed.
    Continues an existing log after its step `done`. If the existing log has later
    steps, keeps it under `old_name`. The values also go to the boards that are
    installed (boards.py). total: the number of steps of the run. settings: the options
    of the run, for the boards. adapters: those that the run trains, whose curves the
    server's console shows. It is a context manager. Raises InvalidArgument for an
    unknown form, and for an existing file that is not a log.
    """

    def __init__(
        self,
        folder: Path,
        total: int,
        form: str = "jsonl",
        *,
        done: int = 0,
        plot: Plot | None = None,
        settings: Mapping[str, object] | None = None,
        adapters: Sequence[Adapter] = (),
    ) -> None:
        self._path = _log_path(folder, form)
        self._plot = plot
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._total = total
        rows = read_log(self._path)
        self._rows = [row for row in rows if done and row["step"] <= done]
        if len(self._rows) < len(rows):
            shutil.copyfile(self._path, old_name(self._path))
            self._write()
        self._boards = Boards(folder, settings or {}, adapters)
        self._start = self._last = time.monotonic()
        self._num_new = 0

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._boards.close(failed=kind is not None)
        if self._plot is not None:
            plots.by_step(
                self._folder / "plot.png",
                {name: self.points(name) for name in self._plot.names},
                title=self._plot.title,
                value=self._plot.value,
            )

    def points(self, name: str) -> list[tuple[float, float]]:
        """Returns the logged values of this name, each with its step."""
        return [(row["step"], row[name]) for row in self._rows if name in row]

    def step(
        self,
        step: int,
        num_tokens: int,
        values: Mapping[str, float],
        *,
        more: Mapping[str, float] | None = None,
    ) -> None:
        """Logs the end of step `step`, counted from 1, which took num_tokens tokens.

        more: values that are logged and not printed.
        """
        now = time.monotonic()
        seconds, self._last = now - self._last, now
        self._num_new += 1
        rate = num_tokens / max(seconds, 1e-9)
        row = {"step": step, **values, **(more or {})}
        row |= {"tokens_per_second": rate, "seconds": seconds}
        self._rows.append(row)
        self._write()
        left = (now - self._start) / self._num_new * (self._total - step)
        shown = [f"{name} {value:.4g}" for name, value in values.items()]
        shown += [f"{rate:.0f} tokens/s", f"ETA {_clock(left)}"]
        print(f"step {step}/{self._total}", *shown, sep="  ", flush=True)
        self._boards.add(step, row)

    def note(
        self,
        step: int,
        name: str,
        value: float,
        *,
        more: Mapping[str, float] | None = None,
    ) -> None:
        """Logs a value that only some steps have, such as the loss of an evaluation.

        Adds the value to the last row if that row is of the same step. Otherwise adds a
        new row. more: as in `step`.
        """
        values = {name: value, **(more or {})}
        if not self._rows or self._rows[-1]["step"] != step:
            self._rows.append({"step": step})
        self._rows[-1].update(values)
        self._write()
        print(f"step {step}/{self._total}  {name} {value:.4f}", flush=True)
        self._boards.add(step, values)
        self._last = time.monotonic()

    def _write(self) -> None:
        """Writes the whole log again, because `note` may change the last row."""
        names = list(dict.fromkeys(name for row in self._rows for name in row))
        with replaced(self._path) as file:
            if self._path.suffix == ".csv":
                writer = csv.DictWriter(file, names)
                writer.writeheader()
                writer.writerows(self._rows)
            else:
                file.writelines(json.dumps(row) + "\n" for row in self._rows)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _csv_row(row: Mapping[str, str]) -> Row:
    return {name: float(text) for name, text in row.items() if text}


@contextmanager
def replaced(path: Path) -> Iterator[TextIO]:
    """Opens a draft that takes the file's place once it is whole. A run may be killed
    at any moment, so the old file stays until then."""
    draft = path.with_suffix(".tmp")
    with draft.open("w", encoding="utf-8", newline="") as file:
        yield file
    os.replace(draft, path)


def old_name(path: Path) -> Path:
    """Returns a free name for an earlier state of a file: log.old.jsonl, log.old2.jsonl
    and so on."""
    number = 1
    while True:
        mark = "" if number == 1 else number
        old = path.with_name(f"{path.stem}.old{mark}{path.suffix}")
        if not old.exists():
            return old
        number += 1


def _log_path(folder: Path, form: str) -> Path:
    if form not in FORMATS:
        raise InvalidArgument(f"log format {form!r}: one of {', '.join(FORMATS)}")
    return folder / f"log.{form}"


def read_log(path: Path) -> list[Row]:
    """Returns the rows of a log, by step; none if there is no file. Raises
    InvalidArgument if the file is not a log."""
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
