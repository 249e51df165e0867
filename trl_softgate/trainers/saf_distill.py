"""SAF distillation: the GRPO advantage fused with the teacher's, kept in bounds (arXiv 2607.29209)."""

import math
import warnings
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from transformers import TrainerCallback

from ..callbacks import TeacherLogprobsCallback
from ..diagnostics import statistics
from ..diagnostics.statistics import Statistic
from ..fusion import FusionSchedule, fuse_advantages, has_teacher_value, opd_advantage
from ..objectives import ObjectiveOutput, grpo_loss, gspo_loss, k3_divergence, sapo_loss
from ..teachers import LocalTeacher
from ..validation import require_choice, require_number
from .base import CLIP_OPTIONS, SAPO_OPTIONS, VESPO_OPTIONS, BasePolicyConfig, BasePolicyTrainer, _loss_mask

_CLIP_DEFAULTS = {"grpo": (0.2, 0.27), "gspo": (3e-4, 4e-4)}
_MISSING_LIMIT = 0.01


class _SingleCompletion(int):
    """A 1 that passes `num_generations < 2` of `GRPOConfig`: without a group baseline, one completion is enough."""

    def __lt__(self, other: object) -> bool:
        return False


@dataclass
class SAFDistillConfig(BasePolicyConfig):
    """Configuration of `SAFDistillTrainer`: `trl.GRPOConfig` with the teacher and the four stages of SAF-OPD.

    The fused advantage is `grpo_coef * A_grpo + opd_coef * scale * coefficient * tanh(filter(A_opd))`, with
    A_opd = log pi_teacher - log pi_student. Defaults are the paper's; each stage can be switched off by itself.

    Args:
        teacher_model_name_or_path: model or adapter folder, or hub name, when the trainer is given no `teacher_model`.
        teacher_model_init_kwargs: for loading it, e.g. `{"dtype": "bfloat16"}`; default dtype: as stored.
        teacher_batch_size: rows per forward of the teacher, >= 1; default `per_device_train_batch_size`.
        policy_objective: `"grpo"`, `"gspo"` (GSPO-token) or `"sapo"` (gate by the sign at each token).
        epsilon, epsilon_high: clip range; default by objective: grpo 0.2 / 0.27, gspo 3e-4 / 4e-4, sapo has none.
        aggregation: default `"token_mean"`, as in the paper's runs; with gspo `"seq_mean_token_mean"`, GSPO's own.
        grpo_coef: weight of A_grpo, >= 0. 0 is distillation alone, with `num_generations=1`.
        opd_coef: weight of A_opd, >= 0. 0 is the policy objective alone; the teacher is not loaded.
        opd_top_k_percent: stage 1, percentage of each row's tokens that keep A_opd, in (0, 100]; 100 or None: off.
        opd_tanh_coef: stage 2, bound of the compressed A_opd, > 0; 0 or None: off.
        opd_warmup_steps: stage 3, optimizer steps until the term has full weight; 0: off.
        opd_kl_drop_threshold: relative drop of the student-teacher KL that ends warm-up early, in [0, 1]; 0 or None:
            never.
        opd_anneal: stage 4, linear decay of the term from the end of warm-up to the end of the run.
        opd_anneal_min: factor on the term at the end of the run, in [0, 1].
        opd_student_logps: `"current"` recomputes A_opd at each update, `"old"` keeps that of the rollout.

    Raises:
        ValueError: an option is out of range, or has no effect with this objective.
    """

    _METHOD: ClassVar[str] = "SAF distillation"
    _VALID_DICT_FIELDS: ClassVar[list[str]] = [*BasePolicyConfig._VALID_DICT_FIELDS, "teacher_model_init_kwargs"]

    teacher_model_name_or_path: str | None = field(
        default=None, metadata={"help": "Model or adapter folder, or hub name, of the teacher."}
    )
    teacher_model_init_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Keyword arguments for loading the teacher, e.g. {'dtype': 'bfloat16'}."}
    )
    teacher_batch_size: int | None = field(
        default=None, metadata={"help": "Rows per forward of the teacher; default: per_device_train_batch_size."}
    )
    policy_objective: str = field(
        default="grpo", metadata={"help": "Policy loss of the fused advantage: 'grpo', 'gspo' or 'sapo'."}
    )
    epsilon: float | None = field(  # type: ignore[assignment]
        default=None, metadata={"help": "Lower clip range; default by objective: grpo 0.2, gspo 3e-4."}
    )
    epsilon_high: float | None = field(
        default=None, metadata={"help": "Upper clip range; default by objective: grpo 0.27, gspo 4e-4."}
    )
    loss_type: str | None = field(  # type: ignore[assignment]
        default=None, metadata={"help": "Fixed by `policy_objective`; choose the averaging with `aggregation`."}
    )
    importance_sampling_level: str | None = field(  # type: ignore[assignment]
        default=None, metadata={"help": "Fixed by `policy_objective`."}
    )
    aggregation: str | None = field(  # type: ignore[assignment]
        default=None,
        metadata={
            "help": "How the loss is averaged: 'token_mean' (mean over all tokens of the optimizer step) or "
            "'seq_mean_token_mean' (mean over rows of each row's token mean); default by objective: gspo the second, "
            "else the first."
        },
    )
    grpo_coef: float = field(
        default=1.0, metadata={"help": "Weight of the GRPO advantage; 0: distillation alone, num_generations=1."}
    )
    opd_coef: float = field(
        default=1.0, metadata={"help": "Weight of the teacher's advantage; 0: the policy objective alone, no teacher."}
    )
    opd_top_k_percent: float | None = field(
        default=20.0,
        metadata={"help": "Stage 1: percentage of each row's tokens that keep the teacher's advantage; 100: off."},
    )
    opd_tanh_coef: float | None = field(default=0.1, metadata={"help": "Stage 2: bound c of c * tanh(A); 0: off."})
    opd_warmup_steps: int = field(default=100, metadata={"help": "Stage 3: optimizer steps of the warm-up; 0: off."})
    opd_kl_drop_threshold: float | None = field(
        default=0.2, metadata={"help": "Stage 3: relative drop of the KL that ends warm-up early; 0: never."}
    )
    opd_anneal: bool = field(
        default=True, metadata={"help": "Stage 4: linear decay from the end of warm-up to the end of the run."}
    )
    opd_anneal_min: float = field(default=0.0, metadata={"help": "Stage 4: factor at the end of the run."})
    opd_student_logps: str = field(
        default="current",
        metadata={"help": "A_opd from the 'current' policy at each update, or from the 'old' one of the rollout."},
    )

    def __post_init__(self) -> None:
        require_choice("policy_objective", self.policy_objective, ("grpo", "gspo", "sapo"))
        require_choice("opd_student_logps", self.opd_student_logps, ("current", "old"))
        require_number("grpo_coef", self.grpo_coef, minimum=0)
        require_number("opd_coef", self.opd_coef, minimum=0)
        if self.grpo_coef == 0 and self.opd_coef == 0:
            raise ValueError("`grpo_coef` and `opd_coef` are both 0: there is nothing to learn from.")
        if self.opd_top_k_percent is not None:
            require_number("opd_top_k_percent", self.opd_top_k_percent, above=0, maximum=100)
        if self.opd_tanh_coef is not None:
            require_number("opd_tanh_coef", self.opd_tanh_coef, minimum=0)
            self.opd_tanh_coef = self.opd_tanh_coef or None
        if self.teacher_batch_size is not None:
            require_number("teacher_batch_size", self.teacher_batch_size, minimum=1)
        require_number("opd_warmup_steps", self.opd_warmup_steps, minimum=0)
        if self.opd_kl_drop_threshold is not None:
            require_number("opd_kl_drop_threshold", self.opd_kl_drop_threshold, minimum=0, maximum=1)
        require_number("opd_anneal_min", self.opd_anneal_min, minimum=0, maximum=1)
        if self.max_steps > 0 and self.opd_coef != 0:
            self._check_warmup(self.max_steps)
        if self.grpo_coef == 0 and self.off_policy_mask_threshold is not None:
            raise ValueError(
                "`off_policy_mask_threshold` drops sequences by the sign of the group advantage, which distillation "
                "alone (`grpo_coef=0`) has not: leave it out."
            )
        self._resolve_objective()
        one_completion = self.num_generations == 1
        if one_completion:
            if self.grpo_coef != 0:
                raise ValueError(
                    "`num_generations=1` leaves no group to compare with: set `grpo_coef=0` (distillation alone), or "
                    "at least 2 generations per prompt."
                )
            self.num_generations = _SingleCompletion(1)
        super().__post_init__()
        if one_completion:
            self.num_generations = 1
        elif self.grpo_coef == 0:
            warnings.warn(
                f"Distillation alone (`grpo_coef=0`) compares no completions: "
                f"`num_generations={self.num_generations}` repeats each prompt. The paper's runs use "
                "`num_generations=1` and more prompts (arXiv 2607.29209).",
                UserWarning,
                stacklevel=3,
            )

    def _resolve_objective(self) -> None:
        loss_type, level = {"grpo": ("grpo", "token"), "gspo": ("grpo", "sequence"), "sapo": ("sapo", "token")}[
            self.policy_objective
        ]
        self.loss_type = self.loss_type or loss_type
        self.importance_sampling_level = self.importance_sampling_level or level
        if self.aggregation is None:
            self.aggregation = "seq_mean_token_mean" if self.policy_objective == "gspo" else "token_mean"
        hint = "Choose the loss with `policy_objective` and the averaging with `aggregation`."
        self._fix("loss_type", loss_type, hint)
        self._fix("importance_sampling_level", level, hint)
        unused: tuple[str, ...] = VESPO_OPTIONS
        if self.policy_objective == "sapo":
            for name in CLIP_OPTIONS:
                if getattr(self, name) is not None:
                    raise ValueError(f"`{name}` has no effect with `policy_objective='sapo'`: leave it out.")
            self._check_temperatures()
        else:
            unused = (*unused, *SAPO_OPTIONS)
            low, high = _CLIP_DEFAULTS[self.policy_objective]
            if self.epsilon is None:
                self.epsilon = low
                self.epsilon_high = high if self.epsilon_high is None else self.epsilon_high
            self._check_clip_range()
        self._UNUSED = unused  # type: ignore[misc]
        if self.policy_objective == "gspo":
            self._check_gspo(stacklevel=5)

    def _check_warmup(self, max_steps: int) -> None:
        if self.opd_warmup_steps > max_steps:
            raise ValueError(
                f"`opd_warmup_steps={self.opd_warmup_steps}` is longer than the run of {max_steps} steps, so the "
                f"teacher's term would never reach its weight: use at most {max_steps} (a third of the run, as in the "
                "paper, is a good start), or 0 for no warm-up."
            )

    def _schedule(self, max_steps: int) -> FusionSchedule:
        return FusionSchedule(
            max_steps=max_steps,
            warmup_steps=self.opd_warmup_steps,
            kl_drop_threshold=self.opd_kl_drop_threshold,
            anneal=self.opd_anneal,
            anneal_min=self.opd_anneal_min,
        )


