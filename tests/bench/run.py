#!/usr/bin/env python3
"""Runs one bench: tests/bench/run.py NAME [options].

The last line of stdout is one JSON object with `ours`, `peer` and `ratio`. A line
for people goes to stderr.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
sys.path[:0] = [
    str(HERE),
    str(HERE.parent / "oracle"),
    str(REPOSITORY / "client" / "python"),
]

NAMES = (
    *("builds", "busy", "edge", "group_prompt"),
    *("int8_error", "load", "log_cost", "logprobs", "memory"),
    *("mixed_load", "moe", "move_pause", "multi_adapter", "rollouts"),
    *("rpc_overhead", "sample", "soak", "store_cost", "takeover", "train_step"),
)
MODULES = {name: importlib.import_module(name) for name in NAMES}
BENCHES = {name: module.main for name, module in MODULES.items()}


def missing_program(name: str) -> Path | None:
    """Returns a program of the bench that is not built. The bench might find out only
    after minutes."""
    for value in vars(MODULES[name]).values():
        is_program = isinstance(value, Path) and value.name.endswith("_bench")
        if is_program and not value.exists():
            return Path(value)
    return None


def main() -> int:
    if len(sys.argv) < 2 or sys.argv[1] not in BENCHES:
        print(f"usage: run.py {{{','.join(BENCHES)}}} [options]", file=sys.stderr)
        return 2
    name = sys.argv[1]
    if missing := missing_program(name):
        command = f"cmake --build --preset cpu --target {missing.name}"
        print(f"{name}: {missing} is not built: {command}", file=sys.stderr)
        return 2
    status: int = BENCHES[name](sys.argv[2:])
    return status


if __name__ == "__main__":
    raise SystemExit(main())
