"""SAF distillation, end to end on tiny models."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from peft import LoraConfig, get_peft_model
from transformers import TrainerCallback

from trl_softgate import (
    FusionSchedule,
    GSPOConfig,
    GSPOTrainer,
    SAFDistillConfig,
    SAFDistillTrainer,
    TeacherLogprobsCallback,
)
from trl_softgate.teachers import TeacherRequest

NO_STAGES: dict[str, Any] = dict(
    opd_top_k_percent=None, opd_tanh_coef=None, opd_warmup_steps=0, opd_anneal=False, opd_kl_drop_threshold=None
)


def trainer(output_dir: Path, teacher: Any = "default", callbacks: Any = None, **kwargs: Any) -> SAFDistillTrainer:
    if isinstance(teacher, str) and teacher == "default":
        teacher = tiny.model(7)
    return SAFDistillTrainer(
        kwargs.pop("model", None) or tiny.model(),
        tiny.reward,
        tiny.config(SAFDistillConfig, output_dir, **{"opd_warmup_steps": 0, **kwargs}),
        tiny.dataset(),
        processing_class=tiny.tokenizer(),
        callbacks=callbacks,
        teacher_model=teacher,
        teacher_processing_class=tiny.tokenizer(),
    )


class Counting:
    """A teacher that counts how often it is asked."""

    def __init__(self, value: float = -1.0) -> None:
        self.requests: list[TeacherRequest] = []
        self.value = value

    def __call__(self, request: TeacherRequest) -> torch.Tensor:
        self.requests.append(request)
        return torch.full(request.completion_ids.shape, self.value)


def values(made: SAFDistillTrainer, name: str) -> list[float]:
    return [entry[name] for entry in made.state.log_history if name in entry]


@pytest.mark.parametrize("objective", ["grpo", "gspo", "sapo"])
def test_trains_with_every_objective(objective: str, tmp_path: Path) -> None:
    made = trainer(tmp_path, policy_objective=objective, num_iterations=2, max_steps=4)
    before = copy.deepcopy(made.model.state_dict())
    made.train()
    assert any(not torch.equal(before[name], weight) for name, weight in made.model.state_dict().items())
    for name in ("distill/kl", "distill/opd_abs_mean", "distill/opd_to_grpo", "distill/kept_share", "loss"):
        assert values(made, name) and all(map(math.isfinite, values(made, name)))
    assert ("gate/weight_neg" if objective == "sapo" else "clip_ratio/region_mean") in made.state.log_history[0]


def test_opd_only_needs_no_reward_function(tmp_path: Path) -> None:
    made = SAFDistillTrainer(
        tiny.model(),
        None,
        tiny.config(SAFDistillConfig, tmp_path, grpo_coef=0.0, num_generations=1, **NO_STAGES),
        tiny.dataset(),
        processing_class=tiny.tokenizer(),
        teacher_model=tiny.model(7),
        teacher_processing_class=tiny.tokenizer(),
    )
    made.train()
    assert made.state.global_step == 2


def test_zero_opd_coef_is_the_parent_objective_exactly(tmp_path: Path) -> None:
    def weights(made: Any) -> dict[str, torch.Tensor]:
        made.train()
        return made.model.state_dict()

    options: dict[str, Any] = dict(num_iterations=2, max_steps=4, aggregation="seq_mean_token_mean")
    saf = weights(trainer(tmp_path, teacher=None, opd_coef=0.0, policy_objective="gspo", **options))
    gspo = weights(
        GSPOTrainer(
            tiny.model(),
            tiny.reward,
            tiny.config(GSPOConfig, tmp_path, **options),
            tiny.dataset(),
            processing_class=tiny.tokenizer(),
        )
    )
    for name, weight in gspo.items():
        assert torch.equal(saf[name], weight), name


def test_teacher_is_asked_once_per_generation_batch(tmp_path: Path) -> None:
    teacher = Counting()
    made = trainer(
        tmp_path,
        teacher=None,
        callbacks=[TeacherLogprobsCallback(teacher)],
        steps_per_generation=2,
        num_iterations=2,
        max_steps=8,
        opd_anneal=False,
    )
    made.train()
    assert len(teacher.requests) == 2
    assert all(request.completion_ids.shape[0] == 8 for request in teacher.requests)


def test_teacher_is_not_asked_when_it_cannot_matter(tmp_path: Path) -> None:
    teacher = Counting()
    callbacks = [TeacherLogprobsCallback(teacher)]
    trainer(tmp_path, teacher=None, callbacks=callbacks, opd_coef=0.0, max_steps=4).train()
    assert len(teacher.requests) == 0
    # annealed to 0 at the last step of four: asked for the first three
    trainer(tmp_path, teacher=None, callbacks=callbacks, opd_warmup_steps=1, max_steps=4).train()
    assert len(teacher.requests) == 3


def test_own_callback_may_fill_the_key(tmp_path: Path) -> None:
    class Own(TrainerCallback):
        def on_rollout(self, args: Any, state: Any, control: Any, *, rollout: dict[str, Any], **kwargs: Any) -> None:
            rollout["teacher_per_token_logps"] = torch.full(rollout["completion_ids"].shape, -2.0)

    made = trainer(tmp_path, teacher=None, callbacks=[Own()])
    made.train()
    assert values(made, "distill/missing_share") == [0.0, 0.0]


def test_no_source_is_refused_at_construction(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="source of teacher log-probabilities"):
        trainer(tmp_path, teacher=None)
    with pytest.raises(ValueError, match="named twice"):
        trainer(tmp_path, teacher_model_name_or_path="somewhere")
    student = tiny.model()
    with pytest.raises(ValueError, match="student itself"):
        trainer(tmp_path, model=student, teacher=student)


def test_callback_that_fills_nothing_is_an_error(tmp_path: Path) -> None:
    class Idle(TrainerCallback):
        def on_rollout(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            pass

    with pytest.raises(ValueError, match="No callback filled"):
        trainer(tmp_path, teacher=None, callbacks=[Idle()]).train()


def test_wrong_shape_is_an_error(tmp_path: Path) -> None:
    callback = TeacherLogprobsCallback(lambda request: torch.zeros(request.completion_ids.shape[0], 1))
    with pytest.raises(ValueError, match="shape"):
        trainer(tmp_path, teacher=None, callbacks=[callback]).train()


def test_missing_values_are_neutral_up_to_one_percent(tmp_path: Path) -> None:
    def gappy(share: float) -> TeacherLogprobsCallback:
        def score(request: TeacherRequest) -> torch.Tensor:
            scores = torch.full(request.completion_ids.shape, -1.0)
            valid = request.completion_mask.nonzero()
            gaps = valid[: int(share * len(valid))]
            scores[gaps[:, 0], gaps[:, 1]] = float("nan")
            return scores

        return TeacherLogprobsCallback(score)

    options: dict[str, Any] = dict(per_device_train_batch_size=16, max_completion_length=16)
    made = trainer(tmp_path, teacher=None, callbacks=[gappy(0.009)], **options)
    made.train()
    assert 0 < values(made, "distill/missing_share")[0] < 0.01
    with pytest.raises(RuntimeError, match="above the limit of 1%"):
        trainer(tmp_path, teacher=None, callbacks=[gappy(0.02)], **options).train()


def test_two_sources_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="two teachers"):
        trainer(tmp_path, callbacks=[TeacherLogprobsCallback(Counting())])
    both = [TeacherLogprobsCallback(Counting()), TeacherLogprobsCallback(Counting())]
    with pytest.raises(ValueError, match="Keep one"):
        trainer(tmp_path, teacher=None, callbacks=both).train()


def test_teacher_sharing_weights_with_the_student_is_refused(tmp_path: Path) -> None:
    base = tiny.model()
    with pytest.raises(ValueError, match="shares weights"):
        trainer(tmp_path, model=get_peft_model(base, LoraConfig(task_type="CAUSAL_LM")), teacher=base)  # type: ignore


def test_a_step_without_valid_tokens_is_no_observation(tmp_path: Path) -> None:
    """Its KL is not 0, it is unknown: taken for 0, it would end the warm-up for good."""
    made = trainer(tmp_path, max_steps=5, opd_warmup_steps=4, learning_rate=0.0)

    class Truncated(TrainerCallback):
        def on_rollout(self, args: Any, state: Any, control: Any, *, rollout: dict[str, Any], **kwargs: Any) -> None:
            if state.global_step == 1:
                rollout["completion_mask"] = torch.zeros_like(rollout["completion_mask"])

    made.add_callback(Truncated())
    made.train()
    assert made.fusion_schedule.state_dict()["frozen_at"] is None
    assert values(made, "distill/scale") == [0.25, 0.5, 0.75, 1.0, 1.0]


@pytest.mark.parametrize("objective", ["grpo", "gspo", "sapo"])
def test_config_survives_a_round_trip(objective: str, tmp_path: Path) -> None:
    made = tiny.config(SAFDistillConfig, tmp_path, policy_objective=objective, opd_warmup_steps=1)
    plain = {name: value for name, value in made.to_dict().items() if name != "generation_batch_size"}
    assert SAFDistillConfig(**plain).to_dict() == made.to_dict()


def test_off_policy_mask_without_group_advantage_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="off_policy_mask_threshold"):
        trainer(tmp_path, grpo_coef=0.0, num_generations=1, off_policy_mask_threshold=0.5)


def test_schedule_counts_optimizer_steps_alone(tmp_path: Path) -> None:
    """Not micro-batches, generations, iterations or evaluations."""
    expected = FusionSchedule(6, 3, None, True, 0.0)
    for options in (
        dict(),
        dict(gradient_accumulation_steps=2),
        dict(steps_per_generation=2, num_iterations=3),
    ):
        made = trainer(
            tmp_path, max_steps=6, opd_warmup_steps=3, opd_kl_drop_threshold=None, num_generations=2, **options
        )
        made.train()
        assert values(made, "distill/multiplier") == [expected.multiplier(step) for step in range(1, 7)]


def test_warmup_longer_than_the_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="opd_warmup_steps=3"):
        trainer(tmp_path, opd_warmup_steps=3, max_steps=2)
    # with epochs the length is known when training starts
    made = trainer(tmp_path, opd_warmup_steps=50, max_steps=-1, num_train_epochs=1)
    with pytest.raises(ValueError, match="opd_warmup_steps=50"):
        made.train()


@pytest.mark.parametrize("source", ["current", "old"])
def test_opd_student_logps(source: str, tmp_path: Path) -> None:
    """On the first update both coincide; on a reused rollout only the current policy's follows the weights."""
    made = trainer(tmp_path, opd_student_logps=source, num_iterations=3, max_steps=3, learning_rate=1e-2, **NO_STAGES)
    made.train()
    seen = values(made, "distill/opd_abs_mean")
    assert (max(seen) - min(seen) < 1e-6) == (source == "old")


def test_nan_in_the_policy_stops_training(tmp_path: Path) -> None:
    made = trainer(tmp_path, save_strategy="steps", save_steps=1)

    class Break(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            with torch.no_grad():
                next(iter(made.model.parameters())).fill_(float("nan"))

    made.add_callback(Break())
    with pytest.raises((FloatingPointError, RuntimeError)):
        made.train()
    assert not list(tmp_path.glob("checkpoint-*"))
