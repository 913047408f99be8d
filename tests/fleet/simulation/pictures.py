"""Draws what simulate.py found."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

REPOSITORY = Path(__file__).resolve().parents[3]
sys.path.append(str(REPOSITORY / "client" / "python"))

from weft.recipes import plots  # noqa: E402  Needs the path that is set above.

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from simulate import Row

NUM_POINTS = 120
NUM_MEANS = 12  # Of an update, whose processes end one after another.


def draw(rows: Sequence[Row], limit: float, path: Path) -> None:
    """Draws one column for each row. limit: seconds, the target of the first one."""
    page = plots.figure(4.2 * len(rows), 7.8)
    if page is None:
        print(f"no {path.name}: pip install matplotlib", file=sys.stderr)
        return
    costs = rows[0].costs
    page.suptitle(
        f"{costs.logs} daemons with {costs.adapters:,} adapters (simulated)",
        fontweight="bold",
    )
    from matplotlib import rc_context
    from matplotlib.lines import Line2D

    axes = page.subplots(2, len(rows))
    for row, answers, throughput in zip(rows, *axes, strict=True):
        for color, (standbys, result) in enumerate(row.results.items()):
            _share(answers, row.unchanged(standbys), f"C{color}", "-")
            _share(answers, result.in_training(), f"C{color}", ":")
            throughput.plot(*_throughput(row, standbys), color=f"C{color}")
        _label(row, answers, throughput)
    axes[0][0].axvline(limit, color="gray", linestyle="--", linewidth=1)
    lines = [
        Line2D([], [], color=f"C{color}", label=f"{n} standby" + "s" * (n > 1))
        for color, n in enumerate(rows[0].results)
    ]
    target = f"target for one that did not change, p99: {limit:g} s"
    lines += [
        Line2D([], [], color="gray", label="an adapter that did not change"),
        Line2D([], [], color="gray", linestyle=":", label="the last one in training"),
        Line2D([], [], color="gray", linestyle="--", label=target),
    ]
    page.legend(handles=lines, loc="outside lower center", ncols=len(lines))
    # Text stays text, and a file of the same lines has the same bytes.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "fleet"}):
        page.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _label(row: Row, answers: Axes, throughput: Axes) -> None:
    answers.set_ylim(0, 102)
    answers.set_xlim(left=0)
    end = "stop" if row.is_update else "death"
    plots.label(
        answers,
        title=row.scenario.title,
        x=f"seconds since the {end} of the log's owner",
        y="logs where it answers, %",
    )
    if row.is_update:
        throughput.set_ylim(99, 100)
    since = "minutes since the begin" if row.is_update else "seconds since the death"
    plots.label(throughput, title="", x=since, y="training throughput of the fleet, %")


def _share(axes: Axes, values: Sequence[float], color: str, style: str) -> None:
    """Draws how many of the values are at most x."""
    percent = np.linspace(0, 100, NUM_POINTS)
    axes.plot(np.percentile(values, percent), percent, style, color=color)


def _throughput(row: Row, standbys: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns times and the mean throughput, in percent of that of all logs."""
    result = row.results[standbys]
    ends = [one.begin + one.lost + one.replay for one in result.outages]
    number = NUM_MEANS if row.is_update else NUM_POINTS
    edges = np.linspace(-0.02 * max(ends), 1.02 * max(ends), number + 1)
    lost = np.zeros(number)
    for one, end in zip(result.outages, ends, strict=True):
        inside = np.minimum(edges[1:], end) - np.maximum(edges[:-1], one.begin)
        lost += np.maximum(inside, 0)
    share = lost / (np.diff(edges) * row.costs.logs * result.seeds)
    middle = (edges[1:] + edges[:-1]) / 2
    return (middle / 60 if row.is_update else middle), 100 * (1 - share)
