"""One HTML file about one or several runs, for `trl-softgate report`. Needs the extra `report`."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path


class ReportError(Exception):
    """No report can be made; the message says why."""


def write_report(folders: Sequence[Path], output: Path, figures: Path | None = None) -> list[str]:
    """Write the report of the runs in `folders` as one self-contained HTML file.

    Args:
        folders: One per run: with the recorder's `record/`, or as TRL leaves it. A run may still be going on.
        output: The file; its folder is made when missing.
        figures: Where PNG and SVG of each figure go; None: nowhere.

    Returns:
        One sentence about each kind of file that could not be read; the report shows them too.

    Raises:
        ReportError: A folder is missing or holds nothing usable, or the extra `report` is not installed.
        OSError: `output` or `figures` cannot be written.
    """
    for module in ("bokeh", "jinja2", "matplotlib"):
        if importlib.util.find_spec(module) is None:
            raise ReportError(f"the report needs {module}, which is missing: pip install 'trl-softgate[report]'")
    from .charts import build_charts
    from .page import render_page
    from .reading import read_runs

    runs = read_runs(folders)
    charts = build_charts(runs)
    page = render_page(runs, charts)
    output.parent.mkdir(parents=True, exist_ok=True)
    # Written beside and moved: whoever reloads the report of a running job never meets half a file.
    unfinished = output.with_name(f".{output.name}.{os.getpid()}")
    unfinished.write_text(page, encoding="utf-8", newline="\n")
    unfinished.replace(output)
    if figures is not None:
        from .static import save

        save(charts, runs, figures)
    return [warning for run in runs for warning in run.warnings]
