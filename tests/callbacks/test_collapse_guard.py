"""The guard in training: it logs, stops with a checkpoint, or goes back and on with a lower learning rate."""

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import tiny
import torch

from trl_softgate import CollapseGuard, SAPOConfig, SAPOTrainer
from trl_softgate.diagnostics.health import HealthLimits

LIMITS: dict[str, Any] = dict(reward_drop=0.1, window=1, warn_after=1, collapse_after=2, recover_after=2)


class Rewards:
    """Good until the rollout `bad`, and worthless from there on, until the learning rate is `cured`."""

    def __init__(self, bad: int = 5, cured: float = 0.0) -> None:
        self.bad, self.cured = bad, cured
        self.trainer: Any = None

    def __call__(self, completions: list[str], **kwargs: Any) -> list[float]:
        step = self.trainer.state.global_step + 1
        rate = self.trainer.optimizer.param_groups[0]["lr"]
        worthless = step >= self.bad and rate > self.cured
        return [0.0 if worthless else 1.0 + (i % 2) for i in range(len(completions))]


def make(folder: Path, rewards: Rewards, guard: CollapseGuard | None, **options: Any) -> Any:
    defaults: dict[str, Any] = dict(
        max_steps=10, save_strategy="steps", save_steps=2, lr_scheduler_type="constant", learning_rate=1e-3
    )
    rewards.trainer = SAPOTrainer(
        tiny.model(),
        rewards,
        tiny.config(SAPOConfig, folder, **{**defaults, **options}),
        tiny.dataset(),
        processing_class=tiny.tokenizer(),
        callbacks=[] if guard is None else [guard],
    )
    return rewards.trainer


def health(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "record" / "health.jsonl").read_text().splitlines()]


def rates(folder: Path) -> list[float]:
    table = pd.read_parquet(folder / "record" / "scalars")
    rates: Any = table[table.name == "learning_rate"]
    return rates.sort_values(by="step").value.tolist()


