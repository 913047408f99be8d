"""Keeps the replies of a GRPO run, with their rewards."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from weft.errors import InvalidArgument
from weft.recipes.watch import old_name, replaced
from weft.types import Sample

FILE = "samples.jsonl"
SHOWN = 100  # Characters of a reply that are shown.


@dataclass(frozen=True)
class Group:
    """The samples of one prompt, with text and reward of each."""

    prompt: str
    samples: list[Sample]
    replies: list[str]
    rewards: list[float]


@dataclass(frozen=True)
class Row:
    """A line of samples.jsonl."""

    step: int
    evaluation: bool
    prompt: str
    reply: str
    reward: float
    finish_reason: str | None


class ReplyLog:
    """Writes samples.jsonl: one line for each reply, with step, prompt and reward.

    Continues an existing file behind step `done`. If it has later steps, keeps it as
    samples.old.jsonl, samples.old2.jsonl and so on. Raises InvalidArgument if the
    existing file is damaged.
    """

    def __init__(self, folder: Path, done: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / FILE
        if not self._path.is_file():
            return
        # A run that was killed may have left a part of a line.
        *whole, rest = self._path.read_text("utf-8").split("\n")
        rows = [self._row(line, place) for place, line in enumerate(whole, start=1)]
        kept = [row for row in rows if done and row["step"] <= done]
        if rest or len(kept) < len(rows):
            shutil.copyfile(self._path, old_name(self._path))
            with replaced(self._path) as file:
                file.writelines(_lines(kept))

    def _row(self, line: str, place: int) -> dict[str, Any]:
        try:
            row = json.loads(line)
            if type(row["step"]) is int:
                return {**row}
        except (ValueError, TypeError, KeyError):
            pass
        raise InvalidArgument(
            f"{self._path}:{place} is not a reply of a run: delete the line, or move "
            "the file away"
        )

    def add(self, step: int, groups: Sequence[Group], *, evaluation: bool) -> list[str]:
        """Appends the replies of a step. Returns lines that show the best and the
        worst."""
        rows = [
            Row(step, evaluation, group.prompt, reply, reward, sample.finish_reason)
            for group in groups
            for sample, reply, reward in zip(
                group.samples, group.replies, group.rewards, strict=True
            )
        ]
        with self._path.open("a", encoding="utf-8") as file:
            file.writelines(_lines(map(asdict, rows)))
        best = max(rows, key=lambda row: row.reward)
        worst = min(rows, key=lambda row: row.reward)
        return [
            f"  {name} {row.reward:.3g}  {_shown(row.reply)}"
            for name, row in (("best ", best), ("worst", worst))
        ]


def _lines(rows: Iterable[Mapping[str, object]]) -> Iterator[str]:
    for row in rows:
        yield json.dumps(row, ensure_ascii=False) + "\n"


def _shown(reply: str) -> str:
    """Returns the beginning of a reply. As JSON, it is one line."""
    return json.dumps(reply[:SHOWN], ensure_ascii=False)
