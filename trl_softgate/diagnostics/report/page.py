"""The HTML around the figures: one file, without network, in which no text of a run can become code."""

from __future__ import annotations

import base64
import datetime
import hashlib
import json
from collections.abc import Mapping, Sequence
from importlib import resources
from itertools import groupby
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ... import __version__
from .charts import SECTIONS, STATES, Chart, health_spans
from .interactive import bokeh_script, color, draw
from .reading import Run, Sample
from .thinning import Values

_PACKAGE = __name__.rpartition(".")[0]
_TEXT_LIMIT = 4000
_VALUE_LIMIT = 400
_EVENTS_PER_RUN = 60
_KINDS = ("most negative", "neutral", "most positive")
_SUMMARY = {
    "reward": "reward",
    "completions/mean_length": "completion length",
    "entropy": "entropy",
    "grad_norm": "gradient norm",
    "distill/kl": "student-teacher KL",
}


def render_page(runs: Sequence[Run], charts: Sequence[Chart]) -> str:
    """The report of `runs` with `charts`, as HTML."""
    figures_script, elements, data = draw(charts, runs)
    scripts = [bokeh_script(), figures_script, _asset("page.js")]
    environment = Environment(
        loader=PackageLoader(_PACKAGE, ""), autoescape=True, trim_blocks=True, undefined=StrictUndefined
    )
    sections = [(name, [chart for chart in charts if chart.section == name]) for name in SECTIONS]
    return environment.get_template("page.html").render(
        policy=_policy(scripts),
        style=Markup(_asset("page.css")),
        scripts=[Markup(script) for script in scripts],
        data=_json(data),
        runs=[_describe(index, run) for index, run in enumerate(runs)],
        warnings=[warning for run in runs for warning in run.warnings],
        summary=_summary(runs),
        sections=[(name, members) for name, members in sections if members],
        elements={key: Markup(element) for key, element in elements.items()},
        frames=data["frames"],
        told=data["told"],
        settings=_comparison([_flat(run.config) for run in runs]),
        versions=_comparison([run.versions for run in runs]),
        state_colors=STATES,
        written=datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        program=__version__,
    )


def _asset(name: str) -> str:
    return (resources.files(_PACKAGE) / name).read_text("utf-8")


def _policy(scripts: Sequence[str]) -> str:
    """A policy under which these scripts alone run: not even text that got past the escaping could."""
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    # Bokeh styles its elements inline and draws its icons from data: addresses.
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


def _json(value: Any) -> Markup:
    """JSON that may stand inside a script element: nothing in it looks like a tag."""
    return Markup(json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"))


def _describe(index: int, run: Run) -> dict[str, Any]:
    return {
        "name": run.name,
        "color": color(index),
        "folder": str(run.folder),
        "method": run.method,
        "started": run.started,
        "last_step": run.last_step,
        "events": _events(index, run),
        "tokens": _token_tables(run),
        "samples": [
            (step, [_sample(sample) for sample in samples])
            for step, samples in groupby(run.samples, key=lambda sample: sample.step)
        ],
    }


def _events(index: int, run: Run) -> list[dict[str, Any]]:
    """The newest stretches of warning or collapse."""
    unhealthy = [span for span in health_spans(index, run) if span.event.state != "healthy"]
    return [
        {
            "steps": f"{int(span.start):,}-{int(span.end) - 1:,}"
            if span.end - span.start > 1
            else f"{int(span.start):,}",
            "state": span.event.state,
            "evidence": _cut(span.event.evidence, _VALUE_LIMIT),
            "action": _cut(span.event.action or "", _VALUE_LIMIT),
        }
        for span in unhealthy[-_EVENTS_PER_RUN:]
    ]


def _token_tables(run: Run) -> list[tuple[int, list[dict[str, Any]]]]:
    """For each step, newest first, a table for each of the recorded rows, as in appendix D of the SAF paper."""
    steps = []
    for step, tokens in groupby(run.tokens, key=lambda token: token["step"]):
        tables: dict[tuple[str, int], list[dict[str, Any]]] = {}
        for token in tokens:
            tables.setdefault((token["kind"], token["row"]), []).append(token)
        ranked = sorted(tables, key=lambda table: _KINDS.index(table[0]) if table[0] in _KINDS else len(_KINDS))
        steps.append((step, [_token_table(*table, tables[table]) for table in ranked]))
    return steps


def _token_table(kind: str, row: int, tokens: list[dict[str, Any]]) -> dict[str, Any]:
    largest = max(abs(token["value"]) for token in tokens) or 1.0
    rows = [
        {
            "position": token["position"],
            "text": _cut(_visible(token["text"]), 60),
            "value": f"{token['value']:+.3f}",
            "width": round(100 * abs(token["value"]) / largest),
            "sign": "negative" if token["value"] < 0 else "positive",
        }
        for token in tokens
    ]
    return {"kind": kind, "row": row, "advantage": f"{tokens[0]['advantage']:+.3f}", "tokens": rows}


def _visible(text: str) -> str:
    """White space of a token made visible."""
    return text.replace(" ", "·").replace("\n", "\\n").replace("\t", "\\t") or "(empty)"


def _sample(sample: Sample) -> dict[str, Any]:
    return {
        "prompt": _cut(sample.prompt, _TEXT_LIMIT),
        "completion": _cut(sample.completion, _TEXT_LIMIT),
        "advantage": None if sample.advantage is None else f"{sample.advantage:+.3f}",
        "extra": {name: _cut(value, _VALUE_LIMIT) for name, value in sample.extra.items()},
    }


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]} ... ({len(text) - limit:,} more characters)"


def _summary(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """For each scalar of `_SUMMARY` that any run has: its mean over the first and over the last tenth of the run."""
    lines = []
    for name, label in _SUMMARY.items():
        cells = [_ends(run.scalars[name].values) if name in run.scalars else "" for run in runs]
        if any(cells):
            lines.append((label, cells))
    return lines


def _ends(values: Values) -> str:
    tenth = max(1, len(values) // 10)
    return f"{values[:tenth].mean():.4g} → {values[-tenth:].mean():.4g}" if len(values) else ""


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested settings under dotted names, values as JSON."""
    flat = {}
    for name, value in config.items():
        if isinstance(value, dict) and value:
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = _cut(json.dumps(value, ensure_ascii=False), _VALUE_LIMIT)
    return flat


def _comparison(columns: Sequence[Mapping[str, str]]) -> list[dict[str, Any]]:
    """A line for each name, with its value in each run (None: not recorded) and whether the values differ.

    A run that recorded nothing at all differs from no other.
    """
    recorded = [column for column in columns if column]
    names = sorted({name for column in recorded for name in column})
    return [
        {
            "name": name,
            "values": [column.get(name) for column in columns],
            "differs": len({column.get(name) for column in recorded}) > 1,
        }
        for name in names
    ]
