"""The record of a run holds every optimizer step once, with the numbers that are logged."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import tiny

from trl_softgate import GSPOConfig, GSPOTrainer, SAFDistillConfig, SAFDistillTrainer, SAPOConfig, SAPOTrainer

METHODS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "gspo": (GSPOTrainer, GSPOConfig, {}),
    "sapo": (SAPOTrainer, SAPOConfig, {}),
    "saf": (SAFDistillTrainer, SAFDistillConfig, dict(opd_warmup_steps=0, policy_objective="sapo")),
}
REUSE: dict[str, Any] = dict(gradient_accumulation_steps=2, steps_per_generation=4, num_iterations=2)
RUNTIME = ("train_runtime", "train_samples_per_second", "train_steps_per_second", "train_loss", "epoch", "step_time")


def make(folder: Path, method: str = "sapo", **options: Any) -> Any:
    trainer_class, config_class, own = METHODS[method]
    teacher = tiny.teacher() if method == "saf" else {}
    args = tiny.config(config_class, folder, **{**REUSE, "max_steps": 6, "record_every": 2, **own, **options})
    return trainer_class(tiny.model(), tiny.reward, args, tiny.dataset(), processing_class=tiny.tokenizer(), **teacher)


def table(folder: Path, name: str = "scalars") -> Any:
    return pd.read_parquet(folder / "record" / name)


def wide(folder: Path) -> pd.DataFrame:
    return table(folder).pivot(index="step", columns="name", values="value")


@pytest.mark.parametrize("method", METHODS)
def test_it_is_what_is_logged(method: str, tmp_path: Path) -> None:
    trainer = make(tmp_path, method)
    trainer.train()
    recorded = wide(tmp_path)
    assert recorded.index.tolist() == list(range(1, 7))
    for entry in (entry for entry in trainer.state.log_history if "loss" in entry):
        step = entry.pop("step")
        for name, value in entry.items():
            if name not in RUNTIME:
                assert recorded.loc[step, name] == pytest.approx(value, rel=1e-6, abs=1e-8), name
    assert recorded["log_ratio/row_variance"].notna().tolist() == [True, False] * 3
    steps = table(tmp_path, "histograms").step.unique().tolist()
    assert steps == [1, 3, 5]


def test_steps_between_logs(tmp_path: Path) -> None:
    trainer = make(tmp_path, logging_steps=3)
    trainer.train()
    recorded = wide(tmp_path)
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logs) == 2
    for entry in logs:
        steps = slice(entry["step"] - 2, entry["step"])
        for name in ("entropy", "ratio/mean", "reward", "gate/weight_pos"):
            assert recorded.loc[steps, name].mean() == pytest.approx(entry[name], rel=1e-6), name
    assert recorded["reward"].notna().tolist() == [True, False, False, False, True, False]  # one per rollout


@pytest.mark.parametrize("logging_steps", [1, 3])
@pytest.mark.parametrize("stop", [1, 2, 3])
def test_a_resumed_run_repeats_nothing(stop: int, logging_steps: int, tmp_path: Path) -> None:
    options: Any = dict(save_strategy="steps", save_steps=1, logging_steps=logging_steps)
    make(tmp_path, "saf", **options).train()
    tables = {name: table(tmp_path, name) for name in ("scalars", "histograms", "rows", "tokens")}
    resumed = make(tmp_path, "saf", **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{stop}"))
    for name, whole in tables.items():
        again = table(tmp_path, name)
        if name == "scalars":
            whole, again = (t[~t.name.isin(RUNTIME)] for t in (whole, again))
        keys = [key for key in ("step", "name", "kind", "row", "position") if key in whole]
        whole, again = (t.sort_values(by=keys).reset_index(drop=True) for t in (whole, again))
        pd.testing.assert_frame_equal(again, whole)


def test_rows_and_histograms_belong_together(tmp_path: Path) -> None:
    make(tmp_path, "saf").train()
    rows, histograms, tokens = (table(tmp_path, name) for name in ("rows", "histograms", "tokens"))
    for step, group in rows.groupby("step"):
        counted = {h["name"]: h for _, h in histograms[histograms.step == step].iterrows()}
        assert sum(counted["ratio/token"]["counts"]) == group.length.sum()
        assert sum(counted["ratio/sequence"]["counts"]) == len(group)
        assert sum(counted["distill/opd_abs"]["counts"]) == group.length.sum()
        expected, _ = np.histogram(np.exp(group.log_ratio_mean), bins=counted["ratio/sequence"]["edges"])
        assert np.abs(np.cumsum(expected - counted["ratio/sequence"]["counts"])).max() <= 1  # rounding at an edge
        assert np.all(group.gate_gap <= group.gate_bound + 1e-6)
    assert set(tokens.kind) == {"most negative", "neutral", "most positive"}
    assert tokens.groupby(["step", "kind"]).size().max() <= 12
    assert all(isinstance(text, str) for text in tokens.text)


def test_what_is_known_of_the_run(tmp_path: Path) -> None:
    make(tmp_path, "gspo", hub_token="a-secret").train()
    text = (tmp_path / "record" / "run.json").read_text()
    facts = json.loads(text)
    assert facts["method"] == "GSPO"
    assert facts["config"]["epsilon"] == 3e-4
    assert facts["versions"]["trl"]
    assert "a-secret" not in text


def test_a_new_run_in_an_old_folder(tmp_path: Path) -> None:
    make(tmp_path, max_steps=2).train()
    make(tmp_path, max_steps=1).train()
    assert wide(tmp_path).index.tolist() == [1]
    assert pd.read_parquet(tmp_path / "record-1" / "scalars").step.max() == 2


def test_off_by_one_field(tmp_path: Path) -> None:
    trainer = make(tmp_path, record=False)
    trainer.train()
    assert not (tmp_path / "record").exists()
    with pytest.raises(ValueError, match="`record_every` must be"):
        make(tmp_path, record_every=0)


def test_evaluation_is_recorded(tmp_path: Path) -> None:
    trainer = make(tmp_path, max_steps=2, eval_strategy="no")
    trainer.train()
    trainer.evaluate(tiny.dataset(4))
    assert wide(tmp_path).loc[2, "eval_reward"] == pytest.approx(trainer.state.log_history[-1]["eval_reward"])
