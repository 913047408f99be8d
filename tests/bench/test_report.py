"""Tests what all benches share: turns, checks, and what is reported."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import run  # noqa: F401  Sets sys.path for the imports below.

# isort: split
import machine
import report

# Each call reports 600 MiB more than the previous one.
NVIDIA_SMI = """#!/bin/sh
case $1 in
  --query-gpu=name,driver_version,memory.total) echo "NVIDIA H100, 580.1, 81559" ;;
  --query-gpu=memory.used) echo x >>"$0.asked"; echo $((600 * $(wc -l <"$0.asked"))) ;;
esac
"""


@pytest.mark.parametrize(
    ("device", "name", "factor"),
    [
        ("cpu", "loss", 2e-5),
        ("cpu", "grad_norm", 2e-4),
        ("cuda", "loss", 0.1),
        ("cuda", "grad_norm", 0.1),
    ],
)
def test_a_wrong_result_ends_the_bench(device: str, name: str, factor: float) -> None:
    good: report.Run = {"seconds": [1.0], "extra_rss_bytes": 1}
    good |= {"loss": 5.0, "grad_norm": 2.0}
    bad = {**good, name: good[name] * (1 + factor)}
    sides = {"first": lambda: good, "second": lambda: bad}
    with pytest.raises(SystemExit, match=name):
        report.take_turns(
            1, sides, report.equal_steps(argparse.Namespace(device=device))
        )


def test_sides_take_turns() -> None:
    order: list[str] = []

    def side(name: str) -> report.Run:
        order.append(name)
        return {"seconds": [1.0], "extra_rss_bytes": 1}

    runs = report.take_turns(2, {"a": lambda: side("a"), "b": lambda: side("b")})
    assert order == ["a", "b", "a", "b"]
    assert {name: len(of) for name, of in runs.items()} == {"a": 2, "b": 2}


def test_the_best_repetition_and_the_highest_peak_count() -> None:
    def process(seconds: list[float], peak: int) -> report.Run:
        return {"seconds": seconds, "peak_rss_bytes": peak, "extra_rss_bytes": peak}

    peer = {**process([8.0, 4.0], 70), "gemm_flops_per_second": 50.0, "versions": {}}
    options = report.parser("x", "").parse_args([])
    result = report.make(
        "x",
        options,
        {"ours": [process([3.0, 2.0], 10), process([5.0, 6.0], 30)], "peer": [peer]},
        peers=("peer",),
        work=dict.fromkeys(("ours", "peer"), report.Work(tokens=100, flops=80.0)),
        config={},
        ratios=lambda sides: {
            "speed": report.ratio(
                sides["peer"]["seconds"] / sides["ours"]["seconds"], at_least=3
            )
        },
    )
    assert result["ours"]["ours"]["tokens_per_second"] == 50
    assert result["ours"]["ours"]["fraction_of_gemm_rate"] == 0.8
    assert result["ours"]["ours"]["extra_rss_bytes"] == 30
    assert result["ratio"] == {"speed": {"value": 2, "target": ">= 3", "met": False}}
    assert "speed 2 (target >= 3)" in report.sentence(result)


def test_a_device_is_described_and_its_memory_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(NVIDIA_SMI, "utf-8")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    described = machine.describe("cuda")
    assert described["device"] == "NVIDIA H100"
    assert described["driver"] == "580.1"
    assert described["device_memory_bytes"] == 81559 * 2**20
    assert "device" not in machine.describe()
    memory = machine.PeakMemory(device="cuda").read()
    assert memory["extra_device_bytes"] == 600 * 2**20
    peer: report.Run = {"seconds": [1.0], "peak_rss_bytes": 1, **memory}
    peer["gemm_flops_per_second"], peer["versions"] = 1.0, {}
    result = report.make(
        "x",
        report.parser("x", "").parse_args([]),
        {"peer": [peer]},
        peers=("peer",),
        work={"peer": report.Work(tokens=1, flops=1.0)},
        config={},
        ratios=lambda sides: {},
    )
    assert result["peer"]["peer"]["extra_device_bytes"] == 600 * 2**20
    assert "600 MiB" in report.sentence(result)


@pytest.mark.parametrize(
    ("cpu", "name"),
    [
        ("AMD EPYC", "epyc-2core"),
        ("AMD EPYC 9B45 64-Core Processor", "epyc-2core"),
        ("Intel(R) Xeon(R) Processor @ 2.10GHz", "xeon-2core"),
        ("Neoverse-V2", "neoverse-v2-2core"),
        ("", "cpu-2core"),
    ],
)
def test_a_machine_has_a_short_name(cpu: str, name: str) -> None:
    assert machine.short_name({"cpu": cpu, "cores": 2}) == name


def test_memory_of_a_process_that_cannot_be_watched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some machines do not permit watching a process's memory. A measurement on
    "cuda" leaves this memory out. A measurement on a CPU raises."""
    monkeypatch.setattr(machine, "nvidia_smi", lambda fields: ["0"])

    def forbidden(self: Path, text: str, encoding: str) -> int:
        raise PermissionError(self)

    monkeypatch.setattr(Path, "write_text", forbidden)
    assert machine.PeakMemory(device="cuda").read() == {"extra_device_bytes": 0}
    with pytest.raises(PermissionError, match="clear_refs"):
        machine.PeakMemory()


def test_the_ratios_are_sentences_and_the_rest_is_a_line(
    capsys: Any, tmp_path: Path
) -> None:
    ratios = {"a/b": report.ratio(0.5, at_most=1), "c": report.ratio(2.0)}
    options = argparse.Namespace(output=tmp_path / "line.json")
    parts: dict[str, Any] = {"ours": {"points": []}, "ratio": ratios, "config": {}}
    report.emit_ratios("x", options, **parts)
    printed = capsys.readouterr()
    assert printed.err == "x: a/b 0.5 (target <= 1)\nx: c 2\n"
    line = json.loads(printed.out)
    assert line.pop("machine")["cores"] > 0 and line.pop("command") == sys.argv
    assert line == {"bench": "x", "peer": {}, **parts}
    assert (tmp_path / "line.json").read_text("utf-8") == printed.out
