#!/usr/bin/env python3
"""Runs one bench: tests/bench/run.py NAME [options].

The last line of stdout is one JSON object with `ours`, `peer` and `ratio`. A line
for people goes to stderr.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
sys.path[:0] = [
    str(HERE),
    str(HERE.parent / "oracle"),
    str(REPOSITORY / "client" / "python"),
]

import attention  # noqa: E402
import builds  # noqa: E402
import busy  # noqa: E402
import custom_loss  # noqa: E402
import durability  # noqa: E402
import edge  # noqa: E402
import group_prompt  # noqa: E402
import grouped  # noqa: E402
import int8_error  # noqa: E402
import load  # noqa: E402
import log_cost  # noqa: E402
import logprobs  # noqa: E402
import memory  # noqa: E402
import mixed_durability  # noqa: E402
import mixed_load  # noqa: E402
import moe  # noqa: E402
import multi_adapter  # noqa: E402
import residency  # noqa: E402
import restart  # noqa: E402
import rpc_overhead  # noqa: E402
import sample  # noqa: E402
import sample_many  # noqa: E402
import soak  # noqa: E402
import table  # noqa: E402
import tinker_overhead  # noqa: E402
import train_step  # noqa: E402

BENCHES = {
    "attention": attention.main,
    "builds": builds.main,
    "busy": busy.main,
    "custom_loss": custom_loss.main,
    "durability": durability.main,
    "edge": edge.main,
    "group_prompt": group_prompt.main,
    "grouped": grouped.main,
    "int8_error": int8_error.main,
    "load": load.main,
    "log_cost": log_cost.main,
    "logprobs": logprobs.main,
    "memory": memory.main,
    "mixed_durability": mixed_durability.main,
    "mixed_load": mixed_load.main,
    "moe": moe.main,
    "multi_adapter": multi_adapter.main,
    "residency": residency.main,
    "restart": restart.main,
    "rpc_overhead": rpc_overhead.main,
    "sample": sample.main,
    "sample_many": sample_many.main,
    "soak": soak.main,
    "table": table.main,
    "tinker_overhead": tinker_overhead.main,
    "train_step": train_step.main,
}


def main() -> int:
    if len(sys.argv) < 2 or sys.argv[1] not in BENCHES:
        print(f"usage: run.py {{{','.join(BENCHES)}}} [options]", file=sys.stderr)
        return 2
    return BENCHES[sys.argv[1]](sys.argv[2:])


if __name__ == "__main__":
    raise SystemExit(main())
