"""Tests that a tiny model is written once, even if several processes ask for it at
once."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import models
import pytest


def _make(barrier: Any, done: Any) -> None:
    """A process that asks for a model that no process has written yet."""

    def write(folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        barrier.wait(30)

    done.put(str(models._cached("twice", write)))


def test_two_processes_make_one_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "BUILD_DIR", tmp_path)
    context = multiprocessing.get_context("fork")
    barrier, done = context.Barrier(2), context.Queue()
    makers = [context.Process(target=_make, args=(barrier, done)) for _ in range(2)]
    for maker in makers:
        maker.start()
    folders = {done.get(timeout=60) for _ in makers}
    for maker in makers:
        maker.join(60)
        assert maker.exitcode == 0
    (folder,) = map(Path, folders)
    assert [path.name for path in folder.iterdir()] == ["config.json"]
    assert list(folder.parent.iterdir()) == [folder]


def test_what_cannot_be_written_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "BUILD_DIR", tmp_path)

    def write(folder: Path) -> None:
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        models._cached("none", write)
