"""The weight drift that a training run records at its checkpoints."""

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
from peft import LoraConfig

from trl_softgate import GSPOConfig, GSPOTrainer
from trl_softgate.callbacks.weight_drift import WeightDriftCallback
from trl_softgate.diagnostics.drift import weight_drift


def trainer(base: Path, output_dir: Path, callback: WeightDriftCallback, lora: bool = False, **options: Any) -> Any:
    settings: dict[str, Any] = dict(max_steps=2, save_strategy="steps", save_steps=1)
    return GSPOTrainer(
        model=str(base),
        reward_funcs=tiny.reward,
        args=tiny.config(GSPOConfig, output_dir, **{**settings, **options}),
        train_dataset=tiny.dataset(),
        processing_class=tiny.tokenizer(),
        peft_config=LoraConfig(r=2, target_modules="all-linear") if lora else None,
        callbacks=[callback],
    )


def rows(output_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output_dir / "record" / "drift.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("callback") / "base"
    tiny.model().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_a_run_records_each_checkpoint(lora: bool, base: Path, tmp_path: Path) -> None:
    trainer(base, tmp_path, WeightDriftCallback(), lora).train()
    found = rows(tmp_path)
    assert {row["step"] for row in found} == {1, 2}
    for step in (1, 2):
        expected = weight_drift(base, tmp_path / f"checkpoint-{step}").matrices
        assert [row for row in found if row["step"] == step] == [
            {
                "step": step,
                "name": matrix.name,
                "layer": matrix.layer,
                "absolute": matrix.absolute,
                "relative": matrix.relative,
                "stable_rank": matrix.stable_rank,
            }
            for matrix in expected
        ]
    assert all(row["absolute"] > 0 for row in found if row["step"] == 2)

    # a resume from step 1 repeats step 2, whose lines are not there twice
    trainer(base, tmp_path, WeightDriftCallback(), lora).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert rows(tmp_path) == found


def test_a_new_run_begins_a_new_record(base: Path, tmp_path: Path) -> None:
    (tmp_path / "record").mkdir()
    (tmp_path / "record" / "drift.jsonl").write_text('{"step": 1}\n{"step": 7}\n')
    trainer(base, tmp_path, WeightDriftCallback(), max_steps=1).train()
    assert {row["step"] for row in rows(tmp_path)} == {1}
    assert all("name" in row for row in rows(tmp_path))


def test_another_base_can_be_given(base: Path, tmp_path: Path) -> None:
    tiny.model(seed=1).save_pretrained(tmp_path / "other")
    trainer(base, tmp_path / "run", WeightDriftCallback(tmp_path / "other"), max_steps=1).train()
    assert min(row["relative"] for row in rows(tmp_path / "run")) > 0.5


def test_a_missing_base_stops_before_the_first_step(base: Path, tmp_path: Path) -> None:
    for callback in (WeightDriftCallback(tmp_path / "nowhere"), WeightDriftCallback()):
        run = trainer(base, tmp_path / "run", callback)
        if callback.base is None:
            run.model.config._name_or_path = "nobody/nothing"
        with pytest.raises(ValueError, match=r"in no folder here .*`WeightDriftCallback\(base=FOLDER\)`"):
            run.train()
        assert run.state.global_step == 0


def test_a_checkpoint_that_cannot_be_compared_is_a_warning(base: Path, tmp_path: Path) -> None:
    tiny.model(hidden=64).save_pretrained(tmp_path / "wider")
    run = trainer(base, tmp_path / "run", WeightDriftCallback(tmp_path / "wider"), max_steps=1)
    with pytest.warns(UserWarning, match=r"No weight drift at step 1: .* is 32 x 64 in .*checkpoint-1 and 64 x 128"):
        run.train()
    assert not (tmp_path / "run" / "record" / "drift.jsonl").exists()
    assert run.state.global_step == 1
