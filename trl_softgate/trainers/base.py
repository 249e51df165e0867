"""What the three trainers share: one loss, exact metrics, and a state that survives a stop."""

import dataclasses
import math
import os
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from accelerate.utils import gather_object
from torch.utils.data import Sampler
from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints
from transformers.utils import is_torch_bf16_gpu_available, is_torch_xla_available
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import RepeatSampler, get_config_model_id, pad

from ..callbacks import CollapseGuard, RunRecorder
from ..diagnostics import statistics
from ..diagnostics.observer import StepObserver
from ..diagnostics.statistics import Statistic, Tokens
from ..export import complete_card
from ..objectives import (
    AGGREGATIONS,
    GATE_KERNELS,
    LOG_RATIO_BOUND,
    AdaptiveTemperature,
    Gate,
    ObjectiveOutput,
    reduce_loss,
)
from ..objectives.policy import token_advantages
from ..objectives.ratios import as_mask, is_finite, masked
from ..objectives.temperature import SPREAD_EDGES
from ..validation import require_choice, require_number, require_whole
from . import hooks  # noqa: F401  (checks the installed TRL)
from .backend import check_backend
from .micro_batches import Savings, deal, extents, padding_matters, width
from .routing import ExpertChoices, changed_choices
from .sampling import check_sampling, sampled_logps
from .state import (
    TrainingState,
    is_complete,
    last_complete,
    load_state,
    mark_complete,
    save_state,
    state_path,
    unmark,
)

_NONFINITE = "nonfinite_share"
_MISMATCH = "sampling/sampling_logp_difference"
_MISMATCH_LIMIT = 0.05


