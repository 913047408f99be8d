"""Runs benches at tiny sizes, for the tests of the benches."""

from __future__ import annotations

import json
import os
from typing import Any

# Waiting threads must sleep, because other tests need the core.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import run

QUICK = ("--threads", "1", "--rounds", "1", "--reps", "1")
# Selects the model `tiny` of shapes.py, which is written on first use, and the CPU.
SHAPE = ("--shape", "tiny", "--device", "cpu")


def reported(name: str, capsys: Any, *arguments: str) -> dict[str, Any]:
    """Returns what a bench prints on stdout."""
    assert run.BENCHES[name](list(arguments)) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["bench"] == name
    return result


def quick(name: str, capsys: Any, *arguments: str) -> dict[str, Any]:
    return reported(name, capsys, *QUICK, *arguments)


def compared(name: str, capsys: Any, *arguments: str) -> dict[str, Any]:
    """Returns the report of a bench whose sides have common figures."""
    result = quick(name, capsys, *arguments)
    for side in (result["ours"] | result["peer"]).values():
        assert side["tokens_per_second"] > 0
        assert side["fraction_of_gemm_rate"] > 0
        assert side["peak_rss_bytes"] > side["extra_rss_bytes"]
    return result
