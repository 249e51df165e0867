"""What the folder of a run holds: the recorder's `record/`, or what TRL itself leaves there.

Files of a running job may be half-written, and a folder may hold foreign ones. What cannot be read is left out with a
sentence in `Run.warnings`; only a folder with nothing usable is an error.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from ..record import SCHEMAS, record_folder
from . import ReportError
from .thinning import Values, spread

HISTOGRAM_STEPS = 24
TOKEN_STEPS = 5
SAMPLES_PER_STEP = 4

_ROWS = pa.schema([SCHEMAS["rows"].field(name) for name in ("step", "log_ratio_variance", "gate_gap", "gate_bound")])
# The settings of a plain TRL run that its trainer_state.json states.
_STATE_SETTINGS = ("max_steps", "num_train_epochs", "train_batch_size", "logging_steps", "save_steps", "eval_steps")
# What may stop pyarrow or json on a foreign or half-written file.
_UNREADABLE = (pa.ArrowException, OSError, ValueError, TypeError, RecursionError)
_Entry = TypeVar("_Entry")


@dataclass(frozen=True)
class Series:
    """One scalar over steps: ascending `steps`, each once, and finite `values`; what was not finite is counted."""

    steps: NDArray[np.int64]
    values: Values
    nonfinite: int = 0
    first_nonfinite: int | None = None


@dataclass(frozen=True)
class Histograms:
    """Histograms of one quantity: `edges` (K + 1,), and for each of `steps` a row of `counts` (len(steps), K)."""

    edges: Values
    steps: list[int]
    counts: NDArray[np.int64]


@dataclass(frozen=True)
class Rows:
    """Per completion: step, variance of the log-ratio, SAPO's D_i and its bound; NaN where there is none."""

    steps: NDArray[np.int64]
    variance: Values
    gap: Values
    bound: Values


@dataclass(frozen=True)
class HealthEvent:
    step: int
    state: str
    evidence: str
    action: str | None


@dataclass(frozen=True)
class Drift:
    """How far one weight matrix is from where it began. `layer` is None outside the numbered layers."""

    step: int
    name: str
    layer: int | None
    absolute: float
    relative: float
    stable_rank: float


@dataclass(frozen=True)
class Sample:
    """One completion, with the other columns that TRL logged beside it."""

    step: int
    prompt: str
    completion: str
    advantage: float | None
    extra: dict[str, str]


@dataclass
class Run:
    folder: Path
    name: str
    method: str = ""
    started: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    scalars: dict[str, Series] = field(default_factory=dict)
    histograms: dict[str, Histograms] = field(default_factory=dict)
    rows: Rows | None = None
    tokens: list[dict[str, Any]] = field(default_factory=list)
    health: list[HealthEvent] = field(default_factory=list)
    drift: list[Drift] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def last_step(self) -> int:
        """The newest step of any scalar, histogram or health event; 0 without any."""
        ends = [int(series.steps[-1]) for series in self.scalars.values() if len(series.steps)]
        ends += [histograms.steps[-1] for histograms in self.histograms.values()]
        ends += [event.step for event in self.health[-1:]]
        return max(ends, default=0)


def read_runs(folders: Iterable[Path]) -> list[Run]:
    """Read each folder once, in the order given, under names that tell them apart.

    Raises:
        ReportError: a folder is missing or holds nothing usable.
    """
    distinct = list({folder.resolve(): None for folder in folders})
    return [_read_run(folder, name) for folder, name in zip(distinct, _names(distinct), strict=True)]


def _names(folders: list[Path]) -> list[str]:
    """The shortest endings of the paths that differ from each other."""
    for length in range(1, max(len(folder.parts) for folder in folders)):
        names = ["/".join(folder.parts[-length:]) for folder in folders]
        if len(set(names)) == len(names):
            return names
    return [str(folder) for folder in folders]