@dataclass
class BasePolicyConfig(GRPOConfig):
    """Options that the three trainers add to `trl.GRPOConfig`.

    Args:
        aggregation: `"seq_mean_token_mean"` (mean over rows of the row's token mean) or `"token_mean"` (mean over
            all tokens of the optimizer step, all micro-batches and processes).
        trim_padding: cut columns of a micro-batch that are padding in all of its rows.
        group_rows_by_length: deal the rows of an optimizer step to its micro-batches by length.
        skip_zero_signal_rows: leave rows whose advantage is 0 at every token out of forward and backward; they still
            count in the averages. The metrics of tokens (entropy, ratios) are then those of the other rows.
        old_logps_source: `"recompute"` (log pi_old by a forward, where it is needed) or `"rollout"` (the
            log-probabilities with which vLLM or transformers sampled the tokens; arXiv 2507.18071, section 5.4).
        resume_inexact: accept a checkpoint that lacks the training state of this package, or was written with
            another batch geometry; the resumed run then differs from one that never stopped.
        gate_kernel: shape of SAPO's gate, one of `objectives.GATE_KERNELS`. Paper: `"sigmoid"`.
        gate_hard_stop: a ratio R > 1: tokens whose ratio is outside [1/R, R] give no gradient in SAPO; None: off.
        adaptive_temperature_quantile: share of the tokens, in (0, 1), that SAPO's temperature is chosen for from the
            spread of the log-ratios in the last steps; None: the temperatures stay as they are given. See
            `objectives.AdaptiveTemperature`.
        adaptive_temperature_weight: gate weight that these tokens keep at least; in (0, 1).
        adaptive_temperature_min, adaptive_temperature_max: bounds of the temperature of positive advantages; > 0. That
            of the others keeps its proportion.
        record: write the numbers of every optimizer step to `output_dir/record` (`trl-softgate report` shows them).
        record_every: steps from one to the next whose histograms and rows are recorded too, >= 1.

    `trim_padding`, `group_rows_by_length` and `skip_zero_signal_rows` are on where they leave the gradient of the
    optimizer step as it is (None), and can be switched off.

    Raises:
        ValueError: an option is out of range, or has no effect in this method.
    """

    aggregation: str = field(
        default="seq_mean_token_mean",
        metadata={
            "help": "How the loss is averaged: 'seq_mean_token_mean' (mean over rows of each row's token mean) or "
            "'token_mean' (mean over all tokens of the optimizer step)."
        },
    )
    trim_padding: bool | None = field(
        default=None,
        metadata={"help": "Cut columns of a micro-batch that are padding in all of its rows; default: where exact."},
    )
    group_rows_by_length: bool | None = field(
        default=None,
        metadata={"help": "Deal the rows of an optimizer step to its micro-batches by length; default: where exact."},
    )
    skip_zero_signal_rows: bool | None = field(
        default=None,
        metadata={
            "help": "Leave rows whose advantage is 0 at every token out of forward and backward; default: where exact."
        },
    )
    old_logps_source: str = field(
        default="recompute",
        metadata={
            "help": "Log-probabilities of the policy that sampled: 'recompute' by a forward where they are needed, or "
            "those of the 'rollout' itself."
        },
    )
    resume_inexact: bool = field(
        default=False,
        metadata={
            "help": "Accept a checkpoint without the training state of trl_softgate or with another batch geometry. "
            "The resumed run then differs from one that never stopped."
        },
    )
    gate_kernel: str = field(
        default="sigmoid",
        metadata={"help": "Shape of SAPO's gate: 'sigmoid', 'gaussian', 'exponential' or 'student_t'."},
    )
    gate_hard_stop: float | None = field(
        default=None,
        metadata={"help": "A ratio R above 1: tokens outside [1/R, R] give no gradient in SAPO; default: off."},
    )
    adaptive_temperature_quantile: float | None = field(
        default=None,
        metadata={
            "help": "Share of the tokens that SAPO's temperature is chosen for from the spread of the log-ratios; "
            "default: the temperatures stay as they are given."
        },
    )
    adaptive_temperature_weight: float = field(
        default=0.9, metadata={"help": "Gate weight that these tokens keep at least."}
    )
    adaptive_temperature_min: float = field(
        default=1.0, metadata={"help": "Lower bound of the chosen temperature of positive advantages."}
    )
    adaptive_temperature_max: float = field(
        default=20.0, metadata={"help": "Upper bound of the chosen temperature of positive advantages."}
    )
    record: bool = field(
        default=True, metadata={"help": "Write the numbers of every optimizer step to `output_dir/record`."}
    )
    record_every: int = field(
        default=10, metadata={"help": "Steps from one to the next whose histograms and rows are recorded too."}
    )

    # Options of GRPOConfig that this method has no use for: a changed value is refused rather than neglected.
    _UNUSED: ClassVar[tuple[str, ...]] = ()
    _METHOD: ClassVar[str] = ""

    def __post_init__(self) -> None:
        require_choice("aggregation", self.aggregation, AGGREGATIONS)
        # the command line has text alone, and an old spelling of "group" and "none" is true and false
        if str(self.scale_rewards).lower() in ("true", "false"):
            self.scale_rewards = str(self.scale_rewards).lower() == "true"  # type: ignore[assignment]
        require_choice("scale_rewards", self.scale_rewards, ("group", "batch", "none", True, False))
        require_choice(
            "multi_objective_aggregation",
            self.multi_objective_aggregation,
            ("sum_then_normalize", "normalize_then_sum"),
        )
        require_choice(
            "vllm_importance_sampling_mode",
            self.vllm_importance_sampling_mode,
            ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
        )
        require_number("beta", self.beta, minimum=0)
        require_number("temperature", self.temperature, above=0)
        require_number("top_entropy_quantile", self.top_entropy_quantile, minimum=0, maximum=1)
        if self.delta is not None:
            require_number("delta", self.delta, above=0)
        if self.off_policy_mask_threshold is not None:
            require_number("off_policy_mask_threshold", self.off_policy_mask_threshold, above=0)
        require_choice("old_logps_source", self.old_logps_source, ("recompute", "rollout"))
        if self.old_logps_source == "rollout":
            check_sampling(self)
            # the ratio itself is then that to the sampler
            self.vllm_importance_sampling_correction = False
        require_whole("record_every", self.record_every, minimum=1)
        self._check_exact(aux_loss=False)
        for name in self._UNUSED:
            if getattr(self, name) != self._default(name):
                raise ValueError(
                    f"`{name}` has no effect in {self._METHOD}: leave it out (got {getattr(self, name)!r})."
                )
        self._check_precision()
        super().__post_init__()
        if self.adaptive_temperature_quantile is not None and self._window <= self.gradient_accumulation_steps:
            raise ValueError(
                "`adaptive_temperature_quantile` has nothing to go by where each rollout is used for one update, as "
                "every ratio is then 1: leave it out, or raise `steps_per_generation` or `num_iterations`."
            )
        # transformers overwrites the field with accelerate's number, where that is stated
        self._accumulation = self.gradient_accumulation_steps
        if self._needs_step_tokens and self._window % self.gradient_accumulation_steps != 0:
            raise ValueError(
                f"`aggregation='token_mean'` and the entropy bonus average over all tokens of an optimizer step, "
                f"which must be known at its first micro-batch: make `steps_per_generation * num_iterations` "
                f"({self._window}) a multiple of `gradient_accumulation_steps` ({self.gradient_accumulation_steps})."
            )

    def _check_precision(self) -> None:
        """transformers refuses the same, but does not say that TRL's default is meant."""
        wanted = not self.fp16 if self.bf16 is None else self.bf16
        if wanted and not (self.use_cpu or is_torch_bf16_gpu_available() or is_torch_xla_available()):
            raise ValueError(
                "`bf16` is on, as it is by default, and this machine has no accelerator for bfloat16: set "
                "`bf16=False`, for the CPU `use_cpu=True` too (of a recipe: --bf16 false --use_cpu true)."
            )

    def _inexact(self, aux_loss: bool) -> dict[str, str]:
        """Why an option would change the gradient, by its name."""
        reasons: dict[str, str] = {}
        if self.top_entropy_quantile < 1:
            reasons["group_rows_by_length"] = (
                "`top_entropy_quantile` takes its quantile over the rows of each micro-batch"
            )
        if aux_loss:
            reasons["group_rows_by_length"] = "the router's auxiliary loss is a mean over the rows of each micro-batch"
        # what ties a row to its micro-batch needs it there, too
        if "group_rows_by_length" in reasons:
            reasons["skip_zero_signal_rows"] = reasons["group_rows_by_length"]
        if self.beta != 0:
            reasons["skip_zero_signal_rows"] = "the KL term (`beta`) acts on every row"
        if self.entropy_coef != 0 or self.use_adaptive_entropy:
            reasons["skip_zero_signal_rows"] = "the entropy bonus acts on every row"
        return reasons

    def _check_exact(self, aux_loss: bool) -> None:
        for name, reason in self._inexact(aux_loss).items():
            if getattr(self, name):
                raise ValueError(f"`{name}=True` would change the gradient, because {reason}: leave it out.")

    @classmethod
    def _default(cls, name: str) -> Any:
        return next(field.default for field in dataclasses.fields(cls) if field.name == name)

    def _fix(self, name: str, value: object, instead: str) -> None:
        """Refuse another value of an option that the method itself determines."""
        if getattr(self, name) != value:
            raise ValueError(
                f"`{name}={getattr(self, name)!r}` does not fit: {self._METHOD} sets it to {value!r}. {instead}"
            )

    def _check_clip_range(self) -> None:
        require_number("epsilon", self.epsilon, minimum=0, below=1)
        if self.epsilon_high is not None:
            require_number("epsilon_high", self.epsilon_high, minimum=0)

    def _check_gate(self) -> None:
        for name in ("sapo_temperature_pos", "sapo_temperature_neg"):
            require_number(name, getattr(self, name), above=0)
        require_choice("gate_kernel", self.gate_kernel, GATE_KERNELS)
        if self.gate_hard_stop is not None:
            require_number("gate_hard_stop", self.gate_hard_stop, above=1)
        if self.adaptive_temperature_quantile is None:
            for name in ADAPTIVE_OPTIONS[1:]:
                if getattr(self, name) != self._default(name):
                    raise ValueError(f"`{name}` has no effect without `adaptive_temperature_quantile`: set both.")
            return
        require_number("adaptive_temperature_quantile", self.adaptive_temperature_quantile, above=0, below=1)
        require_number("adaptive_temperature_weight", self.adaptive_temperature_weight, above=0, below=1)
        require_number("adaptive_temperature_min", self.adaptive_temperature_min, above=0)
        require_number(
            "adaptive_temperature_max", self.adaptive_temperature_max, minimum=self.adaptive_temperature_min
        )

    @property
    def _has_gate(self) -> bool:
        """Whether the objective is SAPO's."""
        return False

    def _check_gspo(self, stacklevel: int = 4) -> None:
        """Warn of a clip range that is meant for token ratios, and of an averaging that is not GSPO's."""
        for name in ("epsilon", "epsilon_high"):
            value = getattr(self, name)
            if value is not None and value > 0.1:
                warnings.warn(
                    f"`{name}={value}` is a range for token ratios. A GSPO ratio is the geometric mean over the "
                    "sequence and moves by about 1e-4: use `epsilon=3e-4, epsilon_high=4e-4` (arXiv 2507.18071, "
                    "section 5.1), or nothing will ever be clipped.",
                    UserWarning,
                    stacklevel=stacklevel,
                )
        if self.aggregation == "token_mean":
            warnings.warn(
                "`aggregation='token_mean'` weighs a sequence by its length, while GSPO's objective gives every "
                "sequence the same weight: use `aggregation='seq_mean_token_mean'` (arXiv 2507.18071, eq. 5).",
                UserWarning,
                stacklevel=stacklevel,
            )

    @property
    def _window(self) -> int:
        """Micro-batches between two generations."""
        assert self.steps_per_generation is not None  # set by GRPOConfig.__post_init__
        return self.steps_per_generation * self.num_iterations

    @property
    def _needs_step_tokens(self) -> bool:
        return self.aggregation == "token_mean" or self.entropy_coef != 0 or self.use_adaptive_entropy


