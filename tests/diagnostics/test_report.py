"""`trl-softgate report`: what it reads, what it keeps of long runs, and that nothing in a run becomes code."""

import base64
import hashlib
import json
import math
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import html5lib
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from trl_softgate.diagnostics.report import ReportError, write_report
from trl_softgate.diagnostics.report.charts import HistogramChart, build_charts, health_spans
from trl_softgate.diagnostics.report.reading import HISTOGRAM_STEPS, Run, read_runs
from trl_softgate.diagnostics.report.thinning import keep_extremes, spread, trailing_means

HOSTILE = (
    "<script>window.hacked = 1</script>",
    '<img src="x" onerror="window.hacked = 2">',
    "</script><script>window.hacked = 3</script>",
    "</pre></title></style><svg onload=window.hacked=4>",
    '"><a href="javascript:window.hacked=5">click</a>',
    "<!--<script>",
    "{{ 7 * 7 }} $$\\href{javascript:window.hacked=6}{x}$$",
)
SCALARS = [
    "reward", "entropy", "grad_norm", "completions/mean_length", "clip_ratio/low_mean", "clip_ratio/high_mean",
    "ratio/min", "ratio/mean", "ratio/max", "gate/weight_pos", "gate/weight_neg", "gate/weight_pos_p05",
    "gate/weight_neg_p05", "gate/gap_mean", "gate/gap_bound", "distill/kl", "distill/scale", "distill/coefficient",
    "distill/multiplier", "loss", "learning_rate", "gate/tau_pos", "gate/tau_neg", "moe/changed_experts",
    "moe/changed_experts/layer_00", "moe/changed_experts/layer_01",
]  # fmt: skip
# Every figure of the page but those of "All other scalars".
FIGURES = {
    "health", "reward", "completion-length", "entropy", "gradient-norm", "clip-share", "ratio", "row-variance",
    "token-ratio", "sequence-ratio", "gate-weight-positive", "gate-weight-negative", "gate-gap", "gate-gap-bound",
    "gate-weights-positive", "gate-weights-negative", "gate-temperature", "changed-experts", "changed-experts-layer",
    "teacher-kl", "teacher-schedule", "teacher-advantage",
    "drift-relative", "drift-absolute", "drift-stable-rank",
}  # fmt: skip
EDGES = {
    "ratio/token": [-math.inf, 0.5, 0.8, 1.0, 1.25, 2.0, math.inf],
    "ratio/sequence": [0.0, 0.9, 1.0, 1.1],
    "gate/weight_pos": [0.0, 0.5, 1.0],
    "gate/weight_neg": [0.0, 0.5, 1.0],
    "distill/opd_abs": [0.0, 1e-4, 1e-2, 1.0, math.inf],
}


def write_parts(folder: Path, rows: list[dict[str, Any]], parts: int = 2) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number, indices in enumerate(np.array_split(np.arange(len(rows)), parts)):
        pq.write_table(pa.Table.from_pylist([rows[i] for i in indices]), folder / f"part-{number}.parquet")