def no_reward(completions: list[Any], **kwargs: Any) -> list[float]:
    """Stands in for a reward function where distillation alone needs none."""
    return [0.0] * len(completions)


class SAFDistillTrainer(BasePolicyTrainer):
    """Trains on rewards and on a teacher at once, with the teacher kept in bounds (SAF-OPD, arXiv 2607.29209).

    A drop-in for `trl.GRPOTrainer`, with one more keyword:

    Args:
        teacher_model: path or hub name of a model, path of an adapter, or a model object (taken over: eval mode,
            frozen; do not use it elsewhere afterwards). Default: `args.teacher_model_name_or_path`. The teacher must
            share the student's vocabulary.
        teacher_processing_class: the teacher's tokenizer, to compare vocabularies; default: loaded from the path.

    Instead of a teacher, `callbacks` may hold one whose `on_rollout` fills `rollout["teacher_per_token_logps"]`, e.g.
    `TeacherLogprobsCallback(any_callable)`.

    Attributes:
        fusion_schedule: the `FusionSchedule` of the run.

    Raises:
        ValueError: no source of teacher log-probabilities, two of them, or an unfit vocabulary.

    Example:
        >>> trainer = SAFDistillTrainer(
        ...     student, reward, SAFDistillConfig("out"), train_dataset=dataset, teacher_model=teacher
        ... )
        >>> trainer.train()
    """

    _CONFIG = SAFDistillConfig
    _name = "SAF-Distill"
    _tag_names: ClassVar[list[str]] = ["trl", "saf-opd", "trl-softgate"]
    _paper: ClassVar[dict[str, Any]] = {"title": "SAF-OPD", "id": "2607.29209"}
    args: SAFDistillConfig

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: SAFDistillConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        *rest: Any,
        teacher_model: Any = None,
        teacher_processing_class: Any = None,
        **kwargs: Any,
    ) -> None:
        named = getattr(args, "teacher_model_name_or_path", None)
        if teacher_model is not None and named is not None:
            raise ValueError(
                "The teacher is named twice, by `teacher_model` and by `args.teacher_model_name_or_path`: keep one."
            )
        if teacher_model is model and not isinstance(model, str):
            raise ValueError("`teacher_model` is the student itself, which training changes: pass a copy or a path.")
        if reward_funcs is None and getattr(args, "grpo_coef", 1.0) == 0 and kwargs.get("environment_factory") is None:
            # GRPOTrainer asks for a source of rewards, distillation alone has no use for one
            reward_funcs = no_reward
        source = named if teacher_model is None else teacher_model
        if source is not None and any(isinstance(callback, TeacherLogprobsCallback) for callback in callbacks or []):
            raise ValueError("There are two teachers, a model and a TeacherLogprobsCallback: keep one.")
        needed = getattr(args, "opd_coef", 1.0) != 0
        if needed and source is None and not any(hasattr(callback, "on_rollout") for callback in callbacks or []):
            raise ValueError(
                "SAF distillation needs a source of teacher log-probabilities: pass `teacher_model`, set "
                "`teacher_model_name_or_path`, or add a callback whose `on_rollout` fills "
                "`rollout['teacher_per_token_logps']` (TeacherLogprobsCallback). For none, set `opd_coef=0`."
            )
        super().__init__(
            model,
            reward_funcs,
            args,
            train_dataset,
            eval_dataset,
            processing_class,
            reward_processing_classes,
            callbacks,
            *rest,
            **kwargs,
        )
        # Until training starts, only step 1 is asked for, which does not depend on the run's length
        self.fusion_schedule = self.args._schedule(max(self.args.max_steps, self.args.opd_warmup_steps, 1))
        if needed and source is not None:
            own = {id(parameter) for parameter in self.model.parameters()}
            if not isinstance(source, str) and any(id(parameter) in own for parameter in source.parameters()):
                raise ValueError(
                    "`teacher_model` shares weights with the student, which training changes: pass a copy or a path."
                )
            self.add_callback(TeacherLogprobsCallback(self._local_teacher(source, teacher_processing_class)))

    def _local_teacher(self, source: Any, processing_class: Any) -> LocalTeacher:
        if self._is_vlm:
            raise ValueError(
                "A local teacher scores text alone: for a vision-language student add a TeacherLogprobsCallback with "
                "a callable of your own."
            )
        init_kwargs = self.args.teacher_model_init_kwargs
        assert not isinstance(init_kwargs, str)  # TrainingArguments has parsed it
        return LocalTeacher(
            source,
            temperature=self.temperature,
            student_vocabulary=self._tokenizer.get_vocab(),
            student_vocab_size=self.model.config.get_text_config().vocab_size,
            tokenizer=processing_class,
            batch_size=self.args.teacher_batch_size or self.args.per_device_train_batch_size,
            device=self.accelerator.device,
            model_init_kwargs=init_kwargs,
            trust_remote_code=self.args.trust_remote_code,
        )

    # Rollout

    @property
    def _running_step(self) -> int:
        return self.state.global_step + 1

    def _multiplier(self) -> float:
        """Factor on the teacher's term in the running step; 0 means 0 for the rest of the run."""
        return self.args.opd_coef * self.fusion_schedule.multiplier(self._running_step)

    def _dispatch_rollout(
        self, rollout: dict[str, Any], inputs: list[dict[str, Any]], mode: str, **kwargs: Any
    ) -> None:
        needed = self._multiplier() != 0
        super()._dispatch_rollout(rollout, inputs, mode, teacher_needed=needed, **kwargs)
        if not needed:
            # what cannot matter is not carried along
            rollout.pop("teacher_per_token_logps", None)
            return
        scores = rollout.get("teacher_per_token_logps")
        if scores is None:
            raise ValueError(
                "No callback filled `rollout['teacher_per_token_logps']`. Add a TeacherLogprobsCallback, or fill it "
                "in `on_rollout` of your own callback."
            )
        if scores.shape != rollout["completion_ids"].shape:
            raise ValueError(
                f"`teacher_per_token_logps` has shape {tuple(scores.shape)}; the completions have "
                f"{tuple(rollout['completion_ids'].shape)}: give one log-probability per completion token, padding "
                "included."
            )
        scores = scores.to(device=rollout["completion_ids"].device, dtype=torch.float32)
        rollout["teacher_per_token_logps"] = scores
        mask = _loss_mask(rollout)
        counts = torch.stack([(mask & ~torch.isfinite(scores)).sum(), mask.sum()])
        missing, total = self.accelerator.reduce(counts, reduction="sum").tolist()
        if missing > _MISSING_LIMIT * total:
            raise RuntimeError(
                f"The teacher gave no finite log-probability for {missing} of {total} tokens, above the limit of "
                f"{_MISSING_LIMIT:.0%}. Check the teacher for overflow (try float32) or a truncated answer."
            )

    # Loss

    def _policy_advantages(
        self,
        inputs: dict[str, Any],
        per_token_logps: torch.Tensor,
        old_per_token_logps: torch.Tensor,
        mask: torch.Tensor,
        collected: dict[str, Statistic],
    ) -> torch.Tensor:
        scores = inputs.get("teacher_per_token_logps")
        if scores is None or self._multiplier() == 0:
            return self.args.grpo_coef * inputs["advantages"]
        known = has_teacher_value(scores, mask)
        student = per_token_logps.detach() if self.args.opd_student_logps == "current" else old_per_token_logps
        collected["distill/kl"] = statistics.mean(k3_divergence(per_token_logps.detach(), scores, mask), known)
        fused = fuse_advantages(
            inputs["advantages"],
            opd_advantage(student, scores, mask),
            mask,
            available=known,
            grpo_coef=self.args.grpo_coef,
            opd_coef=self.args.opd_coef,
            multiplier=self.fusion_schedule.multiplier(self._running_step),
            top_k_percent=self.args.opd_top_k_percent,
            tanh_coef=self.args.opd_tanh_coef,
        )
        collected |= fused.statistics
        return fused.advantages

    def _objective(
        self,
        per_token_logps: torch.Tensor,
        old_per_token_logps: torch.Tensor,
        advantages: torch.Tensor,
        mask: torch.Tensor,
    ) -> ObjectiveOutput:
        tensors = (per_token_logps, old_per_token_logps, advantages, mask)
        if self.args.policy_objective == "sapo":
            return sapo_loss(*tensors, tau_pos=self.args.sapo_temperature_pos, tau_neg=self.args.sapo_temperature_neg)
        clip = {"epsilon_low": self.epsilon_low, "epsilon_high": self.epsilon_high, "delta": self.args.delta}
        if self.args.policy_objective == "grpo":
            return grpo_loss(*tensors, **clip)
        return gspo_loss(*tensors, level="token" if advantages.dim() == 2 else "sequence", **clip)

    # Schedule

    def _on_step_statistics(self, merged: dict[str, Statistic]) -> None:
        if self.args.opd_coef == 0:
            return
        step, schedule = self._running_step, self.fusion_schedule
        metrics = self._metrics["train"]
        metrics["distill/scale"].append(schedule.scale(step))
        metrics["distill/coefficient"].append(schedule.coefficient(step))
        metrics["distill/multiplier"].append(schedule.multiplier(step))
        if "distill/kl" in merged:
            # every process has the same reduced number, so every process takes the same decision
            statistic = merged["distill/kl"]
            kl, tokens = torch.stack([statistic.result(), statistic.count]).tolist()
            if tokens == 0:
                kl = math.nan  # a step without valid tokens says nothing, and 0 would look like a KL that fell
            schedule.observe(step, kl)
            drop = schedule.kl_relative_drop(kl)
            if drop is not None:
                metrics["distill/kl_relative_drop"].append(drop)

    # State

    def _geometry(self) -> dict[str, Any]:
        schedule = self.args._schedule(self.state.max_steps).settings() if self.args.opd_coef != 0 else None
        return super()._geometry() | {"fusion schedule": schedule}

    def _progress(self) -> dict[str, Any]:
        return {"fusion_schedule": self.fusion_schedule.state_dict()}

    def _restore_progress(self, progress: dict[str, Any]) -> None:
        self.fusion_schedule.load_state_dict(progress["fusion_schedule"])

    def _begin_training(self) -> None:
        if self.args.opd_coef != 0:
            self.args._check_warmup(self.state.max_steps)
        self.fusion_schedule = self.args._schedule(max(self.state.max_steps, 1))
        super()._begin_training()
