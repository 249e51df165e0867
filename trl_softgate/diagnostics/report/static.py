"""The charts as PNG and SVG files, with matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .charts import STATES, Chart, CurveChart, HistogramChart, ScatterChart, TimelineChart
from .interactive import color, curve_colors
from .reading import Run

_MUTED = "#7b8794"
_GRID = "#e4e7eb"


def save(charts: Sequence[Chart], runs: Sequence[Run], folder: Path) -> None:
    """Write `<key>.png` and `<key>.svg` of each chart; the folder is made, files of other names in it stay."""
    folder.mkdir(parents=True, exist_ok=True)
    # Equal data gives an equal file.
    with rc_context({"svg.hashsalt": "trl-softgate"}):
        for chart in charts:
            figure = Figure(figsize=(7, 3.6), dpi=150, layout="constrained")
            axis = figure.subplots()
            _draw(axis, chart, [_plain(run.name) for run in runs])
            axis.set_title(_plain(chart.title), loc="left", fontsize=11)
            figure.savefig(folder / f"{chart.key}.png", facecolor="white")
            # The layout stands; to find it again would take most of the time of the second file.
            figure.set_layout_engine("none")
            figure.savefig(folder / f"{chart.key}.svg", facecolor="white", metadata={"Date": None})


def _plain(text: str) -> str:
    """Matplotlib sets text between dollars as mathematics."""
    return text.replace("$", r"\$")


def _draw(axis: Axes, chart: Chart, names: list[str]) -> None:
    axis.grid(color=_GRID, linewidth=0.8)
    axis.set_axisbelow(True)
    axis.tick_params(colors=_MUTED, labelsize=8, length=0)
    axis.spines[:].set_color(_GRID)
    if isinstance(chart, CurveChart):
        _curves(axis, chart, names)
    elif isinstance(chart, ScatterChart):
        _scatter(axis, chart, names)
    elif isinstance(chart, HistogramChart):
        _histogram(axis, chart, names)
    elif isinstance(chart, TimelineChart):
        _timeline(axis, chart, names)
        return
    axis.legend(frameon=False, fontsize=8)


def _curves(axis: Axes, chart: CurveChart, names: list[str]) -> None:
    for curve, paint in zip(chart.curves, curve_colors(chart, len(names)), strict=True):
        label = " · ".join(filter(None, [names[curve.run], curve.label]))
        axis.plot(
            curve.x,
            curve.y,
            color=paint,
            linestyle="solid" if curve.faint else curve.dash,
            linewidth=0.8 if curve.faint else 1.8,
            alpha=0.3 if curve.faint else 1,
            marker="o" if len(curve.x) == 1 else None,
            label=None if curve.faint else label,
        )
    if chart.log_y:
        axis.set_yscale("log")
    axis.set_xlabel(chart.x_label, fontsize=9)
    axis.set_ylabel(chart.y_label, fontsize=9)


def _scatter(axis: Axes, chart: ScatterChart, names: list[str]) -> None:
    for cloud in chart.clouds:
        axis.scatter(cloud.x, cloud.y, s=6, alpha=0.5, color=color(cloud.run), label=names[cloud.run])
    x = np.concatenate([cloud.x for cloud in chart.clouds])
    axis.plot([x.min(), x.max()], [x.min(), x.max()], color=_MUTED, linestyle="dashed", label="D = bound")
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel(chart.x_label, fontsize=9)
    axis.set_ylabel(chart.y_label, fontsize=9)


def _histogram(axis: Axes, chart: HistogramChart, names: list[str]) -> None:
    """First, middle and newest step: a file has no slider."""
    for frame in chart.frames:
        newest = len(frame.steps) - 1
        for at, style in {0: "dotted", newest // 2: "dashed", newest: "solid"}.items():
            label = f"{names[frame.run]} · step {frame.steps[at]:,}"
            axis.stairs(frame.shares[at], frame.edges, color=color(frame.run), linestyle=style, label=label)
    axis.set_yscale("log")
    if chart.log_x:
        axis.set_xscale("log")
    axis.set_xlabel(chart.x_label, fontsize=9)
    axis.set_ylabel("share", fontsize=9)


def _timeline(axis: Axes, chart: TimelineChart, names: list[str]) -> None:
    present = sorted({span.run for span in chart.spans}, reverse=True)
    for span in chart.spans:
        axis.barh(
            present.index(span.run),
            span.end - span.start,
            left=span.start,
            height=0.55,
            color=STATES.get(span.event.state, _MUTED),
        )
    axis.set_yticks(range(len(present)), [names[run] for run in present])
    axis.set_xlabel("optimizer step", fontsize=9)
