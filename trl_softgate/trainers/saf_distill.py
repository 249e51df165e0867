"""SAF distillation: the GRPO advantage fused with the teacher's, kept in bounds (arXiv 2607.29209)."""

import copy
import functools
import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import TrainerCallback

from ..callbacks import TeacherLogprobsCallback
from ..diagnostics import statistics
from ..diagnostics.statistics import Statistic
from ..fusion import FusionSchedule, fuse_advantages, has_teacher_value, opd_advantage
from ..objectives import ObjectiveOutput, grpo_loss, gspo_loss, k3_divergence, sapo_loss
from ..teachers import RoutedTeacher, Student, Teacher, TeacherError, TeacherOptions, build_teacher
from ..teachers.options import option_names
from ..validation import require_choice, require_number
from .backend import is_sharded, shard_frozen
from .base import CLIP_OPTIONS, SAPO_OPTIONS, VESPO_OPTIONS, BasePolicyConfig, BasePolicyTrainer, _loss_mask
from .state import random_state, set_random_state

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
        teacher_model_name_or_path: a model in this process: model or adapter folder, or hub name.
        teacher_adapter: adapter folder or hub name, put on the base model of a LoRA student beside the student's own
            adapter; `"base"`: that base model without adapter.
        teacher_server_url: one or more addresses of `vllm serve`, e.g. `http://localhost:8000`.
        teacher_callable: `"module:function"`, (TeacherRequest) -> (B, T).
        teachers: several teachers by name, each a dict of these options without the prefix `teacher_`, which stand in
            for those of the same name here, e.g. `{"math": {"server_url": "..."}, "code": {"adapter": "..."}}`.
        teacher_column: column of the dataset that names each row's teacher; rows without a name get no term.
        teacher_model_init_kwargs: for loading a model, e.g. `{"dtype": "bfloat16", "attn_implementation": "sdpa"}` or
            `{"quantization_config": {"load_in_4bit": True}}`; default dtype: as stored.
        teacher_device: where a model is put, e.g. `"cpu"`; default: the student's device.
        teacher_max_tokens_per_batch: padded tokens per forward of a model or an adapter, >= 1.
        teacher_server_model: name under which the server serves the teacher; default: the only one it serves.
        teacher_server_api_key_env: environment variable that holds the server's API key.
        teacher_server_concurrency: requests at a time, >= 1, in each process.
        teacher_server_timeout: seconds for one request, > 0.
        teacher_server_max_retries: further attempts after a time-out, a dropped connection, or status 429 or 5xx.
        teacher_temperature: 1 lets a server, which always scores at 1, teach a rollout of another temperature.
        teacher_tokenizer_name_or_path: the teacher's tokenizer; default: the one beside its model.
        teacher_prompt_column: column of the dataset with another prompt for the teacher, a string or messages.
        teacher_chat_template_kwargs: further variables of the teacher's chat template.
        teacher_self_test: score a few rows of the first rollout in ways that only a working teacher answers right.
        save_on_teacher_failure: write a checkpoint before training stops because the teacher gave no answer. Needs
            `steps_per_generation * num_iterations` to be a multiple or a divisor of `gradient_accumulation_steps`.
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
        ValueError: an option is out of range, or has no effect with this objective or this teacher.
    """

    _METHOD: ClassVar[str] = "SAF distillation"
    _VALID_DICT_FIELDS: ClassVar[list[str]] = [
        *BasePolicyConfig._VALID_DICT_FIELDS,
        "teacher_model_init_kwargs",
        "teacher_chat_template_kwargs",
        "teachers",
    ]

    teacher_model_name_or_path: str | None = field(
        default=None, metadata={"help": "Model or adapter folder, or hub name, of the teacher."}
    )
    teacher_adapter: str | None = field(
        default=None,
        metadata={
            "help": "Adapter folder or hub name, put on the base model of a LoRA student; 'base': that model itself."
        },
    )
    teacher_server_url: list[str] | None = field(
        default=None, metadata={"help": "One or more addresses of `vllm serve`, e.g. http://localhost:8000."}
    )
    teacher_callable: str | None = field(
        default=None, metadata={"help": "'module:function', (TeacherRequest) -> (B, T) log-probabilities."}
    )
    teachers: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "Several teachers by name, each a dict of the teacher_* options without that prefix, "
            "e.g. {'math': {'server_url': 'http://localhost:8000'}, 'code': {'adapter': 'path'}}."
        },
    )
    teacher_column: str = field(
        default="teacher",
        metadata={"help": "Column of the dataset that names each row's teacher, when there are several."},
    )
    teacher_model_init_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Keyword arguments for loading the teacher, e.g. {'dtype': 'bfloat16'}."}
    )
    teacher_device: str | None = field(
        default=None, metadata={"help": "Where a teacher model is put, e.g. 'cpu'; default: the student's device."}
    )
    teacher_max_tokens_per_batch: int = field(
        default=16384, metadata={"help": "Padded tokens per forward of a teacher model or adapter."}
    )
    teacher_server_model: str | None = field(
        default=None, metadata={"help": "Name of the teacher on the server; default: the only one it serves."}
    )
    teacher_server_api_key_env: str | None = field(
        default=None, metadata={"help": "Environment variable that holds the server's API key."}
    )
    teacher_server_concurrency: int = field(
        default=16, metadata={"help": "Requests to the server at a time, in each process."}
    )
    teacher_server_timeout: float = field(default=120.0, metadata={"help": "Seconds for one request to the server."})
    teacher_server_max_retries: int = field(
        default=5,
        metadata={"help": "Further attempts after a time-out, a dropped connection, or status 429 or 5xx."},
    )
    teacher_temperature: float | None = field(
        default=None,
        metadata={"help": "1 lets a server, which always scores at 1, teach a rollout of another temperature."},
    )
    teacher_tokenizer_name_or_path: str | None = field(
        default=None, metadata={"help": "The teacher's tokenizer; default: the one beside its model."}
    )
    teacher_prompt_column: str | None = field(
        default=None,
        metadata={"help": "Column of the dataset with another prompt for the teacher, a string or messages."},
    )
    teacher_chat_template_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Further variables of the teacher's chat template."}
    )
    teacher_self_test: bool = field(
        default=True,
        metadata={"help": "Score a few rows of the first rollout in ways that only a working teacher answers right."},
    )
    save_on_teacher_failure: bool = field(
        default=False,
        metadata={"help": "Write a checkpoint before training stops because the teacher gave no answer."},
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
        super().__post_init__()  # parses the dicts that came as JSON
        if isinstance(self.teacher_server_url, str):
            self.teacher_server_url = [self.teacher_server_url]
        self._check_teachers()
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
            self._check_gate()
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

    @property
    def _has_gate(self) -> bool:
        return self.policy_objective == "sapo"

    def _check_teachers(self) -> None:
        options = self._teacher_options()
        if self.teachers is not None:
            if not isinstance(self.teachers, dict) or not self.teachers:
                raise ValueError(f"`teachers` must be a dict of teachers by name, not empty; got {self.teachers!r}.")
            if options.source is not None:
                raise ValueError(f"The teacher is named by `teachers` and by `teacher_{options.source}`: keep one.")
            for name in self.teachers:
                self._teacher_options(name)
        accumulation = self.gradient_accumulation_steps
        if self.save_on_teacher_failure and self._window % accumulation != 0 and accumulation % self._window != 0:
            raise ValueError(
                f"`save_on_teacher_failure` needs `steps_per_generation * num_iterations` ({self._window}) to be a "
                f"multiple or a divisor of `gradient_accumulation_steps` ({accumulation}): elsewhere a rollout begins "
                "in the middle of an optimizer step, where no checkpoint can be written that resumes exactly."
            )

    def _teacher_options(self, name: str | None = None) -> TeacherOptions:
        """Options of the one teacher, or of one of `teachers`."""
        common = {option: getattr(self, f"teacher_{option}") for option in option_names()}
        if name is None:
            return TeacherOptions(**common)
        assert isinstance(self.teachers, dict)
        own = self.teachers[name]
        where = f"`teachers[{name!r}]`"
        if not isinstance(own, dict):
            raise ValueError(f"{where} must be a dict of options such as {{'server_url': ...}}, got {own!r}.")
        unknown = [option for option in own if option not in common]
        if unknown:
            raise ValueError(f"{where} has no option {unknown[0]!r}; there are {', '.join(common)}.")
        try:
            options = TeacherOptions(**{**common, **own})
            if options.source is None:
                raise ValueError("It does not say where the teacher is: give `model_name_or_path`, `server_url`, ...")
            options.check_unused(TeacherOptions(**common), options.source)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        return options

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


def _teacher_sources(
    args: SAFDistillConfig, teacher_model: Any, callbacks: list[TrainerCallback]
) -> dict[str | None, tuple[TeacherOptions, Any]]:
    """Options, and what was passed to the trainer, of each teacher by name; the name of a single one is None.

    Raises:
        ValueError: there is none, there are two, or an option does not matter to the teacher it is given for.
    """
    common = args._teacher_options()
    defaults = TeacherOptions(**{name: args._default(f"teacher_{name}") for name in option_names()})
    sources: dict[str | None, tuple[TeacherOptions, Any]] = {}
    if isinstance(teacher_model, dict):
        sources = {name: (common, model) for name, model in teacher_model.items()}
    elif teacher_model is not None:
        sources = {None: (common, teacher_model)}
    if sources and common.source is not None:
        raise ValueError(
            f"The teacher is named twice, by `teacher_model` and by `args.teacher_{common.source}`: keep one."
        )
    if isinstance(args.teachers, dict):
        if None in sources or sources.keys() & args.teachers.keys():
            raise ValueError("A teacher is named twice, by `teacher_model` and by `args.teachers`: keep one.")
        sources |= {name: (args._teacher_options(name), None) for name in args.teachers}
    elif common.source is not None:
        sources = {None: (common, None)}
    kinds = [
        str(options.source) if model is None else "callable" if _is_function(model) else "model_name_or_path"
        for options, model in sources.values()
    ]
    common.check_unused(defaults, *kinds)
    if (None in sources or not sources) and args.teacher_column != args._default("teacher_column"):
        raise ValueError("`teacher_column` has no effect without `teachers` by name: leave it out.")
    if sources and any(isinstance(callback, TeacherLogprobsCallback) for callback in callbacks):
        raise ValueError("There are two teachers, that of the trainer and a TeacherLogprobsCallback: keep one.")
    if not sources and args.opd_coef != 0 and not any(hasattr(callback, "on_rollout") for callback in callbacks):
        raise ValueError(
            "SAF distillation needs a source of teacher log-probabilities: pass `teacher_model`, set one of "
            "`teacher_model_name_or_path`, `teacher_adapter`, `teacher_server_url`, `teacher_callable` and "
            "`teachers`, or add a callback whose `on_rollout` fills `rollout['teacher_per_token_logps']` "
            "(TeacherLogprobsCallback). For none, set `opd_coef=0`."
        )
    return sources


def _is_function(model: Any) -> bool:
    """A teacher of the user's own; modules are callable too."""
    return callable(model) and not isinstance(model, nn.Module)


