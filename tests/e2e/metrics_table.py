"""Makes the table of deploy/metrics.md from servers' pages /metrics."""

from __future__ import annotations

import re
from collections.abc import Iterator

_HELP = re.compile(r"# HELP (\S+) (.*)")
_TYPE = re.compile(r"# TYPE (\S+) (\w+)")
_LABEL = re.compile(r'(\w+)="([^"]*)"')
# Their values are those of one build, or too many for a cell.
_WITHOUT_VALUES = re.compile(r"grpc_server_\w+|weft_\w+_info")
HEAD = ["| metric | type | labels | meaning |", "| --- | --- | --- | --- |"]


def _labels(name: str, samples: list[str]) -> str:
    values: dict[str, set[str]] = {}
    for sample in samples:
        for label, value in _LABEL.findall(sample):
            if label != "le":
                values.setdefault(label, set()).add(value)
    if _WITHOUT_VALUES.fullmatch(name):
        return ", ".join(sorted(values))
    return "; ".join(
        f"{label}: {', '.join(sorted(values[label]))}" for label in sorted(values)
    )


def _families(page: str) -> Iterator[tuple[str, str, str, list[str]]]:
    """Yields name, type, help and samples of each family."""
    for part in re.split(r"^(?=# HELP )", page, flags=re.MULTILINE):
        described, typed = _HELP.match(part), _TYPE.search(part)
        if described and typed:
            samples = [line for line in part.splitlines() if line[0] != "#"]
            yield described[1], typed[2], described[2], samples


def table(*pages: str) -> list[str]:
    """Returns the lines of the table, by the names of the metrics. A metric is on one
    page or on several, which then say the same of it."""
    merged: dict[tuple[str, str, str], list[str]] = {}
    for page in pages:
        for name, kind, text, samples in _families(page):
            merged.setdefault((name, kind, text), []).extend(samples)
    rows = [
        f"| `{name}` | {kind} | {_labels(name, samples)} | {text} |"
        for (name, kind, text), samples in merged.items()
    ]
    return [*HEAD, *sorted(row.replace("|  |", "| |") for row in rows)]
