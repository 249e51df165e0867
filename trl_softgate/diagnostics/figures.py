"""Figures of a training run. Needs matplotlib, the extra `plots`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INK = "#1f2933"
_MUTED = "#7b8794"
_GRID = "#e4e7eb"


@dataclass(frozen=True)
class Panel:
    """One row of the figure: the logged metric `key`, its `label`, and how it is drawn."""

    key: str
    label: str
    color: str
    smooth: bool = True
    fill: bool = False


_REWARD = Panel("reward", "mean reward", "#2563a8")
_KL = Panel("distill/kl", "student-teacher KL", "#c2571a")
_MULTIPLIER = Panel("distill/multiplier", "fusion multiplier", "#2f855a", smooth=False, fill=True)
_ENTROPY = Panel("entropy", "entropy", "#6b46c1")


def training_figure(
    history: Sequence[Mapping[str, float]],
    path: Path,
    *,
    title: str,
    subtitle: str = "",
    accuracy: Mapping[str, float] | None = None,
    average_over: int = 15,
) -> Path:
    """Draw reward, student-teacher KL and fusion multiplier over optimizer steps, one panel each, and save a PNG.

    A run without a teacher logs neither KL nor multiplier: its figure shows reward and entropy, and says so.

    Args:
        history: Logged metrics in order, each with a `step`, as in `trainer.state.log_history`. An entry without a
            panel's metric is left out of that panel.
        path: Where the PNG goes; the folder must exist.
        title: First line.
        subtitle: Second line, smaller.
        accuracy: Held-out accuracies in [0, 1] for the reward panel: `"before"` and `"after"` are dots at the ends of
            the run, `"teacher"` is a dashed line. The reward must be an accuracy itself to share the axis.
        average_over: Width in steps of the trailing mean drawn over each noisy curve.

    Returns:
        `path`.

    Raises:
        ValueError: If `history` has no reward.
    """
    # The object interface, not pyplot: no global state and no display.
    from matplotlib.figure import Figure

    if not any(_REWARD.key in entry for entry in history):
        raise ValueError("history holds no entry with a reward: pass trainer.state.log_history of a trained run.")
    has_teacher = any(_KL.key in entry for entry in history)
    panels = [_REWARD, _KL, _MULTIPLIER] if has_teacher else [_REWARD, _ENTROPY]
    ratios = [1.7] + [1.0] * (len(panels) - 1)
    figure = Figure(figsize=(8, 1.8 * sum(ratios) + 0.6), dpi=150, layout="constrained")
    axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False, height_ratios=ratios)[:, 0]
    for axis, panel in zip(axes, panels, strict=True):
        _draw_panel(axis, panel, history, average_over)
    if accuracy is not None:
        _mark_accuracy(axes[0], accuracy, int(max(entry["step"] for entry in history)))
    if has_teacher:
        _mark_warmup_end(axes[-1], history)
    axes[0].legend(loc="best", frameon=False, fontsize=8, labelcolor=_INK)
    axes[-1].set_xlabel("optimizer step", color=_INK, fontsize=9)
    axes[0].set_title(title, loc="left", fontsize=13, fontweight="bold", color=_INK, pad=22)
    note = subtitle if has_teacher else " · ".join(filter(None, [subtitle, "no teacher: no KL, no fusion multiplier"]))
    axes[0].text(0, 1.03, note, transform=axes[0].transAxes, fontsize=9, color=_MUTED)
    figure.savefig(path, facecolor="white")
    return path


def _series(history: Sequence[Mapping[str, float]], key: str) -> tuple[list[float], list[float]]:
    points = [(entry["step"], entry[key]) for entry in history if key in entry and math.isfinite(entry[key])]
    return [x for x, _ in points], [y for _, y in points]


def _trailing_mean(values: Sequence[float], width: int) -> list[float]:
    means = []
    for index in range(len(values)):
        window = values[max(0, index + 1 - width) : index + 1]
        means.append(sum(window) / len(window))
    return means


def _draw_panel(axis: Axes, panel: Panel, history: Sequence[Mapping[str, float]], width: int) -> None:
    steps, values = _series(history, panel.key)
    if panel.smooth:
        axis.plot(steps, values, color=panel.color, alpha=0.28, linewidth=0.9)
        mean_label = f"mean of {width} steps" if panel is _REWARD else None
        axis.plot(steps, _trailing_mean(values, width), color=panel.color, linewidth=2, label=mean_label)
    else:
        axis.plot(steps, values, color=panel.color, linewidth=2)
    if panel.fill:
        axis.fill_between(steps, values, color=panel.color, alpha=0.12, linewidth=0)
    axis.set_ylabel(panel.label, color=_INK, fontsize=9)
    axis.set_ylim(bottom=0)
    axis.margins(x=0.015)
    axis.grid(axis="y", color=_GRID, linewidth=0.8)
    axis.set_axisbelow(True)
    axis.tick_params(colors=_MUTED, labelsize=8, length=0)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.spines["bottom"].set_color(_GRID)


def _mark_accuracy(axis: Axes, accuracy: Mapping[str, float], last_step: int) -> None:
    axis.set_ylim(0, 1)
    if "teacher" in accuracy:
        axis.axhline(
            accuracy["teacher"],
            color=_MUTED,
            linestyle=(0, (4, 3)),
            linewidth=1.2,
            label=f"teacher, held-out: {accuracy['teacher']:.0%}",
        )
    ends = [(step, accuracy[name]) for name, step in (("before", 0), ("after", last_step)) if name in accuracy]
    if ends:
        axis.scatter(
            [x for x, _ in ends],
            [y for _, y in ends],
            s=42,
            color=_INK,
            zorder=5,
            clip_on=False,
            label="student, held-out",
        )
    for step, value in ends:
        axis.annotate(
            f"{value:.0%}",
            (step, value),
            xytext=(8, -12) if step == 0 else (-7, -13),
            textcoords="offset points",
            ha="left" if step == 0 else "right",
            fontsize=9,
            fontweight="bold",
            color=_INK,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1},
        )


def _mark_warmup_end(axis: Axes, history: Sequence[Mapping[str, float]]) -> None:
    """A dotted line at the peak of the multiplier, where warm-up hands over to annealing."""
    steps, values = _series(history, _MULTIPLIER.key)
    if not values:
        return
    peak = values.index(max(values))
    if 0 < peak < len(values) - 1:
        axis.axvline(steps[peak], color=_MUTED, linestyle=":", linewidth=1.2)
        axis.annotate(
            "warm-up ends",
            (steps[peak], 0),
            xytext=(5, 5),
            textcoords="offset points",
            fontsize=8,
            color=_MUTED,
        )