def _read_run(folder: Path, name: str) -> Run:
    if not folder.is_dir():
        raise ReportError(f"{folder} is not a folder.")
    run = Run(folder, name)
    record = record_folder(folder)
    _read_info(record / "run.json", run)
    run.scalars = _scalars(_read_parts(record / "scalars", SCHEMAS["scalars"], run))
    run.histograms = _read_histograms(record / "histograms", run)
    run.rows = _rows(_read_parts(record / "rows", _ROWS, run))
    run.tokens = _tokens(_read_parts(record / "tokens", SCHEMAS["tokens"], run))
    run.health = sorted(_read_lines(record / "health.jsonl", _health_event, run), key=lambda event: event.step)
    run.drift = _read_lines(record / "drift.jsonl", _drift, run)
    if not run.scalars:
        _read_log_history(run)
    run.samples = _read_samples(folder / "completions", run)
    if not (run.scalars or run.histograms or run.rows or run.tokens or run.health or run.drift or run.samples):
        unread = f" {' '.join(run.warnings)}" if run.warnings else ""
        raise ReportError(
            f"{folder} holds nothing to report: neither record/, nor a trainer_state.json with a log history (in it "
            f"or in a checkpoint-*/), nor completions/*.parquet.{unread}"
        )
    return run


# Parquet


def _parts(folder: Path) -> list[Path]:
    """The parquet files of a folder, part 10 after part 9."""
    return sorted(folder.glob("*.parquet"), key=_natural)


def _natural(path: Path) -> list[tuple[int, str]]:
    return [(int(text) if text.isdecimal() else 0, text) for text in re.split(r"(\d+)", path.name)]


def _read_parts(folder: Path, schema: pa.Schema, run: Run, keep: pc.Expression | None = None) -> pa.Table:
    """The columns of `schema` from all parts of a folder, in order, without the rows that have no step."""
    tables, skipped, parts = [schema.empty_table()], [], _parts(folder)
    for part in parts:
        try:
            tables.append(pq.read_table(part, columns=schema.names, filters=keep).select(schema.names).cast(schema))
        except (*_UNREADABLE, KeyError):
            skipped.append(part.name)
    _warn_skipped(run, skipped, len(parts), f"parts of record/{folder.name}")
    table = pa.concat_tables(tables)
    return table.filter(table["step"].is_valid())


def _warn_skipped(run: Run, skipped: list[str], total: int, what: str) -> None:
    """One sentence about the files that could not be read, if any; each kind of file is asked for once."""
    if skipped:
        names = ", ".join(skipped[:3]) + (", ..." if len(skipped) > 3 else "")
        sentence = f"{run.name}: {len(skipped)} of {total} {what} cannot be read and were left out: {names}."
        if sentence not in run.warnings:
            run.warnings.append(sentence)


def _scalars(table: pa.Table) -> dict[str, Series]:
    # pyarrow's own encoding: millions of Python strings would take seconds.
    names = table["name"].combine_chunks().dictionary_encode()
    codes = names.indices.fill_null(-1).to_numpy(zero_copy_only=False)
    steps, values = table["step"].to_numpy(), table["value"].to_numpy()
    order = np.argsort(codes, kind="stable")
    bounds = np.searchsorted(codes[order], np.arange(len(names.dictionary) + 1))
    series = {}
    for code, name in enumerate(names.dictionary.to_pylist()):
        rows = order[bounds[code] : bounds[code + 1]]
        series[name] = _one_series(steps[rows], values[rows])
    return series


def _one_series(steps: NDArray[np.int64], values: Values) -> Series:
    """Sort by step; where a resumed run logged a step again, the later record counts."""
    order = np.argsort(steps, kind="stable")
    steps, values = steps[order], values[order]
    last = np.append(steps[1:] != steps[:-1], True)
    steps, values = steps[last], values[last]
    finite = np.isfinite(values)
    missing = steps[~finite]
    return Series(steps[finite], values[finite], len(missing), int(missing[0]) if len(missing) else None)