def make_run(folder: Path, *, steps: int = 40, seed: int = 0, text: str = "plain") -> Path:
    """A run with everything that a recorder writes; `text` stands wherever a text may stand."""
    rng, record = np.random.default_rng(seed), folder / "record"
    every = range(1, steps + 1)
    names = [*SCALARS, f"rewards/{text}/mean"]
    write_parts(
        record / "scalars",
        [{"step": step, "name": name, "value": float(rng.random()) + 0.1} for step in every for name in names],
    )
    write_parts(
        record / "histograms",
        [
            {"step": step, "name": name, "edges": edges, "counts": rng.integers(0, 9, len(edges) - 1).tolist()}
            for step in every
            for name, edges in EDGES.items()
        ],
    )
    write_parts(
        record / "rows",
        [
            {
                "step": step,
                "row": row,
                "advantage": 0.0,
                "length": 3.0,
                "log_ratio_mean": 0.0,
                "log_ratio_variance": float(rng.random()),
                "gate_gap": float(rng.random()) if row else None,
                "gate_bound": float(rng.random()) + 1 if row else None,
            }
            for step in every
            for row in range(3)
        ],
    )
    write_parts(
        record / "tokens",
        [
            {
                "step": step,
                "kind": kind,
                "row": row,
                "position": position,
                "text": text,
                "value": float(rng.normal()),
                "advantage": row - 1.0,
            }
            for step in (1, steps)
            for row, kind in enumerate(("most negative", "neutral", "most positive"))
            for position in range(12)
        ],
        parts=1,
    )
    events = [
        {"step": 1, "state": "healthy", "evidence": "", "action": None},
        {"step": steps // 2, "state": "warning", "evidence": text, "action": text},
        {"step": steps - 1, "state": "collapsed", "evidence": "reward 0", "action": None},
    ]
    (record / "health.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    drifts = [
        {"step": steps, "name": text, "layer": layer, "absolute": 0.1, "relative": 0.01, "stable_rank": 3.0}
        for layer in (None, 0, 1, 2)
    ]
    (record / "drift.jsonl").write_text("".join(json.dumps(drift) + "\n" for drift in drifts))
    information = {
        "method": text,
        "config": {"learning_rate": 1e-6 * (seed + 1), "nested": {"same": text}},
        "versions": {"trl": "1.16.0", text: text},
        "started": "2026-01-01T00:00:00+00:00",
    }
    (record / "run.json").write_text(json.dumps(information))
    write_completions(folder, steps, text)
    return folder


def write_completions(folder: Path, step: int, text: str, prompt: Any = "2+2?") -> None:
    """As TRL's `log_completions` does."""
    (folder / "completions").mkdir(parents=True, exist_ok=True)
    table = {
        "step": [step] * 6,
        "prompt": [prompt] * 6,
        "completion": [f"{text} {number}" for number in range(6)],
        f"reward {text}": [0.5] * 6,
        "note": [text] * 6,
        "advantage": [-2.0, 1.0, 0.0, 3.0, -1.0, 2.0],
    }
    pd.DataFrame(table).to_parquet(folder / "completions" / f"completions_{step:05d}.parquet")


def read_one(folder: Path) -> Run:
    (run,) = read_runs([folder])
    return run


def page_of(*folders: Path, output: Path) -> str:
    assert write_report(folders, output) == []
    return output.read_text()


def elements(page: str, name: str) -> list[Any]:
    return list(html5lib.parse(page, namespaceHTMLElements=False).iter(name))


# Thinning


@given(hnp.arrays(np.float64, st.integers(0, 400), elements=st.floats(-1e300, 1e300)), st.integers(4, 50))
def test_thinning_keeps_ends_and_extremes_within_its_limit(values: np.ndarray, limit: int) -> None:
    kept = keep_extremes(values, limit)
    assert len(kept) == len(values) if len(values) <= limit else len(kept) <= limit
    assert (np.diff(kept) > 0).all()
    if len(values):
        assert kept[0] == 0 and kept[-1] == len(values) - 1
        assert values[kept].min() == values.min() and values[kept].max() == values.max()


def test_thinning_keeps_each_spike_of_its_bucket() -> None:
    values = np.zeros(10_000)
    values[[1234, 5678, 9000]] = [7.0, -3.0, 2.0]
    assert {1234, 5678, 9000} <= set(keep_extremes(values, 100).tolist())
    with pytest.raises(ValueError, match="at least 4"):
        keep_extremes(values, 3)


@given(st.integers(0, 500), st.integers(1, 40))
def test_spread_has_both_ends(count: int, limit: int) -> None:
    chosen = spread(count, limit).tolist()
    assert len(chosen) == min(count, limit) and chosen == sorted(set(chosen))
    assert not count or chosen[0] == 0
    assert count < 1 or limit < 2 or chosen[-1] == count - 1


def test_trailing_means_by_hand() -> None:
    values = np.array([1.0, 3.0, 5.0, 7.0])
    assert trailing_means(values, 3, np.array([0, 1, 3])).tolist() == [1.0, 2.0, 5.0]


# Reading


def test_a_recorded_run_has_every_figure(tmp_path: Path) -> None:
    run = read_one(make_run(tmp_path / "run"))
    assert run.warnings == []
    assert {chart.key for chart in build_charts([run]) if not chart.key.startswith("other-")} == FIGURES
    others = [chart.title for chart in build_charts([run]) if chart.key.startswith("other-")]
    assert others == ["learning_rate", "loss", "rewards/plain/mean"]
    assert run.scalars["reward"].steps.tolist() == list(range(1, 41))
    assert [sample.advantage for sample in run.samples] == [3.0, 1.0, 0.0, -2.0]
    assert len(run.tokens) == 72 and run.tokens[0]["step"] == 40


def test_a_later_record_of_a_step_counts_and_nonfinite_values_are_told(tmp_path: Path) -> None:
    values = [(1, 1.0), (2, 2.0), (3, 3.0), (2, 5.0), (4, math.nan), (5, math.inf)]
    rows = [{"step": step, "name": "loss", "value": value} for step, value in values]
    write_parts(tmp_path / "record" / "scalars", rows)
    run = read_one(tmp_path)
    assert run.scalars["loss"].steps.tolist() == [1, 2, 3]
    assert run.scalars["loss"].values.tolist() == [1.0, 5.0, 3.0]
    (chart,) = build_charts([run])
    assert "2 values of loss are not finite, the first at step 4." in chart.note


def test_parts_are_read_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    for number, value in ((9, 1.0), (10, 2.0)):
        folder = tmp_path / "record" / "scalars"
        folder.mkdir(parents=True, exist_ok=True)
        table = pa.Table.from_pylist([{"step": 1, "name": "loss", "value": value}])
        pq.write_table(table, folder / f"part-{number}.parquet")
    assert read_one(tmp_path).scalars["loss"].values.tolist() == [2.0]


def test_histograms_are_few_and_their_open_ends_are_closed(tmp_path: Path) -> None:
    run = read_one(make_run(tmp_path / "run", steps=100))
    histograms = run.histograms["distill/opd_abs"]
    assert len(histograms.steps) == HISTOGRAM_STEPS
    assert histograms.steps[0] == 1 and histograms.steps[-1] == 100
    charts = {chart.key: chart for chart in build_charts([run])}
    sizes = charts["teacher-advantage"]
    assert isinstance(sizes, HistogramChart) and sizes.log_x
    (frames,) = sizes.frames
    assert frames.edges == pytest.approx([1e-6, 1e-4, 1e-2, 1.0, 100.0])
    assert frames.shares.sum(axis=1) == pytest.approx(np.ones(HISTOGRAM_STEPS))
    tokens = charts["token-ratio"]
    assert isinstance(tokens, HistogramChart) and not tokens.log_x
    assert tokens.frames[0].edges == pytest.approx([0.2, 0.5, 0.8, 1.0, 1.25, 2.0, 2.75])


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / seed / "run") for seed in ("a", "b")]
    assert [run.name for run in read_runs([*folders, folders[0]])] == ["a/run", "b/run"]


