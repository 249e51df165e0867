"""Executes the notebooks of this folder from start to end and keeps what they print and draw (`make notebooks`).

    python examples/run_notebooks.py            # all
    python examples/run_notebooks.py 01 04      # those whose names begin so

What differs from one machine or run to the next is left out: progress bars, warnings, timings.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parent
# one thread makes the numbers repeatable; nothing is looked up on a hub
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "",
    "DS_ACCELERATOR": "cpu",  # it would say on standard output that it looked for another
    "TRL_EXPERIMENTAL_SILENCE": "1",
}


def notebooks() -> list[Path]:
    """The notebooks of this folder, in order."""
    return sorted(FOLDER.glob("[0-9]*.ipynb"))


def execute(path: Path, folder: Path, environment: Mapping[str, str] | None = None, timeout: int = 1200) -> Any:
    """Run a notebook in `folder` and return it with its outputs, without what differs between runs.

    Args:
        path: The notebook; it is not changed.
        folder: Working folder of its kernel.
        environment: Variables that are set for its kernel.
        timeout: Seconds for one cell.

    Raises:
        nbclient.exceptions.CellExecutionError: A cell failed.
    """
    notebook = nbformat.read(path, as_version=4)
    paths = [str(FOLDER.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, **_ENVIRONMENT, "PYTHONPATH": os.pathsep.join(paths), **(environment or {})}
    client = NotebookClient(
        notebook, timeout=timeout, kernel_name="python3", record_timing=False, extra_arguments=["--log-level=ERROR"]
    )
    client.resources["metadata"] = {"path": str(folder)}
    client.execute(env=env)
    _scrub(notebook)
    return notebook


def _scrub(notebook: Any) -> None:
    notebook.metadata["language_info"] = {"name": "python"}
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if _is_kept(output)]


def _is_kept(output: Any) -> bool:
    """Whether an output belongs to the result: no warning, no progress bar."""
    if output.output_type == "stream":
        return output.name == "stdout"
    data = output.get("data", {})
    return "<progress" not in data.get("text/html", "") and "application/vnd.jupyter.widget-view+json" not in data


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="beginning of a file's name; default: all")
    names = parser.parse_args().names
    for path in notebooks():
        if names and not path.name.startswith(tuple(names)):
            continue
        with tempfile.TemporaryDirectory() as folder:
            nbformat.write(execute(path, Path(folder)), path)
        print(path.name, flush=True)


if __name__ == "__main__":
    main()
