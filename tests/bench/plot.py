"""Plots bench results: throughput against size, with one line for each side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

Points = Sequence[tuple[float, float]]

WIDTH, HEIGHT, DOTS_PER_INCH = 7.0, 4.2, 120
LIMIT_STYLES = ("--", ":", "-.")


def lines(
    path: Path,
    sides: Mapping[str, Points],
    *,
    title: str,
    x: str,
    y: str,
    limits: Mapping[str, Points] | None = None,
) -> None:
    """Writes a PNG with one line for each of `sides` and a gray line for each of
    `limits`, which are at most three. The x axis is logarithmic to the base 2, with
    ticks where points are."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(WIDTH, HEIGHT), layout="constrained")
    for name, points in sides.items():
        axes.plot(*zip(*points, strict=True), marker="o", label=name)
    for style, (name, points) in zip(
        LIMIT_STYLES, (limits or {}).items(), strict=False
    ):
        axes.plot(*zip(*points, strict=True), linestyle=style, color="gray", label=name)
    ticks = sorted({point[0] for points in sides.values() for point in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=DOTS_PER_INCH)
    pyplot.close(figure)
