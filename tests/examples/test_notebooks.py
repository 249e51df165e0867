"""The notebooks run from start to end, and what they show is what was kept of a run on no machine in particular.

Here they train a weaker model for a few steps; `make notebooks` runs them as they are.
"""

import dataclasses
import itertools
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest

from examples.run_notebooks import execute, notebooks
from trl_softgate.tasks import cold_start

PATHS = notebooks()


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables of a kernel that finds a weaker model in its cache, and runs for a few steps."""
    folder = tmp_path_factory.mktemp("cache")
    # right often enough that some groups of completions differ in their reward
    recipe = dataclasses.replace(cold_start.STUDENT, stop_accuracy=0.02)
    cold_start.load_or_build(recipe, 0, cache_dir=folder)
    cold_start.cache_entry(recipe, 0, folder).rename(cold_start.cache_entry(cold_start.STUDENT, 0, folder))
    return {"TRL_SOFTGATE_CACHE": str(folder), "NOTEBOOK_STEPS": "12", "NOTEBOOK_PROBLEMS": "8"}


def code(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def figures(notebook: Any) -> int:
    outputs = [output for cell in code(notebook) for output in cell.outputs]
    return sum("image/png" in output.get("data", {}) for output in outputs)


def test_there_are_five() -> None:
    assert [path.name[:2] for path in PATHS] == ["01", "02", "03", "04", "05"]


def kinds(cell: Any) -> list[tuple[str, str | None]]:
    """What a cell gave, in order; two prints arrive as one piece of text or as two."""
    return [kind for kind, _ in itertools.groupby((output.output_type, output.get("name")) for output in cell.outputs)]


# the later ones train for a minute each
QUICK = [pytest.param(path, marks=[pytest.mark.slow] if path.stem > "03" else [], id=path.stem) for path in PATHS]


@pytest.mark.parametrize("path", QUICK)
def test_runs_from_start_to_end(path: Path, quick: dict[str, str], tmp_path: Path) -> None:
    kept, run = nbformat.read(path, as_version=4), execute(path, tmp_path, quick)
    assert [cell.execution_count for cell in code(run)] == list(range(1, len(code(run)) + 1))
    assert figures(run) == figures(kept) > 0
    # nothing was printed that the kept notebook would not show
    assert [kinds(cell) for cell in code(run)] == [kinds(cell) for cell in code(kept)]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_what_is_kept(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert path.stat().st_size < 300_000
    assert [cell.execution_count for cell in code(notebook)] == list(range(1, len(code(notebook)) + 1))
    text = re.sub(r'"image/png": "[^"]*"', "", path.read_text())
    assert not re.search(r"(?<![\w.])/(work|opt|home|root|tmp|mnt|usr)/", text)
    assert not re.search(r"\bWARNING\b|Warning:|<progress|train_runtime", text)
    assert all(not cell.metadata for cell in notebook.cells)
    assert all(output.output_type != "error" for cell in code(notebook) for output in cell.outputs)