AGGREGATION_HINT = "Leave it out, and choose the averaging with `aggregation`: 'seq_mean_token_mean' or 'token_mean'."
VESPO_OPTIONS = ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg")
ADAPTIVE_OPTIONS = (
    "adaptive_temperature_quantile",
    "adaptive_temperature_weight",
    "adaptive_temperature_min",
    "adaptive_temperature_max",
)
SAPO_OPTIONS = (
    "sapo_temperature_pos",
    "sapo_temperature_neg",
    "gate_kernel",
    "gate_hard_stop",
    *ADAPTIVE_OPTIONS,
)
CLIP_OPTIONS = ("epsilon", "epsilon_high", "delta")


class _EpochRepeatSampler(RepeatSampler):
    """`RepeatSampler` whose order depends on the epoch, not on how many epochs this process has seen.

    TRL draws the e-th epoch's order from a generator that lives on in the process; a run resumed in the third epoch
    would see the first one's order.
    """

    def __init__(self, *args: Any, epoch: Callable[[], int], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        if self.shuffle:
            self.generator.manual_seed(self.seed or 0)
            for _ in range(self._epoch()):
                torch.randperm(self.num_samples, generator=self.generator)
        return super().__iter__()


class _LoopEvents(TrainerCallback):
    """Tells the trainer where transformers' training loop is."""

    def __init__(
        self, on_train_begin: Callable[[], None], on_epoch_begin: Callable[[], None], on_step_end: Callable[[], None]
    ) -> None:
        self._on_train_begin = on_train_begin
        self._on_epoch_begin = on_epoch_begin
        self._on_step_end = on_step_end

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._on_train_begin()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._on_epoch_begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._on_step_end()


class BasePolicyTrainer(GRPOTrainer):
    """`trl.GRPOTrainer` with a loss of ours; subclasses supply `_objective` and, where needed, `_policy_advantages`.

    More events for callbacks. Two are called once per generation batch, with the batch of this process:

    - `on_completions(args, state, control, *, completions, inputs, mode, **kwargs)` before rewards are computed, with
      `prompt_ids`, `prompt_mask`, `completion_ids` and `completion_mask`;
    - `on_rollout(args, state, control, *, rollout, inputs, mode, **kwargs)` afterwards, with `advantages` and more. It
      may add tensors of B rows to the rollout, which then travel with their rows; (B, T) are completion tokens.

    One is called at the end of each optimizer step, on every process with the same numbers:

    - `on_step_record(args, state, control, *, scalars, seen, **kwargs)`: the step's metrics as floats by name, and
      every `record_every` steps what was observed beside them (`diagnostics.observer.Seen`), else None.
    """

    _CONFIG: ClassVar[type[BasePolicyConfig]] = BasePolicyConfig
    args: BasePolicyConfig
    # transformers types these as optional or as what a single process has
    model: Any
    accelerator: Any

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: BasePolicyConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        reward_processing_classes: Any = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        quantization_config: Any = None,
        peft_config: Any = None,
        tools: list[Callable[..., Any]] | None = None,
        rollout_func: Callable[..., Any] | None = None,
        environment_factory: Any = None,
    ) -> None:
        if args is None:
            name = model if isinstance(model, str) else get_config_model_id(model.config)
            args = self._CONFIG(f"{name.split('/')[-1]}-{self._name}")
        elif not isinstance(args, self._CONFIG):
            raise TypeError(
                f"`args` of {type(self).__name__} must be a {self._CONFIG.__name__}, got {type(args).__name__}: its "
                "defaults and checks belong to the method."
            )
        # Mergeable statistics of the running step (train) or evaluation, and those of finished steps not yet logged
        self._statistics: dict[str, dict[str, Statistic]] = {"train": {}, "eval": {}}
        self._finished: dict[str, list[dict[str, Statistic]]] = {"train": [], "eval": []}
        self._step_tokens: torch.Tensor | None = None
        self._restored: TrainingState | None = None
        self._epoch = 0
        self._inputs: list[dict[str, Any]] = []
        super().__init__(
            model=model,
            reward_funcs=reward_funcs,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            reward_processing_classes=reward_processing_classes,
            callbacks=callbacks,
            optimizers=optimizers,
            quantization_config=quantization_config,
            peft_config=peft_config,
            tools=tools,
            rollout_func=None if rollout_func is None else _checked_rollout(rollout_func),
            environment_factory=environment_factory,
        )
        check_backend(self.args, self.accelerator)
        self.args._check_exact(self.aux_loss_enabled)
        self._savings = self._resolve_savings()
        self._generated_at: int | None = None
        self._awaits_old_logps = False
        self._awaits_experts = False
        self._experts = ExpertChoices(self.model, self.args.max_completion_length or 1) if self.args.record else None
        self._expert_choices: torch.Tensor | None = None
        self._observer: StepObserver | None = None
        self._temperature: AdaptiveTemperature | None = None
        self._spread: torch.Tensor | None = None
        self._step_statistics: dict[str, Statistic] = {}
        self._told: dict[str, int] = {}
        self._last_grad_norm: Any = None
        if self.args.record:
            self.add_callback(RunRecorder(self.args._has_gate and self.args.gate_kernel == "sigmoid"))
        self.add_callback(_LoopEvents(self._begin_training, self._begin_epoch, self._tell_step))

    def _resolve_savings(self) -> Savings:
        inexact = self.args._inexact(self.aux_loss_enabled)

        def on(name: str) -> bool:
            value = getattr(self.args, name)
            return name not in inexact if value is None else value

        left, right = padding_matters(self.model.config)
        multiple: Any = self.pad_to_multiple_of
        return Savings(
            trim_prompt=on("trim_padding") and not left,
            trim_completion=on("trim_padding") and not right,
            group=on("group_rows_by_length"),
            skip=on("skip_zero_signal_rows") and self._knows_signal(),
            multiple=multiple,
        )

    def _knows_signal(self) -> bool:
        """Whether `_has_signal` speaks of the loss in use: a subclass that changes one must change the other."""
        for cls in type(self).__mro__:
            if "_has_signal" in vars(cls):
                return True
            if "_policy_advantages" in vars(cls) or "_compute_loss" in vars(cls):
                return False
        return False

    # Rollout

    def _get_train_sampler(self, dataset: Any = None) -> Sampler:
        return _EpochRepeatSampler(
            data_source=self.train_dataset if dataset is None else dataset,
            mini_repeat_count=self.num_generations,
            batch_size=(self.args.generation_batch_size or 0) // (self.num_generations or 1),
            repeat_count=self.args._window,
            shuffle=self.shuffle_dataset,
            seed=self.args.seed,
            epoch=lambda: self._epoch,
        )

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> tuple[list[list[int]], Any]:
        if self.args.old_logps_source == "rollout" and not self.use_vllm:
            model = self.accelerator.unwrap_model(self.model_wrapped)
            with sampled_logps(model, self.temperature) as record:
                completion_ids, _ = super()._generate_single_turn(*args, **kwargs)
            logprobs: Any = [row[: len(ids)] for row, ids in zip(record.rows(), completion_ids, strict=True)]
        else:
            completion_ids, logprobs = super()._generate_single_turn(*args, **kwargs)
        _require_completions(completion_ids)
        return completion_ids, logprobs

    def _generate(self, prompts: list[Any]) -> Any:
        generated = super()._generate(prompts)
        if self.args.old_logps_source == "rollout":
            _require_logprobs(generated[1], generated[4])
        if self._listeners("on_completions"):
            self._dispatch("on_completions", completions=self._padded(generated[0], generated[1]))
        return generated

    def _padded(self, prompt_ids: list[list[int]], completion_ids: list[list[int]]) -> dict[str, torch.Tensor]:
        """The rollout's four tensors as `GRPOTrainer` will make them."""
        tokenizer: Any = self._tokenizer
        multiple: Any = self.pad_to_multiple_of
        padded = {}
        for name, rows, side in (("prompt", prompt_ids, "left"), ("completion", completion_ids, "right")):
            ids = [torch.tensor(row, dtype=torch.long) for row in rows]
            for kind, tensors, value in (
                ("ids", ids, tokenizer.pad_token_id),
                ("mask", [torch.ones_like(row) for row in ids], 0),
            ):
                padded[f"{name}_{kind}"] = pad(tensors, value, side, multiple).to(self.accelerator.device)
        if self.mask_truncated_completions:
            ends = {*self.eos_token_ids, tokenizer.pad_token_id}
            complete = torch.tensor([row[-1] in ends for row in completion_ids], device=self.accelerator.device)
            padded["completion_mask"] *= complete.unsqueeze(1)
        return padded

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        self._inputs = inputs
        from_rollout = self.args.old_logps_source == "rollout"
        # where TRL asks for log pi_old
        asks = self.args.gradient_accumulation_steps % self.args._window != 0
        self._awaits_old_logps = from_rollout and asks
        self._awaits_experts = not from_rollout and asks and self.model.training and self._experts is not None
        rollout = super()._generate_and_score_completions(inputs)
        if from_rollout:
            rollout["old_per_token_logps"] = rollout["sampling_per_token_logps"]
        if self._expert_choices is not None:
            rollout["expert_choices"], self._expert_choices = self._expert_choices, None
        self._dispatch_rollout(rollout)
        return rollout

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, Any, Any]:
        if self._awaits_old_logps:
            # the first call for a rollout; its answer is known
            self._awaits_old_logps = False
            return torch.zeros_like(input_ids[:, -logits_to_keep:], dtype=torch.float32), None, None
        arguments = (model, input_ids, attention_mask, logits_to_keep, batch_size)
        if batch_size is None or any(value is not None for value in kwargs.values()):
            return super()._get_per_token_logps_and_entropies(*arguments, **kwargs)
        # the first call for a rollout is that for log pi_old
        watches, self._awaits_experts = self._awaits_experts, False
        # log pi_old and log pi_ref of a rollout: rows of similar length together, without their padding
        start = input_ids.shape[1] - logits_to_keep
        sizes = torch.stack(extents(attention_mask[:, :start], attention_mask[:, start:]), dim=1).tolist()
        order = list(range(len(sizes)))
        if self._savings.group:
            order.sort(key=lambda i: -sum(sizes[i]))
        logps = torch.zeros(input_ids[:, start:].shape, dtype=torch.float32, device=input_ids.device)
        for first in range(0, len(order), batch_size):
            rows = order[first : first + batch_size]
            prompt = width([sizes[i][0] for i in rows], start, self._savings.trim_prompt, self._savings.multiple)
            completion = width(
                [sizes[i][1] for i in rows], logits_to_keep, self._savings.trim_completion, self._savings.multiple
            )
            index = torch.tensor(rows, device=input_ids.device)
            columns = slice(start - prompt, start + completion)
            with self._watched_experts(watches) as seen:
                scored, _, _ = super()._get_per_token_logps_and_entropies(
                    model, input_ids[index, columns], attention_mask[index, columns], completion
                )
            logps[index, :completion] = scored.float()
            self._keep_experts(seen, index, completion, logps)
        return logps, None, None

    def _watched_experts(self, watches: bool) -> AbstractContextManager[list[torch.Tensor]]:
        return self._experts.watch() if watches and self._experts is not None else nullcontext([])

    def _keep_experts(
        self, seen: list[torch.Tensor], index: torch.Tensor, completion_length: int, like: torch.Tensor
    ) -> None:
        """Note the experts of the policy that sampled, for the rows `index` of a rollout of the shape of `like`."""
        if self._experts is None or not seen:
            return
        choices = self._experts.at_positions(seen, len(index), completion_length)
        if choices is None:
            return
        if self._expert_choices is None:
            positions = like[:, :: self._experts.stride].shape[1]
            self._expert_choices = choices.new_full((len(like), positions, *choices.shape[2:]), -1)
        self._expert_choices[index, : choices.shape[1]] = choices

    def _dispatch_rollout(self, rollout: dict[str, Any]) -> None:
        """Tell callbacks of a finished rollout."""
        self._dispatch("on_rollout", rollout=rollout)

    def _listeners(self, event: str) -> list[Callable[..., None]]:
        """The methods of callbacks for an event of ours; transformers' handler calls only those that all have."""
        methods = [getattr(callback, event, None) for callback in self.callback_handler.callbacks]
        return [method for method in methods if method is not None]

    def _dispatch(self, event: str, **kwargs: Any) -> None:
        for method in self._listeners(event):
            method(
                self.args,
                self.state,
                self.control,
                mode="train" if self.model.training else "eval",
                inputs=self._inputs,
                model=self.model,
                processing_class=self.processing_class,
                **kwargs,
            )

    def _prepare_inputs(self, generation_batch: Any) -> dict[str, Any]:
        before = self._buffered_inputs
        inputs = super()._prepare_inputs(generation_batch)
        if self.model.training and self._buffered_inputs is not None and self._buffered_inputs is not before:
            self._generated_at = self.state.global_step
            self._buffered_inputs = self._deal(self._buffered_inputs)
            inputs = self._buffered_inputs[self._step % len(self._buffered_inputs)]
        if not self.args._needs_step_tokens:
            return inputs
        if not self.model.training:
            tokens = self.accelerator.reduce(_num_tokens(inputs), reduction="sum")
        else:
            if self._step_tokens is None:
                self._step_tokens = self._count_step_tokens()
            tokens = self._step_tokens
        # a copy: the buffer hands the same dict out again in the next iteration
        return {**inputs, "num_tokens_in_step": tokens}

    def _deal(self, buffer: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if any(buffer[0].get(name) is not None for name in _MULTIMODAL_INPUTS):
            return buffer  # rows of pixels are not rows of the batch

        def signal(rows: dict[str, Any]) -> torch.Tensor:
            has = self._has_signal(rows, _loss_mask(rows))
            skipped = statistics.ratio(~has, torch.ones_like(has))
            statistics.merge(self._statistics["train"], {"skipped_rows_share": skipped})
            return has

        # Steps begin at multiples of the accumulation, generations at multiples of the buffer: between two multiples
        # of both, micro-batches stay together
        together = math.gcd(self.args.gradient_accumulation_steps, len(buffer)) if self._savings.group else 1

        def most(numbers: torch.Tensor) -> torch.Tensor:
            if self.is_deepspeed_enabled:
                # its engine takes no backward that has no forward: every micro-batch keeps a row
                return torch.full_like(numbers, together)
            return self.accelerator.gather(numbers.to(self.accelerator.device).unsqueeze(0)).amax(0)

        return deal(buffer, together, self._savings, signal, _num_tokens, most)

    def _has_signal(self, inputs: dict[str, Any], mask: torch.Tensor) -> torch.Tensor:
        """(B,) bool: rows to which `_policy_advantages` can give an advantage other than 0, at any token."""
        return (token_advantages(inputs["advantages"], mask) != 0).any(1)

    def _count_step_tokens(self) -> torch.Tensor:
        """Valid tokens of the optimizer step that starts now, on all processes."""
        micro_batches = self.current_gradient_accumulation_steps
        if self._step % self.args._window + micro_batches > self.args._window:
            raise RuntimeError(
                "The optimizer step spans two generations, so its number of tokens is not known yet. Make the "
                "dataset's length a multiple of the prompts per optimizer step."
            )
        assert self._buffered_inputs is not None
        slices = [self._buffered_inputs[(self._step + i) % len(self._buffered_inputs)] for i in range(micro_batches)]
        return self.accelerator.reduce(sum(_num_tokens(batch) for batch in slices), reduction="sum")

    # Loss

    def _objective(
        self,
        per_token_logps: torch.Tensor,
        old_per_token_logps: torch.Tensor,
        advantages: torch.Tensor,
        mask: torch.Tensor,
    ) -> ObjectiveOutput:
        """The method's per-token loss, 0 where the advantage is 0; arguments as in `objectives.grpo_loss`."""
        raise NotImplementedError

    def _policy_advantages(
        self,
        inputs: dict[str, Any],
        per_token_logps: torch.Tensor,
        old_per_token_logps: torch.Tensor,
        mask: torch.Tensor,
        collected: dict[str, Statistic],
    ) -> torch.Tensor:
        """The advantages that enter the objective: (B,) or (B, T)."""
        return inputs["advantages"]

    @property
    def _gate(self) -> Gate | None:
        """SAPO's gate in the running step, where the objective has one."""
        if not self.args._has_gate:
            return None
        taus = self.args.sapo_temperature_pos, self.args.sapo_temperature_neg
        if self._temperature is not None:
            taus = self._temperature.temperatures
        return Gate(*taus, self.args.gate_kernel, self.args.gate_hard_stop)

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        mode = "train" if self.model.training else "eval"
        completion_mask = inputs["completion_mask"]
        if len(completion_mask) == 0:
            # All rows of this micro-batch were left out, on every process
            return torch.zeros((), device=completion_mask.device, requires_grad=True)
        mask = _loss_mask(inputs)
        observer = self._observer if mode == "train" else None
        # One forward gives everything: a second one would break ZeRO-3 with reentrant checkpointing
        with self._watched_experts(observer is not None and "expert_choices" in inputs) as seen:
            per_token_logps, entropies, aux_loss = self._get_per_token_logps_and_entropies(
                model,
                torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
                torch.cat([inputs["prompt_mask"], completion_mask], dim=1),
                completion_mask.size(1),
                compute_entropy=True,
                compute_aux_loss=self.aux_loss_enabled,
                **{name: inputs.get(name) for name in _MULTIMODAL_INPUTS},
            )
        tokens = Tokens.of(mask)
        collected: dict[str, Statistic] = {
            _NONFINITE: tokens.mean(~is_finite(per_token_logps)),
            "entropy": tokens.mean(entropies),
        }
        # Absent where generation and optimization are aligned: the policy is still the one that sampled
        old_per_token_logps = inputs.get("old_per_token_logps")
        if old_per_token_logps is None:
            old_per_token_logps = per_token_logps.detach()
        elif self.args.old_logps_source == "rollout":
            old_per_token_logps = self._against_sampler(per_token_logps.detach(), old_per_token_logps, mask, collected)

        advantages = self._policy_advantages(inputs, per_token_logps, old_per_token_logps, mask, collected)
        objective = self._objective(per_token_logps, old_per_token_logps, advantages, mask)
        collected |= objective.statistics
        per_token_loss = objective.per_token_loss
        if observer is not None:
            observer.ratios(per_token_logps, old_per_token_logps, advantages, mask, self._gate)
            if seen:
                assert self._experts is not None
                new = self._experts.at_positions(seen, *mask.shape)
                if new is not None:
                    old = inputs["expert_choices"][:, : new.shape[1]]
                    observer.experts(changed_choices(old, new, mask[:, :: self._experts.stride]))
        if self._temperature is not None and mode == "train":
            distance = objective.ratio.detach().log().abs_()
            counts = statistics.histogram(distance, mask, SPREAD_EDGES)
            self._spread = counts if self._spread is None else self._spread + counts

        if self.off_policy_mask_threshold is not None:
            # By the sign of the rollout's own advantage, also where the fused one has another
            rewarded = inputs["advantages"]
            per_token_loss = per_token_loss * self.get_off_policy_mask(
                advantages=rewarded if rewarded.dim() == 2 else rewarded.unsqueeze(1),
                per_token_logps=masked(per_token_logps, mask),
                sampling_per_token_logps=masked(inputs.get("sampling_per_token_logps", old_per_token_logps), mask),
                mask=mask.to(per_token_loss.dtype),
                off_policy_threshold=self.off_policy_mask_threshold,
            )
        entropy_mask = None
        if self.top_entropy_quantile < 1.0:
            entropy_mask = self.get_high_entropy_mask(masked(entropies, mask), mask, 1 - self.top_entropy_quantile)
            per_token_loss = per_token_loss * entropy_mask
        if self.use_vllm and self.vllm_importance_sampling_correction:
            per_token_loss = per_token_loss * inputs["importance_sampling_ratio"]
        if self.beta != 0.0:
            x = masked(inputs["ref_per_token_logps"], mask) - masked(per_token_logps, mask)
            x = x.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
            per_token_kl = x.exp() - x - 1
            if self.args.use_bias_correction_kl:
                per_token_kl = per_token_kl * objective.ratio
            collected["kl"] = statistics.mean(per_token_kl, mask)
            per_token_loss = per_token_loss + self.beta * per_token_kl

        micro_batches = self.current_gradient_accumulation_steps if mode == "train" else 1
        step_tokens = inputs.get("num_tokens_in_step")
        if self.args.aggregation == "token_mean":
            # The gradient is averaged over processes, the number of tokens is that of all of them
            loss = reduce_loss(per_token_loss, mask, "token_mean", step_tokens) * self.accelerator.num_processes
        else:
            rows = inputs.get("num_rows", mask.size(0)) * micro_batches
            loss = reduce_loss(per_token_loss, mask, self.args.aggregation, rows)

        if self._entropy_bonus_enabled:
            size = mask.sum() if self.args.aggregation == "token_mean" else torch.ones_like(mask[:, 0]).sum()
            total = reduce_loss(per_token_loss, mask, self.args.aggregation, denominator=1)
            collected["policy_loss"] = statistics.ratio(total, size)
            entropies = masked(entropies, mask)
            loss = loss - self._entropy_bonus(entropies, mask, entropy_mask, step_tokens, micro_batches, mode)
        if self.aux_loss_enabled:
            loss = loss + self.router_aux_loss_coef * aux_loss / micro_batches
            collected["aux_loss"] = statistics.ratio(aux_loss, torch.ones_like(aux_loss))

        statistics.merge(self._statistics[mode], collected)
        return loss

    def _against_sampler(
        self,
        per_token_logps: torch.Tensor,
        sampled: torch.Tensor,
        mask: torch.Tensor,
        collected: dict[str, Statistic],
    ) -> torch.Tensor:
        """The sampler's log-probabilities; a token that it gave none for counts as sampled by the current policy."""
        known = torch.isfinite(sampled)
        collected["sampling/missing_share"] = statistics.mean(~known, mask)
        if self._generated_at == self.state.global_step:
            # no update since: what differs is the sampler's arithmetic
            difference = (per_token_logps - sampled).abs()
            collected[f"{_MISMATCH}/mean"] = statistics.mean(difference, mask & known)
            collected[f"{_MISMATCH}/max"] = statistics.maximum(difference, mask & known)
        return torch.where(known, sampled, per_token_logps)

    def _entropy_bonus(
        self,
        entropies: torch.Tensor,
        mask: torch.Tensor,
        entropy_mask: torch.Tensor | None,
        step_tokens: Any,
        micro_batches: int,
        mode: str,
    ) -> torch.Tensor:
        """coef * mean entropy, with TRL's adaptive control of the coefficient (arXiv 2505.22312)."""
        if entropy_mask is None:
            bonus = entropies.sum() / step_tokens.clamp(min=1) * self.accelerator.num_processes
            effective = mask
        else:
            # which tokens count is only known after the forward, so the mean is over the micro-batch, as in TRL
            effective = mask & entropy_mask
            bonus = (entropies * effective).sum() / effective.sum().clamp(min=1) / micro_batches
        coef = self.entropy_coef
        if self.use_adaptive_entropy and self._last_world_entropy > self.args.entropy_target:
            coef = 0.0
        if mode == "train":
            if self.use_adaptive_entropy:
                seen = torch.stack([(entropies * effective).sum(), effective.sum()]).detach()
                self._entropy_window_stats = (
                    seen if self._entropy_window_stats is None else self._entropy_window_stats + seen
                )
                if self.accelerator.sync_gradients:
                    total, count = self.accelerator.reduce(self._entropy_window_stats, reduction="sum").tolist()
                    self._last_world_entropy = total / max(count, 1.0)
                    self._entropy_window_stats = None
                    step = self.args.entropy_coef_delta
                    step = step if self._last_world_entropy <= self.args.entropy_target else -step
                    self.entropy_coef = min(
                        max(self.entropy_coef + step, self.args.entropy_coef_min), self.args.entropy_coef_max
                    )
            if self.accelerator.sync_gradients:
                self._metrics["train"]["entropy_coef"].append(self.entropy_coef)
        return coef * bonus

    # Metrics: sums and counts on the device, reduced over micro-batches and processes once per optimizer step

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        step = self.state.global_step
        if self._observer is None and step % self.args.record_every == 0 and self._listeners("on_step_record"):
            self._observer = StepObserver()
        loss = super().training_step(model, inputs, num_items_in_batch)
        if self.accelerator.sync_gradients:
            self._step_tokens = None
            self._step_statistics = self._reduce_statistics("train")
            self._on_step_statistics(self._step_statistics)
        return loss

    def _get_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
        self._last_grad_norm = super()._get_grad_norm(*args, **kwargs)
        return self._last_grad_norm

    def _tell_step(self) -> None:
        """Tell callbacks of the optimizer step that has just ended."""
        observer, self._observer = self._observer, None
        merged, self._step_statistics = self._step_statistics, {}
        if not self._listeners("on_step_record"):
            return
        seen = None
        if observer is not None:
            seen = observer.read(lambda counts: self.accelerator.reduce(counts, reduction="sum"), gather_object)
        (scalars,) = statistics.to_floats([merged])
        scalars.pop(_NONFINITE, None)
        for name, values in self._metrics["train"].items():
            if new := values[self._told.get(name, 0) :]:
                scalars[name] = sum(new) / len(new)
                self._told[name] = len(values)
        if self._last_grad_norm is not None:
            scalars["grad_norm"] = float(self._last_grad_norm)
        self._dispatch("on_step_record", scalars=scalars, seen=seen)

    def _reduce_statistics(self, mode: str) -> dict[str, Statistic]:
        local, self._statistics[mode] = self._statistics[mode], {}
        merged = statistics.unpack(self.accelerator.gather(statistics.pack(local)), local)
        self._finished[mode].append(merged)
        return merged

    def _on_step_statistics(self, merged: dict[str, Statistic]) -> None:
        """Called at the end of each optimizer step with its statistics over all processes."""
        if self._temperature is None:
            return
        counts, self._spread = self._spread, None
        if counts is None:  # every row of the step was left out
            counts = torch.zeros(len(SPREAD_EDGES) - 1, dtype=torch.long, device=self.accelerator.device)
        for name, tau in zip(("gate/tau_pos", "gate/tau_neg"), self._temperature.temperatures, strict=True):
            self._metrics["train"][name].append(tau)
        self._temperature.observe(self.accelerator.reduce(counts, reduction="sum").tolist())

    def _publish_statistics(self, mode: str) -> None:
        """Hand finished statistics to TRL's metrics, as floats; one transfer from the device.

        Raises:
            FloatingPointError: the policy gave a log-probability that is not finite.
        """
        finished, self._finished[mode] = self._finished[mode], []
        for step in statistics.to_floats(finished):
            if step.pop(_NONFINITE, 0.0) > 0:
                raise FloatingPointError(
                    f"The policy's log-probabilities are not finite near step {self.state.global_step}: its weights "
                    "or activations have overflowed. Resume from the last checkpoint with a lower `learning_rate` or "
                    "`max_grad_norm`, or in float32."
                )
            mismatch = step.get(f"{_MISMATCH}/mean", 0.0)
            if mismatch > _MISMATCH_LIMIT:
                warnings.warn(
                    f"The sampler's log-probabilities differ from the trainer's by {mismatch:.3g} per token in the "
                    f"mean near step {self.state.global_step}, above {_MISMATCH_LIMIT}: the ratio starts away from 1. "
                    "Sample in the trainer's precision, or set `old_logps_source='recompute'`.",
                    UserWarning,
                    stacklevel=2,
                )
            for name, value in step.items():
                self._metrics[mode][name].append(value)
                if mode == "train":
                    self._told[name] = len(self._metrics[mode][name])  # told when its step ended

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        mode = "train" if self.model.training else "eval"
        if mode == "eval" and self._statistics["eval"]:
            self._reduce_statistics("eval")
        self._publish_statistics(mode)
        super().log(logs, start_time)
        if mode == "train":
            self._told = {}

    # State

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """TRL's card, with the settings of the run."""
        super().create_model_card(*args, **kwargs)
        complete_card(self)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As `transformers.Trainer.train`; with `resume_from_checkpoint=True`, from the newest checkpoint of
        `output_dir` that was written to its end.

        Raises:
            ValueError: the checkpoint is incomplete, or belongs to another run.
        """
        # an earlier call may have failed between reading a checkpoint and using it
        self._restored = None
        if resume_from_checkpoint is True:
            # without one, transformers says what is missing
            resume_from_checkpoint = last_complete(str(self.args.output_dir)) or True
        output = super().train(resume_from_checkpoint, *args, **kwargs)
        for guard in self._guards:
            while (checkpoint := guard.take_rollback()) is not None:
                if self.is_deepspeed_enabled:
                    # its engine ends with each call of train(); the next one needs another
                    self.model_wrapped = self.model
                output = super().train(checkpoint, *args, **kwargs)
        return output

    def _geometry(self) -> dict[str, Any]:
        """What must not change over a resume, by the name of its option."""
        return {
            "num_processes": self.accelerator.num_processes,
            "seed": self.args.seed,
        } | {
            name: getattr(self.args, name)
            for name in (
                "per_device_train_batch_size",
                "gradient_accumulation_steps",
                "steps_per_generation",
                "num_iterations",
                "num_generations",
            )
        }

    def _progress(self) -> dict[str, Any]:
        """Further state of the method, JSON types; given back to `_restore_progress`."""
        return {} if self._temperature is None else {"temperature": self._temperature.state_dict()}

    def _restore_progress(self, progress: dict[str, Any]) -> None:
        """Take over what `_progress` gave."""
        if self._temperature is not None and "temperature" in progress:
            self._temperature.load_state_dict(progress["temperature"])

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self._publish_statistics("train")
        run_dir = self._get_output_dir(trial=trial)
        checkpoint = os.path.join(run_dir, f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        if self.args.should_save:
            unmark(checkpoint)
        if not self.args.save_only_model:
            self._save_training_state(checkpoint)
        # An older checkpoint goes only when this one is complete
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self.args.save_total_limit = limit
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            mark_complete(checkpoint)
            rotate_checkpoints(run_dir, limit, self.state.best_model_checkpoint, use_mtime=True)

    @property
    def _guards(self) -> list[CollapseGuard]:
        return [callback for callback in self.callback_handler.callbacks if isinstance(callback, CollapseGuard)]

    def _save_training_state(self, checkpoint: str) -> None:
        inside_window = self._step % self.args._window != 0
        progress: dict[str, Any] = {
            "method": self._progress(),
            "metrics": {name: [float(v) for v in values] for name, values in self._metrics["train"].items()},
            "last_logged_step": self._globalstep_last_logged,
            "guards": [guard.state_dict() for guard in self._guards],
        }
        if self.log_completions and self.accelerator.is_main_process:
            progress["logs"] = {
                name: {key: list(rows) for key, rows in value.items()} if isinstance(value, dict) else list(value)
                for name, value in self._logs.items()
                if name != "images"
            }
        save_state(
            state_path(checkpoint, self.accelerator.process_index),
            TrainingState(
                geometry=self._geometry(),
                micro_step=self._step,
                buffer=self._buffered_inputs if inside_window else None,
                progress=progress,
                tensors={"tr_loss": self._tr_loss},
            ),
        )

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            self._restored = self._load_training_state(checkpoint)
        super()._load_optimizer_and_scheduler(checkpoint)
        if self._restored is None or self.optimizer is None or self.lr_scheduler is None:
            return
        factor = 1.0
        for guard, state in zip(self._guards, self._restored.progress["guards"], strict=False):
            # the checkpoint knows of the rollbacks before it was written
            factor *= guard.learning_rate_factor ** max(0, guard.rollbacks - state["rollbacks"])
        if factor != 1:
            optimizer: Any = self.optimizer
            for group in optimizer.param_groups:
                group["lr"] *= factor
                group["initial_lr"] *= factor
            scheduler: Any = getattr(self.lr_scheduler, "scheduler", self.lr_scheduler)
            scheduler.base_lrs = [factor * rate for rate in scheduler.base_lrs]
            scheduler._last_lr = [factor * rate for rate in scheduler._last_lr]

    def _load_training_state(self, checkpoint: str) -> TrainingState | None:
        path = state_path(checkpoint, self.accelerator.process_index)
        hint = "Set `resume_inexact=True` to go on all the same; the run then differs from one that never stopped."
        inexact = "The resumed run differs from one that never stopped:"
        if not path.is_file():
            missing = (
                f"{checkpoint} has no {path.name}: it was not written by {type(self).__name__}, was saved with "
                "`save_only_model=True`, or its writing was cut off."
            )
            if self.args.resume_inexact:
                warnings.warn(f"{inexact} {missing}", UserWarning, stacklevel=2)
                return None
            raise ValueError(f"{missing} {hint}")
        if not is_complete(checkpoint):
            raise ValueError(
                f"The writing of {checkpoint} was cut off: resume from an older one; `resume_from_checkpoint=True` "
                "takes the newest that is complete."
            )
        state = load_state(path, self.accelerator.device)
        geometry = self._geometry()
        changed = [
            f"`{name}` {state.geometry.get(name)!r} -> {value!r}"
            for name, value in geometry.items()
            if state.geometry.get(name) != value
        ]
        if not changed:
            return state
        other = f"{checkpoint} was written with other settings: {', '.join(changed)}."
        if not self.args.resume_inexact:
            raise ValueError(f"{other} {hint}")
        # The rollouts do not fit the new geometry; what was observed and measured so far does
        warnings.warn(f"{inexact} {other} Its rollouts are generated again.", UserWarning, stacklevel=2)
        state.buffer = None
        state.micro_step = self.state.global_step * self.args.gradient_accumulation_steps
        return state

    def _adaptive_temperature(self) -> AdaptiveTemperature | None:
        args = self.args
        if args.adaptive_temperature_quantile is None:
            return None
        return AdaptiveTemperature(
            args.sapo_temperature_pos,
            args.sapo_temperature_neg,
            quantile=args.adaptive_temperature_quantile,
            weight=args.adaptive_temperature_weight,
            minimum=args.adaptive_temperature_min,
            maximum=args.adaptive_temperature_max,
            kernel=args.gate_kernel,
        )

    def _begin_epoch(self) -> None:
        self._epoch += 1

    def _begin_training(self) -> None:
        """Called when the training loop has set its own counters and before its first step."""
        restored, self._restored = self._restored, None
        self._statistics["train"], self._finished["train"] = {}, []
        self._step_tokens = None
        self._spread, self._temperature = None, self._adaptive_temperature()
        self._observer, self._told = None, {}
        self._epoch = int(self.state.epoch or 0) - 1
        self._entropy_window_stats = None
        self._buffered_inputs = None
        self._step = self.state.global_step * self.args.gradient_accumulation_steps
        if restored is None:
            return
        self._step = restored.micro_step
        self._buffered_inputs = restored.buffer
        progress = restored.progress
        self._metrics["train"] = defaultdict(list, progress["metrics"])
        self._told = {name: len(values) for name, values in self._metrics["train"].items()}
        self._tr_loss = restored.tensors["tr_loss"]
        # transformers reports `train_loss` over the steps of this call: what an earlier one left is not among them
        self._total_loss_scalar = -self._tr_loss.item()
        self._globalstep_last_logged = progress["last_logged_step"]
        for name, value in progress.get("logs", {}).items():
            if isinstance(value, dict):
                for key, rows in value.items():
                    self._logs[name][key].extend(rows)
            else:
                self._logs[name].extend(value)
        # a guard that was added or taken off since begins anew, or is forgotten
        for guard, state in zip(self._guards, progress["guards"], strict=False):
            guard.load_state_dict(state)
        self._restore_progress(progress["method"])


_MULTIMODAL_INPUTS = (
    "pixel_values",
    "image_grid_thw",
    "num_images",
    "pixel_attention_mask",
    "spatial_shapes",
    "num_tiles",
    "image_sizes",
    "token_type_ids",
    "mm_token_type_ids",
    "image_position_ids",
)


def _loss_mask(inputs: dict[str, Any]) -> torch.Tensor:
    """(B, T) bool: tokens that the model wrote, without padding, tool output and masked truncated rows."""
    mask = inputs["completion_mask"]
    return as_mask(mask if "tool_mask" not in inputs else mask * inputs["tool_mask"])


def _num_tokens(inputs: dict[str, Any]) -> torch.Tensor:
    """Valid tokens that a micro-batch stands for in the denominators, with those of rows that were left out."""
    return inputs["num_tokens"] if "num_tokens" in inputs else _loss_mask(inputs).sum()


def _require_logprobs(completion_ids: list[list[int]], logprobs: list[list[float]] | None) -> None:
    if logprobs is None or [len(row) for row in logprobs] != [len(ids) for ids in completion_ids]:
        raise ValueError(
            "`old_logps_source='rollout'` needs one log-probability per sampled token: let `rollout_func` return them "
            "as `logprobs`, or set `old_logps_source='recompute'`."
        )


def _require_completions(completion_ids: list[list[int]]) -> None:
    empty = [i for i, ids in enumerate(completion_ids) if len(ids) == 0]
    if empty:
        raise ValueError(
            f"Rows {empty} of the rollout have an empty completion. A completion holds at least one token: give the "
            "end-of-sequence token where the model said nothing."
        )


def _checked_rollout(rollout_func: Callable[..., Any]) -> Callable[..., Any]:
    def checked(*args: Any, **kwargs: Any) -> Any:
        output = rollout_func(*args, **kwargs)
        _require_completions(output.get("completion_ids", []))
        return output

    return checked
