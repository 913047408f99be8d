"""Tests what all benches share: turns, checks, and what is reported."""

from __future__ import annotations

import argparse

import pytest
import run  # noqa: F401  Sets sys.path for the imports below.

# isort: split
import report


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