def test_health_is_one_stretch_per_state(tmp_path: Path) -> None:
    run = read_one(make_run(tmp_path / "run"))
    spans = [(span.start, span.end, span.event.state) for span in health_spans(0, run)]
    assert spans == [(1, 20, "healthy"), (20, 39, "warning"), (39, 41, "collapsed")]


def test_a_flickering_run_shows_the_worst_of_each_stretch(tmp_path: Path) -> None:
    states = ["healthy", "warning"] * 5000
    states[7777] = "collapsed"
    lines = [json.dumps({"step": step, "state": state}) for step, state in enumerate(states)]
    (tmp_path / "record").mkdir()
    (tmp_path / "record" / "health.jsonl").write_text("\n".join(lines) + "\n")
    spans = health_spans(0, read_one(tmp_path))
    assert len(spans) <= 300
    assert [span.start <= 7777 < span.end for span in spans if span.event.state == "collapsed"] == [True]


def test_the_folder_of_a_plain_trl_run(tmp_path: Path) -> None:
    for step in (20, 100):
        history = [{"step": s, "epoch": 0.1, "reward": 0.5, "loss": None} for s in range(1, step + 1)]
        history.append({"step": step, "train_runtime": 3.0})
        state = {"max_steps": 200, "log_history": history}
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text(json.dumps(state))
    write_completions(tmp_path, 100, "four", prompt=[{"role": "user", "content": "2+2?"}])
    run = read_one(tmp_path)
    assert set(run.scalars) == {"reward"} and run.last_step == 100
    assert run.config == {"max_steps": 200}
    assert run.samples[0].prompt == "user: 2+2?"
    # A checkpoint that is being written gives way to the one before it.
    (tmp_path / "checkpoint-100" / "trainer_state.json").write_text('{"log_his')
    run = read_one(tmp_path)
    assert run.last_step == 20
    assert run.warnings == [f"{tmp_path.name}: checkpoint-100/trainer_state.json cannot be read and was left out."]


