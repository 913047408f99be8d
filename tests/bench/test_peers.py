"""Tests that the benches with peers in torch still run, and that they compare and count
correctly. The sizes are tiny, so the times mean nothing. Other tests of benches do
without torch and transformers, whose import takes seconds."""

from __future__ import annotations

import contextlib
import io
import json
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import run
from quick import QUICK, SHAPE, compared, quick, reported

# isort: split
import group_prompt
import logprobs
import memory
import multi_adapter
import processes
import report
import sample
import sample_client
import torch_peer

RUN_PROGRAM = processes.run_program


def run_in_this_process(command: Sequence[str | Path], threads: int) -> report.Run:
    """Replaces run_program, so that transformers is imported once for all peers."""
    program, *arguments = [str(part) for part in command]
    if program != sys.executable:
        return RUN_PROGRAM(command, threads)
    output = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(output):
        patch.setattr(sys, "argv", arguments)
        runpy.run_path(arguments[0], run_name="__main__")
    result: report.Run = json.loads(output.getvalue().splitlines()[-1])
    return result


@pytest.fixture(autouse=True)
def one_import(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (processes, logprobs, sample):
        monkeypatch.setattr(module, "run_program", run_in_this_process)


@pytest.fixture(autouse=True)
def brief_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the rates of the machine quick to measure. At the sizes of a bench, each
    peer would take seconds."""
    monkeypatch.setitem(torch_peer.GEMM_SHAPE, "cpu", (64, 48, 32))
    monkeypatch.setitem(torch_peer.READ_BYTES, "cpu", 1 << 16)
    monkeypatch.setattr(sample_client, "PAIRS", 1)


def test_train_step(capsys: Any) -> None:
    size = ("--batch", "2", "--length", "16", "--rank", "8", "--cpu-bf16")
    result = compared("train_step", capsys, *SHAPE, *size)
    assert (result["config"]["rank"], result["config"]["device"]) == (8, "cpu")
    assert result["ours"].keys() == {"weft", "weft bf16"}
    assert result["peer"].keys() == {"naive", "naive bf16"}
    assert result["ratio"].keys() == {
        "speed weft/naive",
        "model FLOPs/GEMM rate",
        "speed weft bf16/weft",
        "speed weft bf16/naive bf16",
    }


def test_moe(capsys: Any) -> None:
    size = ("--shape", "tiny-moe", "--batch", "2", "--length", "16")
    result = compared("moe", capsys, *size)
    assert result["peer"].keys() == {"eager", "grouped_mm"}


def test_memory(capsys: Any, tiny: tuple[str, str]) -> None:
    size = ("--batch", "4", "--length", "32", "--chunk", "16")
    result = compared("memory", capsys, *tiny, *size)
    assert result["head_bytes_by_rows"].keys() == {"16", "32", "64"}
    assert result["ours"].keys() == {"all", "off"}
    assert result["peer"].keys() == {"naive", "lean"}
    fewer = compared("memory", capsys, *tiny, *size, "--recomputed")
    assert fewer["ours"].keys() == {"all"} and fewer["peer"].keys() == {"lean"}
    assert fewer["ratio"].keys() == {"speed all/lean", "memory all/lean"}


def test_group_prompt(capsys: Any) -> None:
    size = ("--group", "3", "--prompt", "32", "--completion", "8", "--slice", "2")
    ratios = compared("group_prompt", capsys, *SHAPE, *size)["ratio"]
    speed = ratios.pop("speed shared/repeated")["value"]
    # Repeated prompts make 3 * (32 + 8) tokens. A shared prompt makes 32 + 3 * 8.
    over = ratios.pop("speed shared/repeated over that of the tokens")["value"]
    assert over * 3 * 40 / 56 == pytest.approx(speed)
    assert ratios.keys() == {"speed shared/peer"}


def test_logprobs(capsys: Any) -> None:
    size = ("--rows", "96", "--hidden", "32", "--vocab", "500", "--chunk", "40")
    for sizes in (size, ("--rows", "48", *SHAPE)):
        result = compared("logprobs", capsys, *sizes)
        assert result["ratio"]["forward fused/GEMM rate"]["value"] > 0
        for side in (result["ours"] | result["peer"]).values():
            assert side["logprobs_error"] <= logprobs.TOLERANCE
            assert side["dhidden_error"] <= logprobs.TOLERANCE
    assert (result["config"]["hidden"], result["config"]["vocab"]) == (64, 320)


def test_a_wrong_head_ends_the_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoilt(command: Sequence[str | Path], threads: int) -> report.Run:
        run = run_in_this_process(command, threads)
        if command[0] == logprobs.HEAD_BENCH:
            path = Path(command[1], "dhidden")
            values = np.fromfile(path, np.float32)
            values[7] *= 1.1
            values.tofile(path)
        return run

    monkeypatch.setattr(logprobs, "run_program", spoilt)
    with pytest.raises(SystemExit, match="fused: dhidden off by"):
        run.BENCHES["logprobs"]([*QUICK, "--rows", "16", *SHAPE])


def test_multi_adapter(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    def running(*arguments: Any) -> Any:
        started.append(arguments[2:])
        return processes.running(*arguments)

    monkeypatch.setattr(multi_adapter, "running", running)
    size = ("--adapters", "3", "--sequences", "2", "--shortest", "4", "--longest", "24")
    result = compared("multi_adapter", capsys, *SHAPE, *size, "--rank", "4")
    # One weftd ran 3 adapters, another ran 1. Each had one slot of rank 4 per adapter.
    assert started == [
        ("--max-rank", "4", "--max-resident-adapters", count) for count in "31"
    ]
    assert result["ratio"].keys() == {
        "speed weft/peer",
        "model FLOPs/GEMM rate",
        "speed 3 adapters/one",
    }
    losses = [s["loss"] for s in (result["ours"] | result["peer"]).values()]
    assert max(losses) == pytest.approx(min(losses), rel=1e-5)


def test_sample(capsys: Any) -> None:
    sizes = ("--batches", "1", "2", "--prompt", "8", "--tokens", "8")
    group = ("--group-prompt", "24", "--group-tokens", "4")
    result = quick("sample", capsys, *SHAPE, *sizes, *group)
    assert result["ours"].keys() == {"weft f32", "weft bf16", "weft int8"}
    assert result["peer"].keys() == {"transformers"}
    assert "group" in result["ours"]["weft f32"]["seconds"]
    assert "group" not in result["ours"]["weft bf16"]["seconds"]
    assert all(entry["value"] > 0 for entry in result["ratio"].values())


def test_an_unlikely_token_ends_the_bench() -> None:
    sample._expect_likely_tokens({"1": 0.01}, 0.02)
    with pytest.raises(SystemExit, match="batch 8 has a token"):
        sample._expect_likely_tokens({"1": 0.01, "8": 0.03}, 0.02)


def test_load_keeps_to_its_memory_and_reads_each_weight_once(capsys: Any) -> None:
    size = ("--layers", "1", "--shard", "200MB")
    result = reported("load", capsys, "--rounds", "1", "--reps", "1", *size)
    assert result["config"]["files"] > 1
    assert result["ratio"]["peak memory/limit"]["met"]
    assert result["ratio"]["bytes read/limit"]["met"]
    weft = result["ours"]["weft"]
    # The kernel's count may exceed the reader's own count, because the kernel also
    # counts the bytes of config.json.
    assert 0 <= weft["rchar_bytes"] - weft["bytes_read"] < 1 << 16


def test_a_shared_prompt_is_less_work_for_the_same_tokens(
    tiny: tuple[str, str],
) -> None:
    options = group_prompt._parse([*tiny, "--group", "4", "--prompt", "64"])
    work = group_prompt.work(options)
    assert work["shared"].tokens == work["repeated"].tokens == 4 * (64 + 64)
    assert work["shared"].flops < 0.7 * work["repeated"].flops
    assert work["peer"] == work["repeated"]


def test_the_last_rows_of_each_sequence_are_scored() -> None:
    data = memory.scored(np.arange(20).reshape(2, 10), 6)
    for datum in data:
        assert datum.weights is not None
        assert datum.weights.tolist() == [0.0] * 6 + [1.0] * 3
