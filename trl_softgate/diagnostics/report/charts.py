"""Which figures a report has, and the data of each. What draws them is in `interactive.py` and `static.py`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .reading import HealthEvent, Histograms, Run, Series
from .thinning import Values, keep_extremes, spread, trailing_means

# Points of all curves together: what keeps a page of many runs and scalars small.
_POINTS = 60_000
_POINTS_PER_CURVE = (60, 1000)
# A trailing mean over this share of a run is drawn over a noisy curve.
_SMOOTHED_SHARE = 1 / 30
_SCATTER_POINTS = 1500
_TIMELINE_SPANS = 300
# A histogram whose filled bins span more than this factor is drawn on a logarithmic axis.
_LOG_SPAN = 100
STATES = {"healthy": "#2f9e6e", "warning": "#e0a100", "collapsed": "#d1383d"}


@dataclass(frozen=True)
class Curve:
    """One curve of one run. `faint`: the single values under the trailing mean that stands for them."""

    run: int
    label: str
    x: NDArray[np.float64]
    y: Values
    dash: str = "solid"
    faint: bool = False


@dataclass(frozen=True)
class Cloud:
    """Points of one run."""

    run: int
    x: Values
    y: Values


@dataclass(frozen=True)
class Frames:
    """Histograms of one run: `shares` (len(steps), K) of the counts of each step in the bins `edges` (K + 1,)."""

    run: int
    edges: Values
    steps: list[int]
    shares: Values


@dataclass(frozen=True)
class Span:
    """A stretch of steps in one state of health."""

    run: int
    start: float
    end: float
    event: HealthEvent


@dataclass(frozen=True)
class Chart:
    """A figure: `key` names its files, `title` and `note` stand above it, `section` groups the page."""

    key: str
    section: str
    title: str
    note: str


@dataclass(frozen=True)
class CurveChart(Chart):
    curves: list[Curve]
    y_label: str
    x_label: str = "optimizer step"
    log_y: bool = False

    @property
    def over_steps(self) -> bool:
        return self.x_label == "optimizer step"


@dataclass(frozen=True)
class ScatterChart(Chart):
    """Both axes logarithmic, with the line y = x."""

    clouds: list[Cloud]
    x_label: str
    y_label: str


@dataclass(frozen=True)
class HistogramChart(Chart):
    frames: list[Frames]
    x_label: str
    log_x: bool


@dataclass(frozen=True)
class TimelineChart(Chart):
    spans: list[Span]


TRAINING, RATIOS, GATE, TEACHER, HEALTH, DRIFT, OTHER = (
    "Training",
    "Ratios and clipping",
    "Soft gate",
    "Teacher",
    "Health",
    "Weight drift",
    "All other scalars",
)
SECTIONS = (HEALTH, TRAINING, RATIOS, GATE, TEACHER, DRIFT, OTHER)


@dataclass(frozen=True)
class _Curves:
    """A chart of scalars over steps: for each logged name its label and dash."""

    key: str
    section: str
    title: str
    note: str
    names: dict[str, tuple[str, str]]
    y_label: str
    smooth: bool = True
    log_y: bool = False


def _one(name: str) -> dict[str, tuple[str, str]]:
    return {name: ("", "solid")}


_CURVES = (
    _Curves("reward", TRAINING, "Reward", "Mean over the batch.", _one("reward"), "mean reward"),
    _Curves(
        "completion-length",
        TRAINING,
        "Completion length",
        "Mean over the batch.",
        _one("completions/mean_length"),
        "tokens",
    ),
    _Curves("entropy", TRAINING, "Entropy", "Of the policy, mean over tokens.", _one("entropy"), "nats"),
    _Curves("gradient-norm", TRAINING, "Gradient norm", "Before clipping.", _one("grad_norm"), "norm", log_y=True),
    _Curves(
        "clip-share",
        RATIOS,
        "Share clipped, by the sign of the advantage",
        "A positive advantage is clipped above, a negative one below (GSPO, figure 2).",
        {"clip_ratio/high_mean": ("A > 0", "solid"), "clip_ratio/low_mean": ("A < 0", "dashed")},
        "share of tokens",
    ),
    _Curves(
        "ratio",
        RATIOS,
        "Importance ratio",
        "Smallest, mean and largest of the step.",
        {"ratio/mean": ("mean", "solid"), "ratio/min": ("min", "dotted"), "ratio/max": ("max", "dashed")},
        "ratio",
    ),
    _Curves(
        "gate-weight-positive",
        GATE,
        "Gate weight, A > 0",
        "1 at a ratio of 1; what is left of the gradient of each token.",
        {"gate/weight_pos": ("mean", "solid"), "gate/weight_pos_p05": ("5th percentile", "dashed")},
        "weight",
    ),
    _Curves(
        "gate-weight-negative",
        GATE,
        "Gate weight, A < 0",
        "1 at a ratio of 1; what is left of the gradient of each token.",
        {"gate/weight_neg": ("mean", "solid"), "gate/weight_neg_p05": ("5th percentile", "dashed")},
        "weight",
    ),
    _Curves(
        "gate-gap",
        GATE,
        "Distance of the token gates from the sequence gate",
        "D, mean over completions, and its bound (SAPO).",
        {"gate/gap_mean": ("D", "solid"), "gate/gap_bound": ("bound", "dashed")},
        "distance",
        log_y=True,
    ),
    _Curves(
        "gate-temperature",
        GATE,
        "Temperatures",
        "Chosen from the spread of the log-ratios of the steps before.",
        {"gate/tau_pos": ("A > 0", "solid"), "gate/tau_neg": ("A < 0", "dashed")},
        "tau",
        smooth=False,
    ),
    _Curves(
        "changed-experts",
        RATIOS,
        "Expert choices that changed since the rollout",
        "Share, mean over layers (GSPO, section 5.3).",
        _one("moe/changed_experts"),
        "share",
    ),
    _Curves(
        "teacher-kl", TEACHER, "Student-teacher KL", "Mean over tokens (SAF, figure 4).", _one("distill/kl"), "nats"
    ),
    _Curves(
        "teacher-schedule",
        TEACHER,
        "Teacher schedule",
        "Warm-up scale, anneal coefficient, and their product, the factor on the teacher's term.",
        {
            "distill/multiplier": ("multiplier", "solid"),
            "distill/scale": ("scale", "dashed"),
            "distill/coefficient": ("coefficient", "dotted"),
        },
        "factor",
        smooth=False,
    ),
)
# name -> (key, section, title, note, x label)
_HISTOGRAMS = {
    "ratio/token": ("token-ratio", RATIOS, "Token ratios", "Share of tokens per bin.", "ratio"),
    "ratio/sequence": ("sequence-ratio", RATIOS, "Sequence ratios", "Share of completions per bin.", "ratio"),
    "gate/weight_pos": ("gate-weights-positive", GATE, "Gate weights, A > 0", "Share of tokens per bin.", "weight"),
    "gate/weight_neg": ("gate-weights-negative", GATE, "Gate weights, A < 0", "Share of tokens per bin.", "weight"),
    "distill/opd_abs": (
        "teacher-advantage",
        TEACHER,
        "Size of the teacher's advantage",
        "Share of tokens per bin of |A_opd| (SAF, figure 3).",
        "|A_opd|",
    ),
}
_ROW_VARIANCE = "log_ratio/row_variance"
_EXPERTS_OF_LAYER = re.compile(r"moe/changed_experts/layer_(\d+)")
# field -> (title, label of the axis)
_DRIFT = {
    "relative": ("Relative drift per layer", "|W - W0| / |W0|"),
    "absolute": ("Absolute drift per layer", "|W - W0|"),
    "stable_rank": ("Stable rank of the drift per layer", "stable rank"),
}


def build_charts(runs: Sequence[Run]) -> list[Chart]:
    """The figures for which any run has data, in the order of the page."""
    count = sum(len(run.scalars) for run in runs)
    fewest, most = _POINTS_PER_CURVE
    limit = max(fewest, min(most, _POINTS // max(count, 1)))
    charts: list[Chart] = [*_timeline(runs)]
    for group in _CURVES:
        charts += _scalar_chart(runs, group, limit)
    charts += _row_variance(runs, limit)
    charts += _gap_scatter(runs)
    for name in _HISTOGRAMS:
        charts += _histogram(runs, name)
    charts += _experts_by_layer(runs)
    charts += _drift_charts(runs)
    shown = {name for group in _CURVES for name in group.names} | {_ROW_VARIANCE}
    others = sorted({name for run in runs for name, series in run.scalars.items() if len(series.steps)} - shown)
    others = [name for name in others if not _EXPERTS_OF_LAYER.fullmatch(name)]
    for number, name in enumerate(others, 1):
        key = f"other-{number:03d}-{re.sub(r'[^A-Za-z0-9]+', '-', name).strip('-')[:60]}"
        charts += _scalar_chart(runs, _Curves(key, OTHER, name, "", _one(name), ""), limit)
    return sorted(charts, key=lambda chart: SECTIONS.index(chart.section))


def _scalar_chart(runs: Sequence[Run], group: _Curves, limit: int) -> Iterator[CurveChart]:
    curves, remarks = [], [group.note]
    for index, run in enumerate(runs):
        for name, (label, dash) in group.names.items():
            series = run.scalars.get(name)
            if series is not None:
                curves += _curves(index, label, dash, series, limit, group.smooth)
                remarks += _nonfinite(run, name, series)
    if curves:
        note = " ".join(filter(None, remarks))
        log_y = group.log_y and _positive(curves)
        yield CurveChart(group.key, group.section, group.title, note, curves, group.y_label, log_y=log_y)


def _positive(curves: list[Curve]) -> bool:
    """Whether a logarithmic axis can show all of it."""
    return all(curve.y.min() > 0 for curve in curves)


def _nonfinite(run: Run, name: str, series: Series) -> Iterator[str]:
    if series.nonfinite:
        yield (
            f"{run.name}: {series.nonfinite} values of {name} are not finite, the first at step "
            f"{series.first_nonfinite}."
        )


def _curves(run: int, label: str, dash: str, series: Series, limit: int, smooth: bool) -> Iterator[Curve]:
    """A curve without losing its extremes; a long noisy one faint, with its trailing mean over it."""
    count = len(series.steps)
    if not count:
        return
    width = round(count * _SMOOTHED_SHARE) if smooth else 1
    kept = keep_extremes(series.values, limit)
    x = series.steps.astype(np.float64)
    yield Curve(run, label, x[kept], series.values[kept], dash, faint=width > 2)
    if width > 2:
        at = spread(count, limit // 3)
        yield Curve(run, label, x[at], trailing_means(series.values, width, at), dash)


def _row_variance(runs: Sequence[Run], limit: int) -> Iterator[CurveChart]:
    """Median and largest row of each step; the mean that was logged where single rows were not recorded."""
    curves = []
    for index, run in enumerate(runs):
        rows = run.rows
        known = np.isfinite(rows.variance) if rows is not None else np.zeros(0, dtype=bool)
        if rows is not None and known.any():
            steps, variance = rows.steps[known], rows.variance[known]
            order = np.lexsort((variance, steps))
            steps, variance = steps[order], variance[order]
            begins = np.flatnonzero(np.append(True, steps[1:] != steps[:-1]))
            ends = np.append(begins[1:], len(steps))
            for label, dash, at in (
                ("median row", "solid", (begins + ends - 1) // 2),
                ("largest row", "dashed", ends - 1),
            ):
                curves += _curves(index, label, dash, Series(steps[at], variance[at]), limit, smooth=True)
        elif _ROW_VARIANCE in run.scalars:
            curves += _curves(index, "mean", "solid", run.scalars[_ROW_VARIANCE], limit, smooth=True)
    if curves:
        note = "Variance over the tokens of one completion (SAPO, figure 2)."
        yield CurveChart(
            "row-variance",
            RATIOS,
            "Variance of the log-ratio per row",
            note,
            curves,
            "variance",
            log_y=_positive(curves),
        )


def _gap_scatter(runs: Sequence[Run]) -> Iterator[ScatterChart]:
    clouds = []
    for index, run in enumerate(runs):
        rows = run.rows
        if rows is None:
            continue
        with np.errstate(invalid="ignore"):
            usable = (rows.gap > 0) & (rows.bound > 0) & np.isfinite(rows.gap) & np.isfinite(rows.bound)
        gap, bound = rows.gap[usable], rows.bound[usable]
        if len(gap):
            # Sorted by how much of the bound is used, so that the row nearest to it, or beyond, is kept.
            order = np.argsort(gap / bound)
            kept = order[keep_extremes(gap[order], _SCATTER_POINTS)]
            clouds.append(Cloud(index, bound[kept], gap[kept]))
    if clouds:
        note = "A completion each; below the line the bound holds (SAPO, figure 3)."
        title = "Distance of the gates against its bound"
        yield ScatterChart("gate-gap-bound", GATE, title, note, clouds, "bound: tau^2 / 4 x variance", "D")


def _histogram(runs: Sequence[Run], name: str) -> Iterator[HistogramChart]:
    found = {index: run.histograms[name] for index, run in enumerate(runs) if name in run.histograms}
    frames = [frame for index, histograms in found.items() for frame in _frames(index, histograms)]
    if frames:
        key, section, title, note, x_label = _HISTOGRAMS[name]
        low, high = min(frame.edges[0] for frame in frames), max(frame.edges[-1] for frame in frames)
        log_x = bool(low > 0 and high / low > _LOG_SPAN)
        yield HistogramChart(key, section, title, note, frames, x_label, log_x)


def _frames(run: int, histograms: Histograms) -> Iterator[Frames]:
    """Shares per bin, without the bins at both ends that are empty at every step."""
    filled = np.flatnonzero(histograms.counts.sum(axis=0))
    if len(filled):
        first, last = filled[0], filled[-1] + 1
        edges = _closed(histograms.edges)[first : last + 1]
        totals = np.maximum(histograms.counts.sum(axis=1, keepdims=True), 1)
        yield Frames(run, edges, histograms.steps, (histograms.counts / totals)[:, first:last])


def _closed(edges: Values) -> Values:
    """Open ends become bins as wide as their neighbors; on edges that grow by a factor, wide by that factor."""
    closed = edges.copy()
    inner = edges[1:-1]
    by_factor = len(inner) > 1 and inner[0] > 0 and inner[-1] / inner[0] > _LOG_SPAN
    if len(inner) > 1:
        if not np.isfinite(edges[-1]):
            closed[-1] = inner[-1] ** 2 / inner[-2] if by_factor else 2 * inner[-1] - inner[-2]
        if not np.isfinite(edges[0]) or (by_factor and edges[0] <= 0):
            closed[0] = inner[0] ** 2 / inner[1] if by_factor else 2 * inner[0] - inner[1]
    elif not np.isfinite(edges).all():
        center = inner[0] if len(inner) else 0.0
        closed[0], closed[-1] = center - 1, center + 1
    return closed


def _timeline(runs: Sequence[Run]) -> Iterator[TimelineChart]:
    spans = [span for index, run in enumerate(runs) for span in health_spans(index, run)]
    if spans:
        note = "Green: healthy, yellow: warning, red: collapsed. Point at a stretch for the evidence."
        yield TimelineChart("health", HEALTH, "Health", note, spans)


def health_spans(index: int, run: Run) -> list[Span]:
    """Stretches of one state each; of a run that flickers, the worst state of each of many short stretches."""
    if not run.health:
        return []
    spans: list[Span] = []
    for event in run.health:
        if not spans or spans[-1].event.state != event.state:
            spans.append(Span(index, event.step, event.step, event))
    if len(spans) > _TIMELINE_SPANS:
        severity = {state: rank for rank, state in enumerate(STATES)}
        buckets = np.array_split(np.arange(len(spans)), _TIMELINE_SPANS)
        worst = [max((spans[i] for i in bucket), key=lambda s: severity.get(s.event.state, 0)) for bucket in buckets]
        spans = [Span(index, spans[bucket[0]].start, 0, w.event) for bucket, w in zip(buckets, worst, strict=True)]
    ends = [*(span.start for span in spans[1:]), run.last_step + 1]
    return [Span(index, span.start, stop, span.event) for span, stop in zip(spans, ends, strict=True)]


def _experts_by_layer(runs: Sequence[Run]) -> Iterator[CurveChart]:
    """The mean over the steps of each run: within a rollout the share grows from update to update."""
    curves = []
    for index, run in enumerate(runs):
        found = {
            int(match[1]): np.nanmean(series.values)
            for name, series in run.scalars.items()
            if (match := _EXPERTS_OF_LAYER.fullmatch(name)) and np.isfinite(series.values).any()
        }
        if found:
            layers = sorted(found)
            shares = np.asarray([found[layer] for layer in layers], dtype=np.float64)
            curves.append(Curve(index, "mean over steps", np.asarray(layers, dtype=np.float64), shares))
    if curves:
        title, note = "Changed expert choices per layer", "Share of the choices of the rollout."
        yield CurveChart("changed-experts-layer", RATIOS, title, note, curves, "share", x_label="layer")


def _drift_charts(runs: Sequence[Run]) -> Iterator[CurveChart]:
    """The newest measurement of each run: the mean over the matrices of each layer."""
    for field, (title, y_label) in _DRIFT.items():
        curves = []
        for index, run in enumerate(runs):
            newest = max((entry.step for entry in run.drift), default=0)
            by_layer: dict[int, list[float]] = {}
            for entry in run.drift:
                value = getattr(entry, field)
                if entry.step == newest and entry.layer is not None and np.isfinite(value):
                    by_layer.setdefault(entry.layer, []).append(value)
            if by_layer:
                layers = sorted(by_layer)
                means = np.asarray([np.mean(by_layer[layer]) for layer in layers], dtype=np.float64)
                curves.append(Curve(index, f"step {newest}", np.asarray(layers, dtype=np.float64), means))
        if curves:
            key = f"drift-{field.replace('_', '-')}"
            note = "Mean over the matrices of a layer (SAF, figures 5 to 7)."
            yield CurveChart(key, DRIFT, title, note, curves, y_label, x_label="layer")