def _taught(inputs: dict[str, Any], mask: torch.Tensor) -> torch.Tensor:
    """(B, T) bool: valid tokens of rows that have a teacher."""
    rows = inputs.get("teacher_rows")
    return mask if rows is None else mask & rows.unsqueeze(1)


def no_reward(completions: list[Any], **kwargs: Any) -> list[float]:
    """Stands in for a reward function where distillation alone needs none."""
    return [0.0] * len(completions)


class SAFDistillTrainer(BasePolicyTrainer):
    """Trains on rewards and on a teacher at once, with the teacher kept in bounds (SAF-OPD, arXiv 2607.29209).

    A drop-in for `trl.GRPOTrainer`, with one more keyword:

    Args:
        teacher_model: path or hub name of a model, path of an adapter, a model object (taken over: eval mode, frozen;
            do not use it elsewhere afterwards), or a callable (TeacherRequest) -> (B, T); several in a dict by name.
            Default: what `args.teacher_*` and `args.teachers` say. The teacher must share the student's vocabulary.
        teacher_processing_class: the teacher's tokenizer, to compare vocabularies and render its prompts; in a dict by
            name for several. Default: `args.teacher_tokenizer_name_or_path`, else the one beside the model.
        teacher_prompt_func: row of the dataset -> another prompt for the teacher, a string or messages; the
            completion stays the student's. Default: `args.teacher_prompt_column`, else the student's prompt.

    Instead of a teacher, `callbacks` may hold one whose `on_rollout` fills `rollout["teacher_per_token_logps"]`.

    Attributes:
        fusion_schedule: the `FusionSchedule` of the run.

    Raises:
        ValueError: no source of teacher log-probabilities, two of them, or one that does not fit the student.
        TeacherError: a server that does not answer; during training, any teacher that gives no usable answer.

    Examples:
        >>> trainer = SAFDistillTrainer(
        ...     student, reward, SAFDistillConfig("out"), train_dataset=dataset, teacher_model=teacher
        ... )
        >>> trainer.train()
    """

    _CONFIG = SAFDistillConfig
    _name = "SAF-Distill"
    _tag_names: ClassVar[list[str]] = ["trl", "saf-opd", "trl-softgate"]
    _paper: ClassVar[dict[str, Any]] = {
        "title": "SAF-OPD",
        "id": "2607.29209",
        "citation": """@article{safopd2026,
  title         = {SAF-OPD},
  year          = {2026},
  eprint        = {2607.29209},
  archivePrefix = {arXiv}
}""",
    }
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
        teacher_prompt_func: Callable[[Mapping[str, Any]], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if teacher_model is model and not isinstance(model, str):
            raise ValueError("`teacher_model` is the student itself, which training changes: pass a copy or a path.")
        if reward_funcs is None and getattr(args, "grpo_coef", 1.0) == 0 and kwargs.get("environment_factory") is None:
            # GRPOTrainer asks for a source of rewards, distillation alone has no use for one
            reward_funcs = no_reward
        if isinstance(args, SAFDistillConfig):
            _teacher_sources(args, teacher_model, callbacks or [])  # before a model is loaded in vain
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
        self._before_step: dict[str, Any] | None = None
        sources = _teacher_sources(self.args, teacher_model, callbacks or [])
        if sources and self.args.opd_coef != 0:
            teacher = self._build_teacher(sources, teacher_processing_class, teacher_prompt_func)
            self.add_callback(TeacherLogprobsCallback(teacher))

    def _build_teacher(
        self, sources: dict[str | None, tuple[TeacherOptions, Any]], processing_class: Any, prompt: Any
    ) -> Teacher:
        sharded = is_sharded(self.accelerator)
        student = Student(
            model=self.model,
            tokenizer=self._tokenizer,
            temperature=self.temperature,
            device=self.accelerator.device,
            trust_remote_code=self.args.trust_remote_code,
            longest_row=self._longest_row,
            shard=functools.partial(shard_frozen, accelerator=self.accelerator) if sharded else None,
            most=self._most if sharded else None,
        )
        if isinstance(processing_class, dict) and (unknown := processing_class.keys() - sources.keys()):
            raise ValueError(f"`teacher_processing_class` names {sorted(unknown)}, which is no teacher.")
        teachers: dict[str | None, Teacher] = {}
        own = {id(parameter) for parameter in self.model.parameters()}
        for name, (options, model) in sources.items():
            if isinstance(model, nn.Module) and any(id(parameter) in own for parameter in model.parameters()):
                raise ValueError(
                    "`teacher_model` shares weights with the student, which training changes: pass a copy or a path."
                )
            if self._is_vlm and not _is_function(model) and options.source != "callable":
                raise ValueError(
                    "This teacher scores text alone: for a vision-language student pass a callable of your own as "
                    "`teacher_model`."
                )
            tokenizer = processing_class.get(name) if isinstance(processing_class, dict) else processing_class
            teachers[name] = build_teacher(
                options, student, model=model, tokenizer=tokenizer, prompt=prompt, name=name
            )
        if None in teachers:
            return teachers[None]
        return RoutedTeacher({str(name): teacher for name, teacher in teachers.items()}, self.args.teacher_column)

    def _most(self, number: int) -> int:
        numbers = self.accelerator.gather(torch.tensor([number], device=self.accelerator.device))
        return int(numbers.max().item())

    def _longest_row(self, token_ids: Callable[[Mapping[str, Any]], list[int]] | None, column: str | None) -> int:
        """Tokens of the longest prompt, by characters, and completion; of a teacher's prompt that is computed, and of
        a dataset that is streamed, only the completion is known."""
        length: Any = self.max_completion_length
        dataset: Any = self.train_dataset
        column = "prompt" if token_ids is None else column
        if column is None or not hasattr(dataset, "__len__") or column not in dataset[0]:
            return length
        prompts = dataset[column]
        longest = max(range(len(prompts)), key=lambda i: len(str(prompts[i])))
        if token_ids is not None:
            return length + len(token_ids(dataset[longest]))
        return length + len(self._tokenize_prompts([prompts[longest]])[0][0])

    # Rollout

    @property
    def _running_step(self) -> int:
        return self.state.global_step + 1

    def _multiplier(self) -> float:
        """Factor on the teacher's term in the running step; 0 means 0 for the rest of the run."""
        return self.args.opd_coef * self.fusion_schedule.multiplier(self._running_step)

    def _dispatch(self, event: str, **kwargs: Any) -> None:
        super()._dispatch(event, teacher_needed=self._multiplier() != 0, **kwargs)

    def _dispatch_rollout(self, rollout: dict[str, Any]) -> None:
        if self._multiplier() == 0:
            super()._dispatch_rollout(rollout)
            # what cannot matter is not carried along
            rollout.pop("teacher_per_token_logps", None)
            return
        failure: Exception | None = None
        missing, total = torch.zeros(2, dtype=torch.long, device=self.accelerator.device)
        try:
            super()._dispatch_rollout(rollout)
            missing, total = self._take_scores(rollout)
        except Exception as error:
            failure = error
        # a process that failed alone would leave the others waiting for it
        counts = torch.stack([missing, total, torch.full_like(total, failure is not None)])
        missing, total, failed = self.accelerator.reduce(counts, reduction="sum").tolist()
        if failure is None and failed:
            failure = TeacherError(f"The teacher failed in {failed} other process(es); their output says why.")
        elif missing > _MISSING_LIMIT * total:
            failure = failure or TeacherError(
                f"The teacher gave no finite log-probability for {missing} of {total} tokens, above the limit of "
                f"{_MISSING_LIMIT:.0%}. Check the teacher for overflow (try float32) or a truncated answer."
            )
        if failure is not None:
            if self.args.save_on_teacher_failure and self._before_step is not None and self.model.training:
                self._save_before_step()
            raise failure

    def _take_scores(self, rollout: dict[str, Any]) -> torch.Tensor:
        """Check what the callbacks filled in; number of tokens without a value, and of all that should have one."""
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
        scores = scores.detach().to(device=rollout["completion_ids"].device, dtype=torch.float32)
        rollout["teacher_per_token_logps"] = scores
        mask = _loss_mask(rollout)
        taught = _taught(rollout, mask)
        if "teacher_rows" in rollout:
            mode = "train" if self.model.training else "eval"
            statistics.merge(self._statistics[mode], {"distill/taught_share": statistics.mean(taught, mask)})
        return torch.stack([(taught & ~torch.isfinite(scores)).sum(), taught.sum()])

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        super()._maybe_log_save_evaluate(*args, **kwargs)
        self._remember()

    def _remember(self) -> None:
        """Keep what a failing rollout changes of the state that a checkpoint written now would hold."""
        if not self.args.save_on_teacher_failure:
            return
        self._before_step = {
            "random": random_state(),
            "metrics": {name: list(values) for name, values in self._metrics["train"].items()},
            "logs": copy.deepcopy(self._logs),
            "tr_loss": self._tr_loss.clone(),
            "tokens_seen": self.state.num_input_tokens_seen,
        }

    def _save_before_step(self) -> None:
        """Write the checkpoint of the last finished optimizer step: a resume generates the failed rollout again."""
        assert self._before_step is not None
        before = self._before_step
        set_random_state(before["random"])
        self._metrics["train"] = defaultdict(list, before["metrics"])
        self._logs = before["logs"]
        self._tr_loss = before["tr_loss"]
        self.state.num_input_tokens_seen = before["tokens_seen"]
        self._statistics["train"] = {}
        self._step = self.state.global_step * self.args.gradient_accumulation_steps
        self._save_checkpoint(self.model, trial=None)

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
        taught = _taught(inputs, mask)
        known = has_teacher_value(scores, taught)
        student = per_token_logps.detach() if self.args.opd_student_logps == "current" else old_per_token_logps
        collected["distill/kl"] = statistics.mean(k3_divergence(per_token_logps.detach(), scores, mask), known)
        opd = opd_advantage(student, scores, mask)
        fused = fuse_advantages(
            inputs["advantages"],
            opd,
            mask,
            available=known,
            expected=taught,
            grpo_coef=self.args.grpo_coef,
            opd_coef=self.args.opd_coef,
            multiplier=self.fusion_schedule.multiplier(self._running_step),
            top_k_percent=self.args.opd_top_k_percent,
            tanh_coef=self.args.opd_tanh_coef,
        )
        collected |= fused.statistics
        if self._observer is not None and self.model.training:
            self._observer.teacher(opd, inputs["completion_ids"], inputs["advantages"], known)
        return fused.advantages

    def _has_signal(self, inputs: dict[str, Any], mask: torch.Tensor) -> torch.Tensor:
        rewarded = super()._has_signal({"advantages": self.args.grpo_coef * inputs["advantages"]}, mask)
        if "teacher_per_token_logps" not in inputs or self._multiplier() == 0:
            return rewarded
        return rewarded | _taught(inputs, mask).any(1)

    def _objective(
        self,
        per_token_logps: torch.Tensor,
        old_per_token_logps: torch.Tensor,
        advantages: torch.Tensor,
        mask: torch.Tensor,
    ) -> ObjectiveOutput:
        tensors = (per_token_logps, old_per_token_logps, advantages, mask)
        if (gate := self._gate) is not None:
            return sapo_loss(*tensors, **vars(gate))
        clip = {"epsilon_low": self.epsilon_low, "epsilon_high": self.epsilon_high, "delta": self.args.delta}
        if self.args.policy_objective == "grpo":
            return grpo_loss(*tensors, **clip)
        return gspo_loss(*tensors, level="token" if advantages.dim() == 2 else "sequence", **clip)

    # Schedule

    def _on_step_statistics(self, merged: dict[str, Statistic]) -> None:
        super()._on_step_statistics(merged)
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
        return super()._progress() | {"fusion_schedule": self.fusion_schedule.state_dict()}

    def _restore_progress(self, progress: dict[str, Any]) -> None:
        super()._restore_progress(progress)
        self.fusion_schedule.load_state_dict(progress["fusion_schedule"])

    def _begin_training(self) -> None:
        if self.args.opd_coef != 0:
            self.args._check_warmup(self.state.max_steps)
        self.fusion_schedule = self.args._schedule(max(self.state.max_steps, 1))
        super()._begin_training()
        self._remember()
