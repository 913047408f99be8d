"""The command line of model_log.py and model_move.py."""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Mapping
from typing import Any

BROKEN = 3  # Exit status.


def run(
    doc: str,
    mutants: Mapping[str, str],
    bounds_type: Any,
    model: Callable[[Any, str | None], Any],
    explore: Callable[[Any, str], bool],
) -> int:
    """Explores the model of a design, or of a mutant, within bounds. The bounds are a
    named tuple, each of whose fields has a default and becomes a flag."""
    parser = argparse.ArgumentParser(description=doc.partition("\n")[0])
    rules = "; ".join(f"{name}: {rule}" for name, rule in mutants.items())
    parser.add_argument("--mutant", choices=mutants, help=rules)
    for field, default in bounds_type._field_defaults.items():
        parser.add_argument(f"--{field.replace('_', '-')}", type=int, default=default)
    gc.disable()  # Worlds have no cycles, and there are many of them.
    given = parser.parse_args()
    bounds = bounds_type(*(getattr(given, field) for field in bounds_type._fields))
    words = ", ".join(f"{n} {f}" for f, n in bounds._asdict().items())
    name = f"{given.mutant or 'design'} ({words})"
    return 0 if explore(model(bounds, given.mutant), name) else BROKEN
