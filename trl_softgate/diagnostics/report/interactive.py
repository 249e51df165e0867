"""The charts as Bokeh figures: zoom and crosshair linked over steps, hover, a legend that hides."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from bokeh.core.properties import value
from bokeh.document import Document
from bokeh.embed import components
from bokeh.model import Model
from bokeh.models import (
    BasicTickFormatter,
    ColumnDataSource,
    CrosshairTool,
    GlyphRenderer,
    HBar,
    HoverTool,
    Legend,
    LegendItem,
    Line,
    Quad,
    Range1d,
    Scatter,
    Span,
)
from bokeh.models.glyph import Glyph
from bokeh.plotting import figure
from bokeh.resources import Resources

from .charts import STATES, Chart, CurveChart, HistogramChart, ScatterChart, TimelineChart
from .reading import Run

# Colors that can be told apart by most eyes, on white and on near-black.
COLORS = ("#3b82c4", "#e07b1a", "#2f9e6e", "#c94f7c", "#8b6fd0", "#b08a00", "#4aa3a8", "#a0522d")
_GRAY = "#8a94a0"
_HEIGHT = 260
_LEGEND_LINE = 17
_LEGEND_CHARACTERS = 80
# A tooltip is one line; the table below the timeline has the rest.
_EVIDENCE = 120


def color(run: int) -> str:
    return COLORS[run % len(COLORS)]


def curve_colors(chart: CurveChart, runs: int) -> list[str]:
    """A color for each curve: that of its run, or, in the report of one run, one for each label."""
    labels = list(dict.fromkeys(curve.label for curve in chart.curves))
    return [color(curve.run if runs > 1 else labels.index(curve.label)) for curve in chart.curves]


def bokeh_script() -> str:
    """BokehJS itself, without widgets: the page brings its own controls."""
    return "\n".join(Resources(mode="inline", components=["bokeh"]).js_raw)


def draw(charts: Sequence[Chart], runs: Sequence[Run]) -> tuple[str, dict[str, str], dict[str, Any]]:
    """Draw all charts into one Bokeh document.

    Returns:
        The script that renders the figures, the HTML element of each chart by its key, and the data of `page.js`:
        `frames`, the histograms of all steps, and `told`, the curves that tell their value at the pointer, both by
        the key of the chart.
    """
    canvas = _Canvas(charts, runs)
    figures: dict[str, Model] = {chart.key: canvas.figure(chart) for chart in charts}
    script, elements = "", {}
    if figures:
        document = Document()
        # Added in one go: after each addition Bokeh looks through the whole document again.
        with document.models.freeze():
            for plot in figures.values():
                document.add_root(plot)
        script, elements = components(figures, wrap_script=False)
    return script, dict(elements), {"frames": canvas.frames, "told": canvas.told}


class _Canvas:
    """What the figures of one page share: the range of steps, the crosshair, the names of the runs."""

    def __init__(self, charts: Sequence[Chart], runs: Sequence[Run]) -> None:
        self.names = [_plain(run.name) for run in runs]
        # What `page.js` needs: the histograms of all steps, and which curves tell their value at the pointer.
        self.frames: dict[str, Any] = {}
        self.told: dict[str, list[str]] = {}
        curves = [
            curve for chart in charts if isinstance(chart, CurveChart) and chart.over_steps for curve in chart.curves
        ]
        spans = [span for chart in charts if isinstance(chart, TimelineChart) for span in chart.spans]
        low = min([curve.x[0] for curve in curves] + [span.start for span in spans], default=0.0)
        high = max([curve.x[-1] for curve in curves] + [span.end for span in spans], default=1.0)
        margin = 0.02 * (high - low) or 1.0
        self.steps = Range1d(start=float(low - margin), end=float(high + margin))
        self.crosshair = Span(dimension="height", line_color=_GRAY, line_dash="dotted")

    def figure(self, chart: Chart) -> figure:
        if isinstance(chart, CurveChart):
            return self._curves(chart)
        if isinstance(chart, ScatterChart):
            return self._scatter(chart)
        if isinstance(chart, HistogramChart):
            return self._histogram(chart)
        assert isinstance(chart, TimelineChart)
        return self._timeline(chart)

    def _new(self, chart: Chart, x_label: str, y_label: str, *, over_steps: bool = False, **options: Any) -> figure:
        plot = figure(
            height=_HEIGHT,
            sizing_mode="stretch_width",
            tools="pan,box_zoom,wheel_zoom,reset,save",
            active_drag="box_zoom",
            # A wheel that zooms would hold up the scrolling of the page.
            active_scroll=None,
            toolbar_location="right",
            x_axis_label=x_label,
            y_axis_label=y_label,
            output_backend="canvas",
            name=f"figure:{chart.key}",
            **({"x_range": self.steps} if over_steps else {}),
            **options,
        )
        plot.toolbar.logo = None
        plot.toolbar.autohide = True
        for axis in plot.axis:
            axis.axis_label_text_font_style = "normal"
            axis.minor_tick_line_color = None
        if over_steps:
            plot.xaxis.formatter = BasicTickFormatter(use_scientific=False)
            plot.add_tools(CrosshairTool(overlay=self.crosshair))
        return plot

    def _label(self, run: int, label: str) -> str:
        """The run stands before the label where there are several."""
        return " · ".join(filter(None, [self.names[run] if len(self.names) > 1 or not label else "", label]))

    def _finish(self, plot: figure, items: Mapping[str, list[GlyphRenderer]]) -> None:
        """The legend where there is something to tell apart, and axes that follow what it shows."""
        plot.y_range.update(only_visible=True)
        if len(items) == 1:
            return
        columns = max(1, min(len(items), _LEGEND_CHARACTERS // (max(map(len, items)) + 6)))
        # The legend has room of its own, so that the axes of all figures are of one height.
        plot.height = _HEIGHT + _LEGEND_LINE * math.ceil(len(items) / columns)
        legend = Legend(
            items=[LegendItem(label=value(label), renderers=renderers) for label, renderers in items.items()],
            orientation="horizontal",
            location="left",
            ncols=columns,
            spacing=10,
            click_policy="hide",
            label_text_font_size="11px",
            border_line_color=None,
            background_fill_alpha=0,
            margin=2,
            glyph_height=12,
        )
        legend.update(padding=2)
        plot.add_layout(legend, "below")

    def _curves(self, chart: CurveChart) -> figure:
        y_axis = "log" if chart.log_y else "linear"
        plot = self._new(chart, chart.x_label, chart.y_label, over_steps=chart.over_steps, y_axis_type=y_axis)
        items: dict[str, list[Any]] = {}
        told: list[GlyphRenderer] = []
        smoothed = {(curve.run, curve.label) for curve in chart.curves if curve.faint}
        for curve, paint in zip(chart.curves, curve_colors(chart, len(self.names)), strict=True):
            label = self._label(curve.run, curve.label)
            if len(curve.x) == 1:
                glyph = Scatter(x="x", y="y", size=6, fill_color=paint, line_color=paint)
            else:
                glyph = Line(
                    x="x",
                    y="y",
                    line_color=paint,
                    line_dash="solid" if curve.faint else curve.dash,
                    line_width=1 if curve.faint else 2,
                    line_alpha=0.3 if curve.faint else 1,
                )
            renderer = _add(plot, {"x": _compact(curve.x), "y": curve.y}, glyph, label, curve.run)
            items.setdefault(label, []).append(renderer)
            # Told to the pointer: the single values, not their mean.
            if curve.faint or (curve.run, curve.label) not in smoothed:
                told.append(renderer)
        self._finish(plot, items)
        if chart.over_steps:
            self.told[chart.key] = [renderer.id for renderer in told]
        else:
            _hover(plot, told, [(chart.x_label, "@x{0,0}"), ("value", "@y{%.5g}")])
        return plot

    def _scatter(self, chart: ScatterChart) -> figure:
        plot = self._new(chart, chart.x_label, chart.y_label, x_axis_type="log", y_axis_type="log")
        items: dict[str, list[Any]] = {}
        for cloud in chart.clouds:
            label = self.names[cloud.run]
            paint = {"fill_color": color(cloud.run), "fill_alpha": 0.5, "line_color": None}
            items[label] = [
                _add(plot, {"x": cloud.x, "y": cloud.y}, Scatter(x="x", y="y", size=5, **paint), label, cloud.run)
            ]
        hovered = [renderer for renderers in items.values() for renderer in renderers]
        bounds = np.concatenate([cloud.x for cloud in chart.clouds])
        ends = np.array([bounds.min(), bounds.max()])
        diagonal = Line(x="x", y="y", line_color=_GRAY, line_dash="dashed", line_width=1.5)
        items["D = bound"] = [plot.add_glyph(ColumnDataSource({"x": ends, "y": ends}), diagonal)]
        self._finish(plot, items)
        _hover(plot, hovered, [("bound", "@x{%.4g}"), ("D", "@y{%.4g}")])
        return plot

    def _histogram(self, chart: HistogramChart) -> figure:
        """The newest step of each run. `page.js` swaps in the others when the slider moves."""
        plot = self._new(
            chart, chart.x_label, "share", x_axis_type="log" if chart.log_x else "linear", y_axis_type="log"
        )
        # A logarithmic axis has no zero: an empty bin stands half below the smallest share.
        floor = min(float(frame.shares[frame.shares > 0].min()) for frame in chart.frames) / 2
        items: dict[str, list[Any]] = {}
        hovered, series = [], {}
        for frame in chart.frames:
            label, name = self.names[frame.run], f"frames:{chart.key}:{frame.run}"
            data = {"left": frame.edges[:-1], "right": frame.edges[1:], "share": frame.shares[-1]}
            quad = Quad(
                left="left",
                right="right",
                top="share",
                bottom=value(floor),
                fill_color=color(frame.run),
                fill_alpha=0.25,
                line_color=color(frame.run),
            )
            quads = _add(plot, data, quad, label, frame.run)
            quads.data_source.name = name
            items[label] = [quads]
            hovered.append(quads)
            shares = [[float(f"{share:.4g}") for share in row] for row in frame.shares]
            series[name] = {"steps": frame.steps, "shares": shares}
        self.frames[chart.key] = {
            "steps": sorted({step for frame in chart.frames for step in frame.steps}),
            "series": series,
        }
        self._finish(plot, items)
        _hover(plot, hovered, [("from", "@left{%.5g}"), ("to", "@right{%.5g}"), ("share", "@share{%.4g}")])
        plot.y_range.update(start=floor)
        return plot

    def _timeline(self, chart: TimelineChart) -> figure:
        present = sorted({span.run for span in chart.spans}, reverse=True)
        plot = self._new(chart, "optimizer step", "", over_steps=True, y_range=[self.names[run] for run in present])
        plot.height = 90 + 34 * len(present)
        bars = []
        for run in present:
            spans = [span for span in chart.spans if span.run == run]
            data = {
                "start": [float(span.start) for span in spans],
                "end": [float(span.end) for span in spans],
                "run": [self.names[run]] * len(spans),
                "color": [STATES.get(span.event.state, _GRAY) for span in spans],
                "state": [span.event.state for span in spans],
                "evidence": [span.event.evidence[:_EVIDENCE] for span in spans],
            }
            bar = HBar(y="run", left="start", right="end", height=0.55, fill_color="color", line_color=None)
            bars.append(_add(plot, data, bar, self.names[run], run))
        _hover(plot, bars, [("from step", "@start{0,0}"), ("state", "@state"), ("evidence", "@evidence")])
        plot.ygrid.grid_line_color = None
        return plot


def _hover(plot: figure, renderers: list[GlyphRenderer], tips: list[tuple[str, str]]) -> None:
    formats: dict[str, Any] = {text.split("{")[0]: "printf" for _, text in tips if "{%" in text}
    plot.add_tools(HoverTool(tooltips=[("", "$name"), *tips], renderers=[*renderers], formatters=formats))


def _add(plot: figure, data: dict[str, Any], glyph: Glyph, name: str, run: int) -> GlyphRenderer:
    """A glyph that the tooltip names, and that `page.js` finds by its run.

    Not through `plot.line` and its like: they add glyphs for selections, which would double the page and its time.
    """
    return plot.add_glyph(ColumnDataSource(data), glyph, name=name, tags=[f"run:{run}"])


def _compact(steps: np.ndarray) -> np.ndarray:
    """Whole steps take half the room."""
    return steps.astype(np.int32) if steps[-1] < 2**31 else steps


def _plain(name: str) -> str:
    """Bokeh sets text between double dollars as mathematics, for which it would fetch a library."""
    return name.replace("$$", "$ $")