def test_the_folder_of_the_demo(tmp_path: Path) -> None:
    (tmp_path / "history.json").write_text(json.dumps([{"step": 1, "reward": 0.25}, {"step": 2, "reward": 0.5}]))
    assert read_one(tmp_path).scalars["reward"].values.tolist() == [0.25, 0.5]


# Half-written and foreign folders


def test_unreadable_parts_are_left_out_with_one_sentence(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    scalars = folder / "record" / "scalars"
    whole = (scalars / "part-1.parquet").read_bytes()
    (scalars / "part-1.parquet").write_bytes(whole[: len(whole) // 2])
    (scalars / "part-2.parquet").write_bytes(b"")
    pq.write_table(pa.table({"other": [1]}), scalars / "part-3.parquet")
    with (folder / "record" / "health.jsonl").open("a") as lines:
        lines.write('no json\n{"step": 3, "sta')
    warnings = write_report([folder], tmp_path / "report.html")
    assert warnings == [
        "run: 3 of 4 parts of record/scalars cannot be read and were left out: part-1.parquet, part-2.parquet, "
        "part-3.parquet.",
        "run: 1 lines of record/health.jsonl cannot be read and were left out.",
    ]
    assert warnings[0] in (tmp_path / "report.html").read_text()


def test_a_folder_without_a_run_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ReportError, match="holds nothing to report"):
        write_report([tmp_path], tmp_path / "report.html")
    with pytest.raises(ReportError, match="is not a folder"):
        write_report([tmp_path / "absent"], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_files_never_raise_anything_else(tmp_path: Path, data: st.DataObject) -> None:
    """Any file of a run cut short, emptied, swapped with another, or filled with foreign bytes or JSON."""
    source, folder = tmp_path / "source", tmp_path / "damaged"
    if not source.exists():
        make_run(source, steps=4)
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source, folder)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in data.draw(st.lists(st.sampled_from(files), min_size=1, max_size=5, unique=True)):
        content = path.read_bytes()
        foreign = st.sampled_from(
            [b"[]", b"3\n", b'{"step": "x"}\n', b'{"config": 3, "versions": [1]}', b"[" * 99_999]
        )
        path.write_bytes(
            data.draw(
                st.integers(0, len(content)).map(lambda length, content=content: content[:length])
                | st.binary(max_size=64)
                | st.sampled_from(files).map(lambda other: other.read_bytes())
                | foreign
            )
        )
    try:
        runs = read_runs([folder])
    except ReportError:
        return
    build_charts(runs)


# The page


@pytest.fixture(scope="module")
def hostile_report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of two runs whose every text is an attack, the names of their folders included."""
    root = tmp_path_factory.mktemp("hostile")
    names = ("$$run$$ <script>window.hacked=8<", "<img src=x onerror=window.hacked=7>")
    folders = [make_run(root / name, seed=seed, text=" ".join(HOSTILE)) for seed, name in enumerate(names)]
    write_report(folders, root / "report.html")
    return root / "report.html"


def test_hostile_text_stays_text(hostile_report: Path) -> None:
    page = hostile_report.read_text()
    tree = html5lib.parse(page, namespaceHTMLElements=False)
    # As many scripts as the page has of its own: data, Bokeh, the figures, the controls.
    assert len(list(tree.iter("script"))) == 4
    assert not {"img", "svg", "a", "iframe", "object", "link", "base", "form"} & {node.tag for node in tree.iter()}
    assert not [name for node in tree.iter() for name in node.attrib if name.startswith("on")]
    shown = "".join(node.text or "" for node in tree.iter("pre"))
    for attack in HOSTILE:
        assert attack in shown
    assert "49" not in shown  # the template engine did not evaluate a text either


def test_only_the_scripts_of_the_page_are_allowed_to_run(hostile_report: Path) -> None:
    page = hostile_report.read_text()
    (policy,) = [node.get("content") for node in elements(page, "meta") if node.get("http-equiv")]
    directives = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    allowed = set(directives["script-src"].split())
    scripts = [node.text for node in elements(page, "script") if node.get("type") is None]
    digests = {base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts}
    assert allowed == {f"'sha256-{digest}'" for digest in digests}
    assert directives["default-src"] == "'none'" and "connect-src" not in directives


def test_the_page_asks_for_nothing_from_outside(hostile_report: Path) -> None:
    for node in html5lib.parse(hostile_report.read_text(), namespaceHTMLElements=False).iter():
        assert not {"src", "href", "srcset", "action"} & set(node.attrib)


def test_the_page_compares_settings_and_versions(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, seed=seed) for seed, name in enumerate(("first", "second"))]
    page = page_of(*runs, output=tmp_path / "deep" / "report.html")
    rows = [["".join(cell.itertext()) for cell in row] for row in elements(page, "tr")]
    assert ["learning_rate", "1e-06", "2e-06"] in rows
    assert ["nested.same", '"plain"', '"plain"'] in rows
    assert ["trl", "1.16.0", "1.16.0"] in rows
    differing = ["".join(row[0].itertext()) for row in elements(page, "tr") if row.get("class") == "differs"]
    assert set(differing) == {"learning_rate"}
    # Written beside and moved: nothing is left over.
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["report.html"]


def test_a_figure_without_data_is_left_out(tmp_path: Path) -> None:
    write_parts(tmp_path / "record" / "scalars", [{"step": 1, "name": "reward", "value": 0.5}], parts=1)
    page = page_of(tmp_path, output=tmp_path / "report.html")
    assert [node.get("id") for node in elements(page, "figure")] == ["chart-reward"]
    headings = ["".join(node.itertext()) for node in elements(page, "h2")]
    assert headings == ["Runs", "Training"]


def test_completions_alone_are_a_report(tmp_path: Path) -> None:
    write_completions(tmp_path, 7, "the answer")
    page = page_of(tmp_path, output=tmp_path / "report.html")
    assert "the answer 3" in page and not elements(page, "figure")


def test_a_long_run_stays_a_small_file(tmp_path: Path) -> None:
    steps = np.arange(100_000)
    folder = tmp_path / "record" / "scalars"
    folder.mkdir(parents=True)
    for number in range(30):
        values = np.sin(steps / 1000)
        values[54_321] = 99.0
        table = {"step": steps, "name": [f"scalar {number}"] * len(steps), "value": values}
        pq.write_table(pa.table(table), folder / f"part-{number}.parquet")
    page = page_of(tmp_path, output=tmp_path / "report.html")
    assert len(page.encode()) < 5_000_000
    (chart, *_) = build_charts([read_one(tmp_path)])
    assert max(curve.y.max() for curve in chart.curves) == 99.0  # pyright: ignore[reportAttributeAccessIssue]


def test_figures_are_written_as_png_and_svg(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "$run_1$", steps=20, text="$\\frac{1$")
    write_report([folder], tmp_path / "report.html", tmp_path / "figures")
    for key in FIGURES:
        assert (tmp_path / "figures" / f"{key}.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
        assert "<svg" in (tmp_path / "figures" / f"{key}.svg").read_text()


# A real browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    found = [path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))]
    if not found:
        pytest.skip("no chromium on this machine")
    with api.sync_playwright() as playwright:
        # Root, as in a container, has no sandbox; the page is a file that this test wrote.
        launched = playwright.chromium.launch(executable_path=found[0], args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def page(browser: Any, hostile_report: Path) -> Iterator[Any]:
    """The hostile report, open and drawn; each test leaves the runs visible.

    A message of the console above "info", a dialog, or a script that ran in spite of all fail at the end.
    """
    opened = browser.new_page(viewport={"width": 1400, "height": 1000}, color_scheme="light")
    complaints: list[str] = []
    opened.on("console", lambda m: complaints.append(m.text) if m.type in ("warning", "error") else None)
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    opened.on("dialog", lambda dialog: (complaints.append(dialog.message), dialog.dismiss()))
    opened.goto(hostile_report.as_uri(), timeout=120_000)
    opened.wait_for_function("document.documentElement.dataset.theme && Bokeh.documents[0].is_idle", timeout=120_000)
    yield opened
    assert complaints == []
    assert opened.evaluate("window.hacked") is None
    opened.close()


def visible(page: Any, run: int) -> set[bool]:
    """Whether the curves of a run are shown, over all figures."""
    return set(
        page.evaluate(
            "run => [...Bokeh.documents[0].all_models].filter(m => m.tags.includes(`run:${run}`)).map(m => m.visible)",
            run,
        )
    )


def test_every_figure_is_drawn(page: Any) -> None:
    page.evaluate("document.getElementById('others').open = true")
    cards = page.locator("figure.card")
    assert cards.count() == len(FIGURES) + 3
    for card in cards.all():
        plot = card.locator(".bk-Figure")
        plot.wait_for(state="visible")
        box = plot.bounding_box()
        assert box["width"] > 400 and box["height"] > 100
    # Something was painted, in the colors of both runs.
    painted = page.evaluate(
        """async () => {
          const plot = Bokeh.index.find_one_by_id(Bokeh.documents[0].get_model_by_name("figure:reward").id);
          const canvas = plot.export("auto", false).canvas;
          const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
          const seen = new Set();
          for (let i = 0; i < pixels.length; i += 4) seen.add([pixels[i], pixels[i + 1], pixels[i + 2]].join());
          return [...seen];
        }"""
    )
    assert {"59,130,196", "224,123,26"} <= set(painted)


def point_at(page: Any, chart: str, x: float, y: float) -> None:
    """Move the pointer over a figure, to a share of the width and height of its frame."""
    page.locator(f"#chart-{chart}").scroll_into_view_if_needed()
    frame = page.locator(f"#chart-{chart} .bk-CartesianFrame").bounding_box()
    for offset in (-3, 0):
        page.mouse.move(frame["x"] + frame["width"] * x + offset, frame["y"] + frame["height"] * y)


def test_hover_tells_the_values_in_all_figures_over_steps(page: Any) -> None:
    point_at(page, "reward", 0.5, 0.5)
    for key in ("reward", "entropy", "teacher-schedule"):
        told = page.locator(f"#chart-{key} .readout")
        told.locator("span").first.wait_for()
        text = told.inner_text()
        assert re.match(r"step \d+", text)
        assert "hacked=7" in text and "hacked=8" in text and re.search(r"\d\.\d+", text)


def test_hover_tells_the_evidence_of_a_warning(page: Any) -> None:
    point_at(page, "health", 0.6, 0.25)
    tooltip = page.locator(".bk-tooltip-content").first
    tooltip.wait_for(state="visible")
    assert HOSTILE[0] in tooltip.inner_text()


def test_a_click_on_the_legend_hides_one_curve(page: Any) -> None:
    item = page.locator("#chart-reward .bk-Legend .bk-item").first
    item.scroll_into_view_if_needed()
    item.click()
    assert visible(page, 0) == {True, False} and visible(page, 1) == {True}
    item.click()
    assert visible(page, 0) == {True}


def test_a_run_is_hidden_in_all_figures(page: Any) -> None:
    button = page.locator(".toggle-run").nth(1)
    button.click()
    assert visible(page, 0) == {True} and visible(page, 1) == {False}
    button.click()
    assert visible(page, 1) == {True}


def test_zoom_is_linked_over_steps(page: Any) -> None:
    def range_of(key: str) -> list[float]:
        return page.evaluate(
            "key => (({ start, end }) => [start, end])(Bokeh.documents[0].get_model_by_name(`figure:${key}`).x_range)",
            key,
        )

    before = range_of("entropy")
    page.locator("#chart-reward").scroll_into_view_if_needed()
    frame = page.locator("#chart-reward .bk-CartesianFrame").bounding_box()
    y = frame["y"] + frame["height"] / 2
    page.mouse.move(frame["x"] + frame["width"] * 0.3, y)
    page.mouse.down()
    page.mouse.move(frame["x"] + frame["width"] * 0.6, y + 60, steps=5)
    page.mouse.up()
    start, end = range_of("entropy")
    assert before[0] < start < end < before[1]
    assert range_of("reward") == [start, end]


def test_the_slider_shows_another_step(page: Any) -> None:
    def shares() -> list[float]:
        return list(page.evaluate("[...Bokeh.documents[0].get_model_by_name('frames:token-ratio:0').data.share]"))

    newest = shares()
    card = page.locator("#chart-token-ratio")
    card.locator("input").fill("0")
    assert card.locator("output").inner_text() == "1"
    assert shares() != newest and sum(shares()) == pytest.approx(1, abs=0.01)


def test_the_theme_reaches_the_figures(page: Any) -> None:
    def background() -> str:
        return page.evaluate("Bokeh.documents[0].get_model_by_name('figure:reward').background_fill_color")

    light = background()
    page.locator("#theme").click()
    assert page.evaluate("getComputedStyle(document.querySelector('.card')).backgroundColor") == "rgb(27, 33, 39)"
    assert background() != light == "#ffffff"
