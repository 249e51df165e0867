"""The tables of a run: complete at every moment, and without rows of steps that a resumed run repeats."""

import json
import shutil
from pathlib import Path

import pandas as pd
import pytest

from trl_softgate.diagnostics import record
from trl_softgate.diagnostics.record import RunRecord


def scalars(step: int, count: int = 3) -> list[dict[str, object]]:
    return [{"step": step, "name": f"metric/{i}", "value": step + i / 10} for i in range(count)]


def read(run: Path) -> pd.DataFrame:
    return pd.read_parquet(run / "record" / "scalars").pivot(index="step", columns="name", values="value")


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "_PART_ROWS", 10)


def test_read_back_in_one_line(tmp_path: Path) -> None:
    run = RunRecord(tmp_path, 0)
    for step in range(1, 30):
        run.append("scalars", scalars(step, 3 if step < 20 else 5))  # metrics that appear later
        assert read(tmp_path).index.tolist() == list(range(1, step + 1))
    table = read(tmp_path)
    assert table["metric/2"].to_list()[6] == 7.2
    assert len(table["metric/4"].dropna()) == 10
    assert len(list((tmp_path / "record" / "scalars").iterdir())) > 5


@pytest.mark.parametrize("step", [0, 1, 4, 11, 29])
def test_a_resumed_run_has_no_duplicates(step: int, tmp_path: Path) -> None:
    run = RunRecord(tmp_path, 0)
    for i in range(1, 30):
        run.append("scalars", scalars(i))
    again = RunRecord(tmp_path, step)
    for i in range(step + 1, 35):
        again.append("scalars", scalars(i))
    table = read(tmp_path)
    assert table.index.tolist() == list(range(1, 35))
    assert table["metric/1"].to_dict() == {step: step + 0.1 for step in range(1, 35)}


def test_killed_while_a_part_is_written(tmp_path: Path) -> None:
    run = RunRecord(tmp_path, 0)
    for i in range(1, 6):
        run.append("scalars", scalars(i))
    folder = tmp_path / "record" / "scalars"
    part = max(folder.iterdir())
    (folder / f".{part.name}").write_bytes(part.read_bytes()[:50])
    assert read(tmp_path).index.tolist() == [1, 2, 3, 4, 5]
    RunRecord(tmp_path, 5).append("scalars", scalars(6))
    assert read(tmp_path).index.tolist() == [1, 2, 3, 4, 5, 6]


def test_all_tables(tmp_path: Path) -> None:
    run = RunRecord(tmp_path, 0)
    run.append("histograms", [{"step": 1, "name": "ratio/token", "edges": [0.0, 1.0, 2.0], "counts": [3, 4]}])
    run.append("rows", [{"step": 1, "row": 0, "advantage": 1.0, "length": 3.0}])
    run.append("tokens", [])
    assert pd.read_parquet(tmp_path / "record" / "histograms").counts[0].tolist() == [3, 4]
    assert pd.read_parquet(tmp_path / "record" / "rows").gate_gap.isna().all()
    assert not (tmp_path / "record" / "tokens").exists()
    run.describe({"method": "SAPO", "config": {"path": Path("x")}})
    assert json.loads((tmp_path / "record" / "run.json").read_text())["config"] == {"path": "x"}


def test_a_foreign_part_is_named(tmp_path: Path) -> None:
    RunRecord(tmp_path, 0).append("scalars", scalars(1))
    part = next((tmp_path / "record" / "scalars").iterdir())
    part.write_text("not parquet")
    with pytest.raises(
        ValueError, match="is not a part of a run's record .*: move .*record away, or set `record=False`"
    ):
        RunRecord(tmp_path, 3)
    shutil.copy(__file__, part.with_name("notes.parquet"))  # a name that is none of ours is left alone
    part.unlink()
    RunRecord(tmp_path, 3)