def test_it_logs(tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = make(tmp_path, Rewards(), CollapseGuard(limits=HealthLimits(**LIMITS)))
    trainer.train()
    assert trainer.state.global_step == 10
    assert [(line["step"], line["state"], line["action"]) for line in health(tmp_path)] == [
        (5, "warning", None),
        (6, "collapsed", "log"),
    ]
    assert (
        "Run collapsed: reward 0 is below 90% of its peak of 1.5 at step 1, 2 times in a row at step 6" in caplog.text
    )
    assert "CollapseGuard: log on collapse; limits: reward_drop 0.1, entropy_floor" in capsys.readouterr().out


def test_it_stops_with_a_checkpoint(tmp_path: Path) -> None:
    trainer = make(tmp_path, Rewards(), CollapseGuard("stop", HealthLimits(**LIMITS)), save_steps=100)
    trainer.train()
    assert trainer.state.global_step == 6
    assert (tmp_path / "checkpoint-6" / "softgate_complete").is_file()
    assert health(tmp_path)[-1]["action"] == "stop"


def test_it_goes_back_and_on(tmp_path: Path) -> None:
    """To checkpoint 4: of 6 the reward was bad already. With half the learning rate the run ends well."""
    guard = CollapseGuard("rollback", HealthLimits(**LIMITS), temperature_factor=2.0)
    trainer = make(tmp_path, Rewards(cured=6e-4), guard)
    trainer.train()
    assert trainer.state.global_step == 10
    assert guard.rollbacks == 1
    assert guard.monitor.state == "healthy"
    assert health(tmp_path)[-1] == {**health(tmp_path)[-1], "step": 6, "action": "rollback to checkpoint-4"}
    assert rates(tmp_path) == pytest.approx([1e-3] * 4 + [5e-4] * 6)
    assert (trainer.args.sapo_temperature_pos, trainer.args.sapo_temperature_neg) == (2.0, 2.1)
    # the same run resumed in another process keeps both
    resumed = make(
        tmp_path, Rewards(cured=6e-4), CollapseGuard("rollback", HealthLimits(**LIMITS), temperature_factor=2.0)
    )
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    assert rates(tmp_path) == pytest.approx([1e-3] * 4 + [5e-4] * 6)
    for ours, expected in zip(resumed.model.parameters(), trainer.model.parameters(), strict=True):
        assert torch.equal(ours, expected)


def test_a_rollback_is_a_resume(tmp_path: Path) -> None:
    """Weights, optimizer, schedule and random state are those of the checkpoint: what follows is as without a stop."""
    trainer = make(tmp_path / "a", Rewards(cured=2e-3), None)
    trainer.train()
    guard = CollapseGuard("rollback", HealthLimits(**LIMITS), learning_rate_factor=1.0, max_rollbacks=1)
    rewards = Rewards()
    rolled = make(tmp_path / "b", rewards, guard)
    monitor_of = type(guard.monitor)
    original = monitor_of.observe
    try:
        monitor_of.observe = lambda self, step, scalars: _cured(original(self, step, scalars), rewards)  # type: ignore[method-assign]
        rolled.train()
    finally:
        monitor_of.observe = original  # type: ignore[method-assign]
    assert guard.rollbacks == 1
    for ours, expected in zip(rolled.model.parameters(), trainer.model.parameters(), strict=True):
        assert torch.equal(ours, expected)


def _cured(transition: Any, rewards: Rewards) -> Any:
    if transition is not None and transition.state == "collapsed":
        rewards.cured = 2e-3
    return transition


def test_after_the_last_rollback_it_stops(tmp_path: Path) -> None:
    guard = CollapseGuard("rollback", HealthLimits(**LIMITS), max_rollbacks=2)
    trainer = make(tmp_path, Rewards(), guard)
    trainer.train()
    assert guard.rollbacks == 2
    assert trainer.state.global_step == 6
    actions = [line["action"] for line in health(tmp_path) if line["state"] == "collapsed"]
    assert actions == ["rollback to checkpoint-4"] * 2 + ["stop"]
    assert rates(tmp_path) == pytest.approx([1e-3] * 4 + [2.5e-4] * 2)


def test_nothing_to_go_back_to(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    guard = CollapseGuard("rollback", HealthLimits(**LIMITS))
    trainer = make(tmp_path, Rewards(), guard, save_steps=100)
    trainer.train()
    assert (trainer.state.global_step, guard.rollbacks) == (6, 0)
    assert "No checkpoint was written while the run was sound" in caplog.text


@pytest.mark.parametrize("stop", [2, 6])
def test_its_state_is_part_of_a_checkpoint(stop: int, tmp_path: Path) -> None:
    """A resumed run says again what the first one said of the later steps, and says it once."""
    limits = HealthLimits(**{**LIMITS, "collapse_after": 4})
    make(tmp_path, Rewards(), CollapseGuard(limits=limits)).train()
    before = health(tmp_path)
    assert [line["step"] for line in before] == [5, 8]
    with open(tmp_path / "record" / "health.jsonl", "a") as file:
        file.write('{"step": 10, "sta')  # killed in the middle of a line
    make(tmp_path, Rewards(), CollapseGuard(limits=limits)).train(
        resume_from_checkpoint=str(tmp_path / f"checkpoint-{stop}")
    )
    ours, expected = ([{**line, "time": None} for line in lines] for lines in (health(tmp_path), before))
    assert ours == expected


@pytest.mark.parametrize("record", [True, False])
def test_a_new_run_begins_without_the_lines_of_an_older_one(record: bool, tmp_path: Path) -> None:
    guards = [CollapseGuard(limits=HealthLimits(**LIMITS)) for _ in range(2)]
    make(tmp_path, Rewards(), guards[0], record=record).train()
    make(tmp_path, Rewards(bad=9), guards[1], record=record).train()
    assert [line["step"] for line in health(tmp_path)] == [9, 10]
    if record:
        assert len((tmp_path / "record-1" / "health.jsonl").read_text().splitlines()) == 2


def test_a_factor_on_temperatures_that_are_chosen_anew_is_refused(tmp_path: Path) -> None:
    guard = CollapseGuard("rollback", temperature_factor=2.0)
    trainer = make(tmp_path, Rewards(), guard, steps_per_generation=2, adaptive_temperature_quantile=0.9)
    with pytest.raises(ValueError, match="`temperature_factor` of CollapseGuard scales fixed temperatures"):
        trainer.train()


@pytest.mark.parametrize(
    "option",
    [dict(action="pray"), dict(learning_rate_factor=0), dict(temperature_factor=0.5), dict(max_rollbacks=0)],
)
def test_options_out_of_range_are_refused(option: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"`{next(iter(option))}` must be"):
        CollapseGuard(**option)