def _read_histograms(folder: Path, run: Run) -> dict[str, Histograms]:
    """At most `HISTOGRAM_STEPS` steps, spread over the run. The counts of all others are never read."""
    histograms = SCHEMAS["histograms"]
    index = _read_parts(folder, pa.schema([histograms.field("step"), histograms.field("name")]), run)
    chosen: set[int] = set()
    for series in _scalars(index.append_column("value", pa.nulls(len(index), pa.float64()).fill_null(0.0))).values():
        chosen.update(series.steps[spread(len(series.steps), HISTOGRAM_STEPS)].tolist())
    if not chosen:
        return {}
    table = _read_parts(folder, histograms, run, keep=pc.field("step").isin(pa.array(sorted(chosen), pa.int64())))
    frames: dict[str, dict[int, tuple[list[float], list[int]]]] = {}
    malformed = 0
    for row in table.to_pylist():
        edges, counts = row["edges"] or [], row["counts"] or []
        ascending = None not in edges and all(low < high for low, high in pairwise(edges))
        if row["name"] is None or not ascending or None in counts or not 0 < len(counts) == len(edges) - 1:
            malformed += 1
        else:
            frames.setdefault(row["name"], {})[row["step"]] = (edges, counts)
    if malformed:
        run.warnings.append(
            f"{run.name}: {malformed} histograms do not have ascending edges, one more than counts; left out."
        )
    return {name: _histograms(by_step) for name, by_step in sorted(frames.items())}


def _histograms(by_step: Mapping[int, tuple[list[float], list[int]]]) -> Histograms:
    """Steps whose bins differ from the newest ones (a run resumed with other settings) are left out."""
    edges = by_step[max(by_step)][0]
    steps = [step for step in sorted(by_step) if by_step[step][0] == edges]
    return Histograms(np.asarray(edges), steps, np.asarray([by_step[step][1] for step in steps], dtype=np.int64))


def _rows(table: pa.Table) -> Rows | None:
    if not len(table):
        return None
    columns = [table[name].to_numpy().astype(np.float64) for name in ("log_ratio_variance", "gate_gap", "gate_bound")]
    return Rows(table["step"].to_numpy(), *columns)


def _tokens(table: pa.Table) -> list[dict[str, Any]]:
    """The tokens of at most `TOKEN_STEPS` steps, newest step first; without those that lack a field."""
    table = table.drop_null()
    steps = np.unique(table["step"].to_numpy())
    chosen = steps[spread(len(steps), TOKEN_STEPS)]
    kept = table.filter(pa.array(np.isin(table["step"].to_numpy(), chosen)))
    return sorted(kept.to_pylist(), key=lambda token: (-token["step"], token["position"]))


def _read_samples(folder: Path, run: Run) -> list[Sample]:
    """Completions of the newest and of the first file that can be read, from high to low advantage in each."""
    files, skipped = _parts(folder), []

    def first_readable(paths: Iterable[Path]) -> Path | None:
        for path in paths:
            try:
                samples[path] = _file_samples(path)
                return path
            except (*_UNREADABLE, KeyError):
                skipped.append(path.name)
        return None

    samples: dict[Path, list[Sample]] = {}
    newest = first_readable(reversed(files))
    if newest is not None:
        first_readable(path for path in files if path not in samples and path != newest)
    _warn_skipped(run, list(dict.fromkeys(skipped)), len(files), "files of completions/")
    return [sample for path in samples for sample in samples[path]]


def _file_samples(path: Path) -> list[Sample]:
    table = pq.read_table(path)
    advantages = (
        pc.cast(table["advantage"], pa.float64()).to_numpy()
        if "advantage" in table.column_names
        else np.zeros(len(table))
    )
    ranked = np.argsort(-np.nan_to_num(advantages), kind="stable")
    chosen = ranked[spread(len(ranked), SAMPLES_PER_STEP)] if len(ranked) else ranked
    return [_sample(row) for row in table.take(pa.array(chosen, pa.int64())).to_pylist()]


def _sample(row: dict[str, Any]) -> Sample:
    step, prompt, completion = row.pop("step"), row.pop("prompt"), row.pop("completion")
    advantage = row.pop("advantage", None)
    extra = {str(name): f"{value:.4g}" if isinstance(value, float) else _text(value) for name, value in row.items()}
    return Sample(int(step), _text(prompt), _text(completion), advantage, extra)


