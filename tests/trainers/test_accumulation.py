"""Dealing an optimizer step to more micro-batches changes neither its gradient nor what is logged."""

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from transformers import TrainerCallback

from trl_softgate import (
    GSPOConfig,
    GSPOTrainer,
    SAFDistillConfig,
    SAFDistillTrainer,
    SAPOConfig,
    SAPOTrainer,
)

ROWS = 8  # per optimizer step
ACCUMULATION = (1, 2, 4)
STEPS = 4
AGGREGATIONS = ("seq_mean_token_mean", "token_mean")
# wide clips: some sequences and tokens are clipped after the first update, not all
METHODS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "gspo": (GSPOTrainer, GSPOConfig, dict(epsilon=0.2, epsilon_high=0.3)),
    "sapo": (SAPOTrainer, SAPOConfig, {}),
    "saf-grpo": (SAFDistillTrainer, SAFDistillConfig, dict(policy_objective="grpo", epsilon=0.01, epsilon_high=0.02)),
    "saf-gspo": (SAFDistillTrainer, SAFDistillConfig, dict(policy_objective="gspo", opd_student_logps="old")),
    "saf-sapo": (SAFDistillTrainer, SAFDistillConfig, dict(policy_objective="sapo", grpo_coef=0.5)),
}
SAF: dict[str, Any] = dict(opd_warmup_steps=4, opd_kl_drop_threshold=1e-4, opd_anneal_min=0.5, opd_top_k_percent=40.0)
OPTIONS: dict[str, dict[str, Any]] = {
    "entropy": dict(entropy_coef=0.05),
    "entropy-adaptive": dict(use_adaptive_entropy=True, entropy_coef=0.05, entropy_target=6.0),
    "off-policy": dict(off_policy_mask_threshold=1e-3),
    # enough of the teacher that the KL falls and ends the warm-up
    "distilled": dict(opd_coef=10.0, grpo_coef=0.02),
    # two optimizer steps share one generation: the rows of a step are then drawn by a shuffle
    "window": dict(window=2),
}
CASES = [(method, aggregation, None) for method in METHODS for aggregation in AGGREGATIONS]
CASES += [(method, aggregation, "entropy") for method in ("gspo", "saf-grpo") for aggregation in AGGREGATIONS]
CASES += [("sapo", "seq_mean_token_mean", name) for name in ("entropy-adaptive", "off-policy")]
CASES += [("saf-grpo", "token_mean", "distilled")]
CASES += [(method, "token_mean", "window") for method in ("sapo", "saf-grpo")]
NOT_COMPARED = ("step_time", "train_runtime", "train_samples_per_second", "train_steps_per_second")


class _Schedule(TrainerCallback):
    """The state of the fusion schedule after each optimizer step."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.states: list[Any] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        schedule = getattr(self.trainer, "fusion_schedule", None)
        if schedule is not None:
            self.states.append([schedule.multiplier(state.global_step + 1), schedule.state_dict()])


def _train(method: str, aggregation: str, accumulation: int, folder: Path, window: int = 1, **options: Any) -> Any:
    trainer_class, config_class, method_options = METHODS[method]
    saf = trainer_class is SAFDistillTrainer
    record = _Schedule()
    trainer = trainer_class(
        tiny.model(),
        reward_funcs=tiny.reward,
        args=tiny.config(
            config_class,
            folder,
            per_device_train_batch_size=ROWS // accumulation,
            gradient_accumulation_steps=accumulation,
            steps_per_generation=window * accumulation,
            num_iterations=2,
            max_steps=STEPS,
            aggregation=aggregation,
            optim="sgd",
            learning_rate=0.2,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            **{**method_options, **(SAF if saf else {}), **options},
        ),
        train_dataset=tiny.dataset(16),
        processing_class=tiny.tokenizer(),
        rollout_func=tiny.fixed_rollout,
        callbacks=[record],
        **(tiny.teacher() if saf else {}),
    )
    record.trainer = trainer
    trainer.train()
    return trainer, record.states


def _numbers(state: dict[str, Any]) -> dict[str, float]:
    return {name: -1.0 if value is None else float(value) for name, value in state.items()}


def _weights(trainer: Any) -> torch.Tensor:
    return torch.cat([p.detach().flatten().double() for p in trainer.model.parameters()])


@pytest.mark.filterwarnings("ignore:`aggregation='token_mean'`:UserWarning", "ignore:`epsilon:UserWarning")
@pytest.mark.parametrize(("method", "aggregation", "option"), CASES)
def test_accumulation_changes_nothing(method: str, aggregation: str, option: str | None, tmp_path: Path) -> None:
    whole, schedule = _train(method, aggregation, 1, tmp_path, **OPTIONS.get(option or "", {}))
    expected = _weights(whole)
    moved = (expected - torch.cat([p.detach().flatten().double() for p in tiny.model().parameters()])).norm()
    assert moved > 1e-2
    for accumulation in ACCUMULATION[1:]:
        dealt, dealt_schedule = _train(method, aggregation, accumulation, tmp_path, **OPTIONS.get(option or "", {}))
        assert dealt.state.global_step == whole.state.global_step == STEPS
        difference = _weights(dealt) - expected
        assert difference.abs().max() <= 1e-6
        assert difference.norm() <= 1e-5 * moved
        assert len(dealt.state.log_history) == len(whole.state.log_history)
        for row, dealt_row in zip(whole.state.log_history, dealt.state.log_history, strict=True):
            compared = {k: v for k, v in row.items() if k not in NOT_COMPARED}
            assert {k: v for k, v in dealt_row.items() if k not in NOT_COMPARED} == pytest.approx(
                compared, rel=1e-5, abs=3e-6
            )
        assert len(schedule) == (STEPS if method.startswith("saf") else 0)
        for (multiplier, state), (dealt_multiplier, dealt_state) in zip(schedule, dealt_schedule, strict=True):
            assert dealt_multiplier == multiplier
            assert _numbers(dealt_state) == pytest.approx(_numbers(state), rel=1e-5)


@pytest.mark.filterwarnings("ignore:`epsilon:UserWarning")
@pytest.mark.parametrize("method", ["gspo", "sapo", "saf-grpo"])
def test_the_comparison_covers_what_can_differ(method: str, tmp_path: Path) -> None:
    """Unequal lengths, ratios off 1 in the second pass, and, for SAF, a warm-up that the KL ends."""
    saf = method == "saf-grpo"
    trainer, schedule = _train(method, AGGREGATIONS[saf], 2, tmp_path, **(OPTIONS["distilled"] if saf else {}))
    logs = [row for row in trainer.state.log_history if "entropy" in row]
    assert len(logs) == STEPS
    assert logs[0]["completions/min_length"] < logs[0]["completions/max_length"]
    assert (logs[0]["ratio/min"], logs[0]["ratio/max"]) == pytest.approx((1, 1))
    assert logs[1]["ratio/min"] < 1 < logs[1]["ratio/max"]
    if method == "sapo":
        assert logs[1]["gate/weight_pos"] < 1
    else:
        assert 0 < logs[1]["clip_ratio/region_mean"] < 1
    if saf:
        # the KL of step 2 freezes the scale of step 3, from where the anneal to 0.5 starts
        assert [row["distill/multiplier"] for row in logs] == pytest.approx([0.25, 0.5, 0.75, 0.375])
        assert logs[1]["distill/kl_relative_drop"] > SAF["opd_kl_drop_threshold"]
