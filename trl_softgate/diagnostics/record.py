"""Tables of a run, written while it runs: folders of Parquet parts, each complete at every moment.

    pandas.read_parquet("RUN/record/scalars").pivot(index="step", columns="name", values="value")

Scalars are long, one row per number, so that a metric which appears later changes no schema.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

SCHEMAS: dict[str, pa.Schema] = {
    "scalars": pa.schema({"step": pa.int64(), "name": pa.string(), "value": pa.float64()}),
    "histograms": pa.schema(
        {
            "step": pa.int64(),
            "name": pa.string(),
            "edges": pa.list_(pa.float64()),
            "counts": pa.list_(pa.int64()),
        }
    ),
    "rows": pa.schema(
        {
            "step": pa.int64(),
            "row": pa.int64(),
            "advantage": pa.float64(),
            "length": pa.float64(),
            "log_ratio_mean": pa.float64(),
            "log_ratio_variance": pa.float64(),
            "gate_gap": pa.float64(),
            "gate_bound": pa.float64(),
        }
    ),
    "tokens": pa.schema(
        {
            "step": pa.int64(),
            "kind": pa.string(),
            "row": pa.int64(),
            "position": pa.int64(),
            "text": pa.string(),
            "value": pa.float64(),
            "advantage": pa.float64(),
        }
    ),
}
_PART_ROWS = 8192
_FOLDER = "record"


def record_folder(run: str | os.PathLike[str]) -> Path:
    """Where the record of a run is kept."""
    return Path(run) / _FOLDER


def read_lines(file: Path) -> list[dict[str, Any]]:
    """The rows of a file of JSON lines, without the half of one that a killed process may have left; none, if there is
    no file."""
    if not file.is_file():
        return []
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def write_lines(file: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Put `rows` in the place of what the file of JSON lines holds, in one rename."""
    temporary = file.with_name(f".{file.name}")
    temporary.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    os.replace(temporary, file)


class RunRecord:
    """The tables of one run.

    A part is written anew, beside the old one, whenever rows are added, and put in its place by one rename: a process
    killed at any time leaves all rows that were appended before. Readers skip names that begin with a dot.

    Args:
        run: output folder of the run.
        step: last optimizer step of which rows are kept; those of later steps, of a run that went further before it
            was resumed, are dropped.

    Raises:
        ValueError: a part cannot be read.
    """

    def __init__(self, run: str | os.PathLike[str], step: int) -> None:
        self._folder = record_folder(run)
        self._open: dict[str, tuple[Path, pa.Table]] = {}
        for table in SCHEMAS:
            self._rewind(table, step)

    def append(self, table: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add rows to a table; those of one step belong into one call."""
        if not rows:
            return
        schema = SCHEMAS[table]
        new = pa.Table.from_pydict({name: [row.get(name) for row in rows] for name in schema.names}, schema=schema)
        if table in self._open:
            path, old = self._open[table]
            new = pa.concat_tables([old, new])
        else:
            path = self._folder / table / f"{rows[0]['step']:010d}.parquet"
        self._write(path, new)
        if new.num_rows < _PART_ROWS:
            self._open[table] = (path, new)
        else:
            self._open.pop(table, None)

    def describe(self, facts: Mapping[str, Any]) -> None:
        """Write what is known of the run, JSON types, to `run.json`."""
        self._folder.mkdir(parents=True, exist_ok=True)
        temporary = self._folder / ".run.json"
        temporary.write_text(json.dumps(facts, indent=1, default=str) + "\n")
        os.replace(temporary, self._folder / "run.json")

    def _write(self, path: Path, table: pa.Table) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}")
        pq.write_table(table, temporary)
        os.replace(temporary, path)

    def _rewind(self, table: str, step: int) -> None:
        for path in sorted((self._folder / table).glob("[0-9]*.parquet"), reverse=True):
            if int(path.stem) > step:
                path.unlink()
                continue
            try:
                part = pq.read_table(path, schema=SCHEMAS[table])
            except (OSError, pa.ArrowException) as error:
                raise ValueError(
                    f"{path} is not a part of a run's record ({error}): move {self._folder} away, or set "
                    "`record=False`."
                ) from None
            kept = part.filter(pc.field("step") <= step)
            if kept.num_rows < part.num_rows:
                self._write(path, kept)
            if kept.num_rows < _PART_ROWS:
                self._open[table] = (path, kept)
            return