def _text(value: Any) -> str:
    """A text as it is, a conversation as `role: content` lines, anything else as JSON."""
    if isinstance(value, str):
        return value
    if (
        isinstance(value, list)
        and value
        and all(isinstance(m, dict) and "role" in m and "content" in m for m in value)
    ):
        return "\n\n".join(f"{message['role']}: {_text(message['content'])}" for message in value)
    return json.dumps(value, ensure_ascii=False, default=str)


# JSON


def _read_json(path: Path, run: Run) -> Any:
    """The content of a file, or None with a warning; None without one where there is no file."""
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_bytes())
    except _UNREADABLE:
        run.warnings.append(f"{run.name}: {path.relative_to(run.folder)} cannot be read and was left out.")
        return None


def _read_info(path: Path, run: Run) -> None:
    info = _read_json(path, run)
    if not isinstance(info, dict):
        return
    run.method, run.started = str(info.get("method") or ""), str(info.get("started") or "")
    if isinstance(info.get("config"), dict):
        run.config = info["config"]
    if isinstance(info.get("versions"), dict):
        run.versions = {str(name): str(version) for name, version in info["versions"].items()}


def _read_lines(path: Path, parse: Callable[[dict[str, Any]], _Entry], run: Run) -> list[_Entry]:
    """The entries of a jsonl file. A last line without an end is being written now, and no fault."""
    try:
        *lines, unfinished = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    except OSError:
        run.warnings.append(f"{run.name}: record/{path.name} cannot be read and was left out.")
        return []
    entries, malformed = [], 0
    for line in (*lines, unfinished):
        try:
            if line.strip():
                entries.append(parse(json.loads(line)))
        except (*_UNREADABLE, KeyError, AttributeError, OverflowError):
            malformed += line is not unfinished
    if malformed:
        run.warnings.append(f"{run.name}: {malformed} lines of record/{path.name} cannot be read and were left out.")
    return entries


def _health_event(entry: dict[str, Any]) -> HealthEvent:
    action = entry.get("action")
    return HealthEvent(
        int(entry["step"]),
        str(entry["state"]),
        str(entry.get("evidence") or ""),
        None if action is None else str(action),
    )


def _drift(entry: dict[str, Any]) -> Drift:
    layer = str(entry.get("layer"))
    numbers = (float(entry.get(key, math.nan)) for key in ("absolute", "relative", "stable_rank"))
    return Drift(int(entry["step"]), str(entry["name"]), int(layer) if layer.isdecimal() else None, *numbers)


def _read_log_history(run: Run) -> None:
    """Scalars from the newest trainer state, or from the `history.json` of the demo."""

    checkpoints = sorted(run.folder.glob("checkpoint-*"), key=_natural, reverse=True)
    for path in (folder / "trainer_state.json" for folder in (run.folder, *checkpoints)):
        state = _read_json(path, run)
        if isinstance(state, dict) and isinstance(state.get("log_history"), list):
            run.scalars = _history_scalars(state["log_history"])
            run.config = run.config or {name: state[name] for name in _STATE_SETTINGS if name in state}
            return
    history = _read_json(run.folder / "history.json", run)
    if isinstance(history, list):
        run.scalars = _history_scalars(history)


def _history_scalars(history: list[Any]) -> dict[str, Series]:
    points: dict[str, tuple[list[int], list[float]]] = {}
    for entry in history:
        # The last entry of a run holds its timings, no metrics of a step.
        if not isinstance(entry, dict) or not isinstance(entry.get("step"), int) or "train_runtime" in entry:
            continue
        for name, value in entry.items():
            if name not in ("step", "epoch") and isinstance(value, int | float) and not isinstance(value, bool):
                steps, values = points.setdefault(name, ([], []))
                steps.append(entry["step"])
                values.append(float(value))
    return {name: _one_series(np.asarray(steps), np.asarray(values)) for name, (steps, values) in points.items()}
