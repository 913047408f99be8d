"""Tests ranks that another program starts. No weftd watches such ranks."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import daemon as daemon_module
import models
import pytest
from daemon import STOP_SECONDS, wait_until
from groups import TENSOR_2, make, waits_for_signals


@pytest.fixture(autouse=True)
def rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", str(daemon_module.free_port()))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("WORLD_SIZE", "2")


def launch(
    monkeypatch: pytest.MonkeyPatch, rank: int, model: Path, folder: Path
) -> daemon_module.Daemon:
    monkeypatch.setenv("RANK", str(rank))
    process = make(folder, *TENSOR_2, model=model)
    process.launch()
    return process


def damaged(model: Path, folder: Path, file: str) -> Path:
    """Makes a copy of the model in which `file` has lost its second half."""
    copy = shutil.copytree(model, folder)
    content = (copy / file).read_bytes()
    (copy / file).write_bytes(content[: len(content) // 2])
    return copy


# There is no case (0, "config.json"), because rank 0 reads the file before it meets the
# other ranks.
@pytest.mark.parametrize(
    ("bad_rank", "file"),
    [(1, "config.json"), (0, "model.safetensors"), (1, "model.safetensors")],
)
def test_a_rank_that_cannot_load_is_named_by_all(
    bad_rank: int, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = models.tiny_model("llama-tied")
    bad = damaged(good, tmp_path / "model", file)
    ranks = [
        launch(
            monkeypatch, rank, bad if rank == bad_rank else good, tmp_path / str(rank)
        )
        for rank in (0, 1)
    ]
    try:
        for rank in ranks:
            assert rank.wait(STOP_SECONDS) == 1
            assert f"rank {bad_rank}: " in rank.log_tail()
            assert file in rank.log_tail()
    finally:
        for rank in ranks:
            rank.kill()


def test_a_rank_that_waits_for_rank_0_can_be_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models.tiny_model("llama-tied")
    with launch(monkeypatch, 1, model, tmp_path) as other:
        wait_until(lambda: waits_for_signals(other.pid), "no handling of signals")
        time.sleep(1)  # Meanwhile rank 1 tries to reach rank 0.
        begin = time.monotonic()
        assert other.stop() == 0
        assert time.monotonic() - begin < 2
        assert "before rank 0 was met" in other.log_tail()


def test_an_idle_rank_0_notices_that_another_one_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models.tiny_model("llama-tied")
    other = launch(monkeypatch, 1, model, tmp_path / "1")
    process = make(tmp_path / "0", *TENSOR_2, model=model)
    try:
        monkeypatch.setenv("RANK", "0")
        process.start()
        other.kill()
        assert process.wait(STOP_SECONDS) == 1
    finally:
        other.kill()
        process.kill()
