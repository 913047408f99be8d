"""Keeps the replies of a GRPO run, with their rewards."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from weft.types import Sample

FILE = "samples.jsonl"
OLD = "samples.old.jsonl"
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
    samples.old.jsonl.
    """

    def __init__(self, folder: Path, done: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / FILE
        if not self._path.is_file():
            return
        # A run that was killed may have left a part of a line.
        *whole, rest = self._path.read_text("utf-8").split("\n")
        rows = [json.loads(line) for line in whole]
        kept = [row for row in rows if done and row["step"] <= done]
        if rest or len(kept) < len(rows):
            os.replace(self._path, folder / OLD)
            self._write(kept)

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
        self._write(map(asdict, rows))
        best = max(rows, key=lambda row: row.reward)
        worst = min(rows, key=lambda row: row.reward)
        return [
            f"  {name} {row.reward:.3g}  {_shown(row.reply)}"
            for name, row in (("best ", best), ("worst", worst))
        ]

    def _write(self, rows: Iterable[Mapping[str, object]]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            for row in rows:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")


def _shown(reply: str) -> str:
    """Returns the beginning of a reply. As JSON, it is one line."""
    return json.dumps(reply[:SHOWN], ensure_ascii=False)
