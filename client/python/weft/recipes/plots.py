"""Draws values by step, if matplotlib is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Points = Sequence[tuple[float, float]]  # (step, value), in the order of the steps.
# A moving average covers this many values, or a fifth of all values if that is less.
SMOOTHED = 10
# Fewer points than this are marks. A line between them would show a course that nobody
# has measured.
FEWEST_OF_A_LINE = 3
# Lines may lie on each other, so each is broken in another way.
DASHES = ("-", "--", "-.", ":")


def figure(width: float, height: float = 4.0) -> Figure | None:
    """Returns an empty figure, or None if matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        return None
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=110, layout="constrained")


def draw(axes: Axes, series: Mapping[str, Points], *, raw: bool = True) -> None:
    """Draws each series as a moving average, and its values as a pale line if `raw`. A
    series that is much shorter than the longest one, such as that of an evaluation, has
    too few values to average."""
    longest = max(map(len, series.values()), default=0)
    for index, (name, points) in enumerate(series.items()):
        if not points:
            continue
        steps, values = zip(*points, strict=True)
        color = f"C{index}"
        if len(points) < max(FEWEST_OF_A_LINE, longest // 2):
            style = "o" if len(points) < FEWEST_OF_A_LINE else "o-"
            axes.plot(steps, values, style, color=color, linewidth=2, label=name)
            continue
        width = max(1, min(SMOOTHED, len(values) // 5))
        if raw and width > 1:
            axes.plot(steps, values, color=color, alpha=0.3, linewidth=0.9)
        style = "-" if raw else DASHES[index % len(DASHES)]
        smooth = average(values, width)
        axes.plot(steps, smooth, style, color=color, linewidth=2, label=name)


def label(axes: Axes, *, title: str, x: str, y: str) -> None:
    """Writes title, axes and, if there is something to tell apart, the legend."""
    axes.set(title=title, xlabel=x, ylabel=y)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def by_step(
    path: Path, series: Mapping[str, Points], *, title: str, value: str
) -> None:
    """Writes a picture of all series. value: the name of the values and their unit."""
    if not any(series.values()):
        return
    page = figure(7.2)
    if page is None:
        print(f"no {path.name}: pip install matplotlib")
        return
    from matplotlib.ticker import MaxNLocator

    axes = page.add_subplot()
    draw(axes, series)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    label(axes, title=title, x="step", y=value)
    page.savefig(path)


def average(values: Sequence[float], width: int) -> list[float]:
    """Returns the moving average: at each position the mean of the last `width` values,
    or of all values so far if they are fewer."""
    ends = range(1, len(values) + 1)
    parts = [values[max(end - width, 0) : end] for end in ends]
    return [sum(part) / len(part) for part in parts]
