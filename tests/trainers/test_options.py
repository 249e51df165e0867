"""Every option of `trl.GRPOConfig` is honored, fixed by the method, or refused; none is silently neglected."""

import dataclasses
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import yaml
from transformers import TrainerCallback, TrainingArguments
from trl import GRPOConfig, TrlParser

from trl_softgate import (
    GSPOConfig,
    GSPOTrainer,
    SAFDistillConfig,
    SAFDistillTrainer,
    SAPOConfig,
    SAPOTrainer,
    TeacherLogprobsCallback,
)

GSPO, SAPO = "gspo", "sapo"
SAF_GRPO, SAF_GSPO, SAF_SAPO = "saf-grpo", "saf-gspo", "saf-sapo"
METHODS: dict[str, tuple[type, dict[str, Any]]] = {
    GSPO: (GSPOConfig, {}),
    SAPO: (SAPOConfig, {}),
    SAF_GRPO: (SAFDistillConfig, dict(opd_warmup_steps=1)),
    SAF_GSPO: (SAFDistillConfig, dict(opd_warmup_steps=1, policy_objective="gspo")),
    SAF_SAPO: (SAFDistillConfig, dict(opd_warmup_steps=1, policy_objective="sapo")),
}
CLIPPED, GATED = (GSPO, SAF_GRPO, SAF_GSPO), (SAPO, SAF_SAPO)
ADAPTIVE = dict(adaptive_temperature_quantile=0.9)
TRAINERS = {GSPO: GSPOTrainer, SAPO: SAPOTrainer}


@dataclasses.dataclass(frozen=True)
class Refused:
    """An option that some methods refuse: the methods, and a value other than its default."""

    methods: tuple[str, ...]
    value: Any


# What becomes of each option that TRL adds to transformers.TrainingArguments:
# - honored: our loss reads it, or our config checks it; test_upstream_parity.py compares those of the loss
# - fixed: the method determines it, any other value is refused
# - Refused: means nothing to some methods
# - inherited: read by code of GRPOTrainer that is not overridden (loading, generation, rewards, logging)
STATUS: dict[str, Any] = {
    "beta": "honored",
    "top_entropy_quantile": "honored",
    "entropy_coef": "honored",
    "use_adaptive_entropy": "honored",
    "entropy_coef_min": "honored",
    "entropy_coef_max": "honored",
    "entropy_coef_delta": "honored",
    "entropy_target": "honored",
    "off_policy_mask_threshold": "honored",
    "use_bias_correction_kl": "honored",
    "router_aux_loss_coef": "honored",
    "temperature": "honored",
    "num_generations": "honored",
    "num_iterations": "honored",
    "steps_per_generation": "honored",
    "generation_batch_size": "honored",
    "shuffle_dataset": "honored",
    "use_vllm": "honored",
    "vllm_importance_sampling_correction": "honored",
    "vllm_importance_sampling_mode": "honored",
    "scale_rewards": "honored",
    "multi_objective_aggregation": "honored",
    "mask_truncated_completions": "honored",
    "trust_remote_code": "honored",
    "loss_type": "fixed",
    "importance_sampling_level": "fixed",
    "epsilon": Refused(GATED, 0.3),
    "epsilon_high": Refused(GATED, 0.3),
    "delta": Refused(GATED, 4.0),
    "sapo_temperature_pos": Refused(CLIPPED, 2.0),
    "sapo_temperature_neg": Refused(CLIPPED, 2.0),
    "vespo_k_pos": Refused(tuple(METHODS), 1.0),
    "vespo_lambda_pos": Refused(tuple(METHODS), 1.0),
    "vespo_k_neg": Refused(tuple(METHODS), 1.0),
    "vespo_lambda_neg": Refused(tuple(METHODS), 1.0),
    "model_init_kwargs": "inherited",
    "disable_dropout": "inherited",
    "cast_lm_head_to_fp32": "inherited",
    "num_generations_eval": "inherited",
    "max_completion_length": "inherited",
    "ds3_gather_for_generation": "inherited",
    "pad_to_multiple_of": "inherited",
    "top_p": "inherited",
    "top_k": "inherited",
    "min_p": "inherited",
    "generation_kwargs": "inherited",
    "chat_template_kwargs": "inherited",
    "repetition_penalty": "inherited",
    "cache_implementation": "inherited",
    "vllm_mode": "inherited",
    "vllm_model_impl": "inherited",
    "vllm_enable_sleep_mode": "inherited",
    "vllm_structured_outputs_regex": "inherited",
    "vllm_server_base_url": "inherited",
    "vllm_server_host": "inherited",
    "vllm_server_port": "inherited",
    "vllm_server_timeout": "inherited",
    "vllm_group_port": "inherited",
    "vllm_gpu_memory_utilization": "inherited",
    "vllm_max_model_length": "inherited",
    "vllm_tensor_parallel_size": "inherited",
    "vllm_importance_sampling_clip_max": "inherited",
    "vllm_importance_sampling_clip_min": "inherited",
    "vllm_importance_sampling_cap": "inherited",
    "reward_weights": "inherited",
    "sync_ref_model": "inherited",
    "ref_model_mixup_alpha": "inherited",
    "ref_model_sync_steps": "inherited",
    "max_tool_calling_iterations": "inherited",
    "log_completions": "inherited",
    "log_multimodal": "inherited",
    "num_completions_to_print": "inherited",
    "log_unique_prompts": "inherited",
    "log_completions_hub_repo": "inherited",
    "use_transformers_continuous_batching": "inherited",
    "transformers_continuous_batching_config": "inherited",
    "use_transformers_paged": "inherited",
}


def _make(method: str, folder: Path, **kwargs: Any) -> Any:
    cls, options = METHODS[method]
    return tiny.config(cls, folder, **{**options, **kwargs})


def test_the_table_holds_every_option() -> None:
    """A new option of TRL must be sorted by a person. Those of transformers itself belong to its training loop."""
    options = {f.name for f in dataclasses.fields(GRPOConfig)} - {
        f.name for f in dataclasses.fields(TrainingArguments)
    }
    assert options == STATUS.keys()


def test_options_that_the_loss_of_trl_reads_are_not_only_inherited() -> None:
    """`_compute_loss` is the one method replaced as a whole, so all that it reads must be ours to honor."""
    from trl import GRPOTrainer

    source = inspect.getsource(GRPOTrainer._compute_loss)
    read = {name for name in STATUS if f"args.{name}" in source or f"self.{name}" in source}
    assert {"beta", "delta", "loss_type", "top_entropy_quantile"} <= read
    # of dr_grpo, which no method uses
    assert {name for name in read if STATUS[name] == "inherited"} <= {"max_completion_length"}


@pytest.mark.parametrize("method", METHODS)
def test_defaults_of_inherited_options_are_trls(method: str) -> None:
    ours = {f.name: f.default for f in dataclasses.fields(METHODS[method][0])}
    for field in dataclasses.fields(GRPOConfig):
        if STATUS.get(field.name, "inherited") in ("inherited", "honored"):
            assert ours[field.name] == field.default, field.name


@pytest.mark.parametrize(
    ("name", "method"), [(n, m) for n, s in STATUS.items() if isinstance(s, Refused) for m in s.methods]
)
def test_an_option_without_effect_is_refused(name: str, method: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"`{name}` has no effect .*leave it out"):
        _make(method, tmp_path, **{name: STATUS[name].value})


@pytest.mark.parametrize(
    ("name", "method"),
    [(n, m) for n, s in STATUS.items() if isinstance(s, Refused) for m in METHODS if m not in s.methods],
)
def test_elsewhere_the_same_option_is_taken(name: str, method: str, tmp_path: Path) -> None:
    value = 2e-4 if "epsilon" in name else STATUS[name].value
    assert getattr(_make(method, tmp_path, **{name: value}), name) == value


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("loss_type", ["dapo", "bnpo", "dr_grpo", "cispo", "vespo", "luspo", "grpo", "sapo"])
def test_the_loss_type_is_fixed(method: str, loss_type: str, tmp_path: Path) -> None:
    if loss_type == ("sapo" if method in GATED else "grpo"):
        assert _make(method, tmp_path, loss_type=loss_type).loss_type == loss_type
        return
    with pytest.raises(ValueError, match=f"`loss_type='{loss_type}'` does not fit.*`aggregation`"):
        _make(method, tmp_path, loss_type=loss_type)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("level", ["token", "sequence", "sequence_token"])
def test_the_ratio_level_is_fixed(method: str, level: str, tmp_path: Path) -> None:
    if level == ("sequence" if method in (GSPO, SAF_GSPO) else "token"):
        assert _make(method, tmp_path, importance_sampling_level=level).importance_sampling_level == level
        return
    with pytest.raises(ValueError, match=f"`importance_sampling_level='{level}'` does not fit"):
        _make(method, tmp_path, importance_sampling_level=level)


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        (GSPO, dict(aggregation="mean"), "`aggregation` must be one of 'seq_mean_token_mean', 'token_mean'"),
        (SAPO, dict(scale_rewards="std"), "`scale_rewards` must be one of 'group', 'batch', 'none'"),
        (SAPO, dict(multi_objective_aggregation="sum"), "`multi_objective_aggregation` must be one of"),
        (GSPO, dict(vllm_importance_sampling_mode="token"), "`vllm_importance_sampling_mode` must be one of"),
        (SAF_GRPO, dict(policy_objective="ppo"), "`policy_objective` must be one of 'grpo', 'gspo', 'sapo'"),
        (SAF_GRPO, dict(opd_student_logps="new"), "`opd_student_logps` must be one of 'current', 'old'"),
        (GSPO, dict(epsilon=-0.1), "`epsilon` must be a finite number at least 0 and below 1"),
        (GSPO, dict(epsilon=1.0), "`epsilon` must be a finite number"),
        (GSPO, dict(epsilon=float("nan")), "`epsilon` must be a finite number"),
        (GSPO, dict(epsilon_high=-1e-4), "`epsilon_high` must be a finite number at least 0"),
        (GSPO, dict(delta=0.0), "`delta` must be a finite number above 0"),
        (GSPO, dict(beta=-0.1), "`beta` must be a finite number at least 0"),
        (GSPO, dict(temperature=0.0), "`temperature` must be a finite number above 0"),
        (GSPO, dict(top_entropy_quantile=1.5), "`top_entropy_quantile` must be a finite number"),
        (GSPO, dict(off_policy_mask_threshold=0.0), "`off_policy_mask_threshold` must be a finite number above 0"),
        *[
            (method, {f"sapo_temperature_{sign}": tau}, f"`sapo_temperature_{sign}` must be a finite number above 0")
            for method in GATED
            for sign in ("pos", "neg")
            for tau in (0.0, -1.0, float("nan"), float("inf"))
        ],
        *[
            case
            for method in GATED
            for case in (
                (
                    method,
                    dict(gate_kernel="tanh"),
                    "`gate_kernel` must be one of 'sigmoid', 'gaussian', 'exponential'",
                ),
                (method, dict(gate_hard_stop=1.0), "`gate_hard_stop` must be a finite number above 1"),
                (method, dict(**ADAPTIVE, adaptive_temperature_weight=1.0), "`adaptive_temperature_weight` must be"),
                (method, dict(**ADAPTIVE, adaptive_temperature_min=0.0), "`adaptive_temperature_min` must be"),
                (method, dict(**ADAPTIVE, adaptive_temperature_max=0.1), "`adaptive_temperature_max` must be .* 1.0"),
                (method, dict(adaptive_temperature_quantile=1.0), "`adaptive_temperature_quantile` must be"),
                (method, dict(adaptive_temperature_quantile=0.9), "has nothing to go by where each rollout is used"),
                (method, dict(adaptive_temperature_max=9.0), "has no effect without `adaptive_temperature_quantile`"),
            )
        ],
        *[
            (method, {name: value}, f"`{name}` has no effect in")
            for method in CLIPPED
            for name, value in (("gate_kernel", "gaussian"), ("gate_hard_stop", 3.0), *ADAPTIVE.items())
        ],
        *[
            (
                SAF_GRPO,
                dict(opd_top_k_percent=k),
                "`opd_top_k_percent` must be a finite number above 0 and at most 100",
            )
            for k in (0, -5.0, 100.5, float("nan"))
        ],
        *[
            (SAF_GRPO, dict(opd_tanh_coef=c), "`opd_tanh_coef` must be a finite number")
            for c in (-0.1, float("nan"), float("inf"))
        ],
        (SAF_GRPO, dict(epsilon=float("inf")), "`epsilon` must be a finite number"),
        (SAF_GRPO, dict(epsilon_high=-0.1), "`epsilon_high` must be a finite number at least 0"),
        (SAF_GRPO, dict(grpo_coef=-1.0), "`grpo_coef` must be a finite number at least 0"),
        (SAF_GRPO, dict(opd_coef=float("nan")), "`opd_coef` must be a finite number at least 0"),
        (SAF_GRPO, dict(grpo_coef=0.0, opd_coef=0.0), "both 0: there is nothing to learn from"),
        (
            SAF_GRPO,
            dict(teacher_max_tokens_per_batch=0),
            "`teacher_max_tokens_per_batch` must be a finite number at least 1",
        ),
        (SAF_GRPO, dict(opd_kl_drop_threshold=1.5), "kl_drop_threshold` must be a finite number"),
        (SAF_GRPO, dict(opd_anneal_min=-0.1), "anneal_min` must be a finite number"),
        (SAF_GRPO, dict(opd_warmup_steps=-1), "warmup_steps` must be"),
        (SAF_GRPO, dict(opd_warmup_steps=3, max_steps=2), "longer than the run of 2 steps.*at most 2"),
        (SAF_GRPO, dict(num_generations=1), "`num_generations=1` leaves no group to compare with: set `grpo_coef=0`"),
        (GSPO, dict(num_generations=1), "at least 2 generations"),
        (
            SAF_GRPO,
            dict(gradient_accumulation_steps=3, steps_per_generation=2),
            r"make `steps_per_generation \* num_iterations` \(2\) a multiple of `gradient_accumulation_steps` \(3\)",
        ),
        (SAPO, dict(gradient_accumulation_steps=3, steps_per_generation=2, entropy_coef=0.1), "entropy bonus"),
    ],
)
def test_a_bad_value_is_refused(method: str, options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        _make(method, tmp_path, **options)


@pytest.mark.parametrize("name", ["epsilon", "epsilon_high"])
@pytest.mark.parametrize("method", [GSPO, SAF_GSPO])
def test_a_token_clip_range_for_sequences_is_warned_of(method: str, name: str, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=f"`{name}=0.2`.*use `epsilon=3e-4, epsilon_high=4e-4`") as caught:
        _make(method, tmp_path, **{name: 0.2})
    assert any(w.filename == tiny.__file__ for w in caught)  # points at the caller


@pytest.mark.parametrize("method", [GSPO, SAF_GSPO])
def test_token_means_for_sequences_are_warned_of(method: str, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="use `aggregation='seq_mean_token_mean'`"):
        _make(method, tmp_path, aggregation="token_mean")


def test_repeated_prompts_in_distillation_alone_are_warned_of(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="`num_generations=1` and more prompts"):
        _make(SAF_GRPO, tmp_path, grpo_coef=0.0)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("method", METHODS)
def test_defaults_are_the_papers_and_silent(method: str, tmp_path: Path) -> None:
    args = _make(method, tmp_path)
    if method in CLIPPED:
        assert (args.epsilon, args.epsilon_high) == ((0.2, 0.27) if method == SAF_GRPO else (3e-4, 4e-4))
    else:
        assert (args.sapo_temperature_pos, args.sapo_temperature_neg) == (1.0, 1.05)
    assert args.aggregation == ("token_mean" if method in (SAF_GRPO, SAF_SAPO) else "seq_mean_token_mean")


@pytest.mark.parametrize(
    ("value", "kept"), [("false", "none"), (False, "none"), ("True", "group"), ("batch", "batch")]
)
def test_scale_rewards_as_the_command_line_writes_it(value: Any, kept: str, tmp_path: Path) -> None:
    assert _make(SAPO, tmp_path, scale_rewards=value).scale_rewards == kept


def test_one_completion_per_prompt_in_distillation_alone(tmp_path: Path) -> None:
    args = _make(SAF_GRPO, tmp_path, grpo_coef=0.0, num_generations=1)
    assert type(args.num_generations) is int  # as it goes to JSON and to the samplers
    assert args.num_generations == 1
    assert '"num_generations": 1' in args.to_json_string()


def _trainer(method: str, args: Any, **kwargs: Any) -> Any:
    cls = TRAINERS.get(method, SAFDistillTrainer)
    if cls is SAFDistillTrainer and "callbacks" not in kwargs:
        kwargs = {"teacher_model": tiny.model(7), "teacher_processing_class": tiny.tokenizer(), **kwargs}
    defaults = dict(
        model=tiny.model(), reward_funcs=tiny.reward, train_dataset=tiny.dataset(), processing_class=tiny.tokenizer()
    )
    return cls(args=args, **{**defaults, **kwargs})


@pytest.mark.parametrize("method", [GSPO, SAPO, SAF_GRPO])
def test_the_config_of_another_method_is_refused(method: str, tmp_path: Path) -> None:
    other = SAPOConfig if method == GSPO else GSPOConfig
    for cls in (other, GRPOConfig):
        with pytest.raises(TypeError, match=f"`args` of .* must be a {METHODS[method][0].__name__}"):
            _trainer(method, tiny.config(cls, tmp_path))


def test_warm_up_against_the_length_of_a_run_in_epochs(tmp_path: Path) -> None:
    """The number of steps is known only when training starts."""
    args = _make(SAF_GRPO, tmp_path, max_steps=-1, num_train_epochs=1, opd_warmup_steps=9)
    trainer = _trainer(SAF_GRPO, args)  # 16 prompts, 2 per step: 8 steps
    with pytest.raises(ValueError, match="`opd_warmup_steps=9` is longer than the run of 8 steps"):
        trainer.train()


# Command line and YAML

_COMMON = ["--output_dir", "out", "--bf16", "false", "--use_cpu", "true", "--report_to", "none"]


def _parse(cls: type, arguments: list[str]) -> Any:
    (args,) = TrlParser(cls).parse_args_and_config([*arguments, *_COMMON])  # type: ignore[misc]
    return args


@pytest.mark.parametrize("off", ["none", "None", "null"])
def test_stages_are_switched_off_on_the_command_line(off: str) -> None:
    arguments = ["--opd_top_k_percent", off, "--opd_tanh_coef", off, "--opd_kl_drop_threshold", off]
    args = _parse(SAFDistillConfig, [*arguments, "--opd_warmup_steps", "0", "--no_opd_anneal"])
    assert args.opd_top_k_percent is args.opd_tanh_coef is args.opd_kl_drop_threshold is None
    assert (args.opd_warmup_steps, args.opd_anneal) == (0, False)


def test_stages_are_switched_off_by_number() -> None:
    args = _parse(SAFDistillConfig, ["--opd_top_k_percent", "100", "--opd_tanh_coef", "0"])
    assert (args.opd_top_k_percent, args.opd_tanh_coef) == (100, None)


def test_stages_are_switched_off_in_yaml(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(dict(opd_top_k_percent=None, opd_tanh_coef=None, opd_anneal=False)))
    args = _parse(SAFDistillConfig, ["--config", str(file)])
    assert args.opd_top_k_percent is args.opd_tanh_coef is None
    assert not args.opd_anneal


def test_the_command_line_goes_before_yaml(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(dict(opd_top_k_percent=30, teacher_model_init_kwargs={"dtype": "bfloat16"})))
    args = _parse(SAFDistillConfig, ["--config", str(file), "--opd_top_k_percent", "40"])
    assert args.opd_top_k_percent == 40
    assert args.teacher_model_init_kwargs == {"dtype": "bfloat16"}


def test_a_dict_is_given_as_json_on_the_command_line() -> None:
    args = _parse(SAFDistillConfig, ["--teacher_model_init_kwargs", '{"dtype": "bfloat16"}'])
    assert args.teacher_model_init_kwargs == {"dtype": "bfloat16"}


def test_distillation_alone_from_the_command_line() -> None:
    args = _parse(SAFDistillConfig, ["--grpo_coef", "0", "--num_generations", "1", "--policy_objective", "sapo"])
    assert (args.grpo_coef, args.num_generations, args.loss_type) == (0, 1, "sapo")


@pytest.mark.parametrize(("cls", "option"), [(GSPOConfig, "epsilon"), (SAPOConfig, "sapo_temperature_neg")])
def test_method_options_from_the_command_line(cls: type, option: str) -> None:
    assert getattr(_parse(cls, [f"--{option}", "2e-4", "--aggregation", "seq_mean_token_mean"]), option) == 2e-4
    assert getattr(_parse(cls, []), option) == {f.name: f.default for f in dataclasses.fields(cls)}[option]


def test_help_renders() -> None:
    """A stray % in a help text breaks argparse."""
    for cls in (GSPOConfig, SAPOConfig, SAFDistillConfig):
        assert "--aggregation" in TrlParser(cls).format_help()  # type: ignore[arg-type]


# Evaluation


def _numbers(state: dict[str, Any]) -> dict[str, float]:
    return {name: -1.0 if value is None else float(value) for name, value in state.items()}


class _Record(TrainerCallback):
    def __init__(self, see: Callable[[], Any]) -> None:
        self.see = see
        self.seen: list[Any] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(self.see())


@pytest.mark.parametrize("method", METHODS)
def test_evaluation_does_not_touch_training(method: str, tmp_path: Path) -> None:
    """Same weights and same schedule with and without it. Both runs take fixed completions and plain gradient steps:
    an evaluation draws random numbers, which changes what is sampled, and in which order a batch's rows are summed."""
    schedule = dict(opd_warmup_steps=2, opd_kl_drop_threshold=1e-6, opd_anneal_min=0.2)
    runs: dict[str, Any] = {}
    for eval_strategy in ("no", "steps"):
        args = _make(
            method,
            tmp_path,
            max_steps=3,
            optim="sgd",
            learning_rate=0.1,
            eval_strategy=eval_strategy,
            eval_steps=1,
            per_device_eval_batch_size=2,
            entropy_coef=0.01,
            **(schedule if method.startswith("saf") else {}),
        )
        trainer = _trainer(method, args, eval_dataset=tiny.dataset(3), rollout_func=_fixed_rollout)
        record = _Record(
            lambda trainer=trainer: trainer.fusion_schedule.state_dict() if method.startswith("saf") else {}
        )
        trainer.add_callback(record)
        trainer.train()
        runs[eval_strategy] = (trainer, record.seen)
    without, evaluated = runs["no"][0], runs["steps"][0]
    for name, value in without.model.state_dict().items():
        torch.testing.assert_close(evaluated.model.state_dict()[name], value, rtol=0, atol=1e-6)
    for state, evaluated_state in zip(runs["no"][1], runs["steps"][1], strict=True):
        assert _numbers(evaluated_state) == pytest.approx(_numbers(state), rel=1e-5)

    def logged(trainer: Any, key: str) -> list[dict[str, Any]]:
        timed = ("time", "runtime", "per_second")
        return [
            {k: v for k, v in row.items() if not any(t in k for t in timed)}
            for row in trainer.state.log_history
            if key in row
        ]

    for row, evaluated_row in zip(logged(without, "entropy"), logged(evaluated, "entropy"), strict=True):
        assert evaluated_row == pytest.approx(row, rel=1e-5, abs=1e-6)
    evaluations = logged(evaluated, "eval_loss")
    assert len(evaluations) == 3
    expected = {"eval_reward", "eval_entropy", "eval_ratio/mean", "eval_policy_loss"}
    expected |= {"eval_gate/weight_pos"} if method in GATED else {"eval_clip_ratio/region_mean"}
    if method.startswith("saf"):
        expected |= {"eval_distill/kl", "eval_distill/opd_abs_max"}
    for row in evaluations:
        assert expected <= row.keys()
        assert row["eval_ratio/mean"] == pytest.approx(1)  # on-policy
        assert torch.isfinite(torch.tensor(row["eval_loss"]))


# Rollouts that do not come from `generate`


def _fixed_rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """Completions of unequal length that depend on prompt and position alone."""
    tokenizer = trainer.processing_class
    completions = [
        [4 + (7 * len(prompt) + 3 * i + 11 * t) % 250 for t in range(1 + (len(prompt) + i) % 6)]
        for i, prompt in enumerate(prompts)
    ]
    return {"prompt_ids": tokenizer(prompts)["input_ids"], "completion_ids": completions, "logprobs": None}


def _rollout_with_tool_output(prompts: list[str], trainer: Any) -> dict[str, Any]:
    output = _fixed_rollout(prompts, trainer)
    # a model token at both ends, the environment's answer between them
    completions = [[ids[0], 5, 6, *ids[1:]] for ids in output["completion_ids"]]
    masks = [[1, 0, 0, *[1] * (len(ids) - 3)] for ids in completions]
    return {**output, "completion_ids": completions, "env_mask": masks}


class _Poison(TrainerCallback):
    """Puts a value on each cell of the rollout that the model did not write."""

    def __init__(self, value: float) -> None:
        self.value = value
        self.cells = 0

    def on_rollout(self, args: Any, state: Any, control: Any, *, rollout: Any, mode: str, **kwargs: Any) -> None:
        outside = (rollout["completion_mask"] * rollout["tool_mask"]) == 0
        self.cells += int(outside.sum())
        rollout["old_per_token_logps"] = rollout["old_per_token_logps"].masked_fill(outside, self.value)


class _FixedTeacher:
    """Log-probabilities from the token ids; `poison` where the model wrote nothing."""

    def __init__(self, poison: float) -> None:
        self.poison = poison

    def __call__(self, request: Any) -> torch.Tensor:
        scores = -1.0 - (request.completion_ids % 7).float()
        tool = (request.completion_ids == 5) | (request.completion_ids == 6)
        return scores.masked_fill((request.completion_mask == 0) | tool, self.poison)


@pytest.mark.parametrize("method", METHODS)
def test_tokens_of_the_environment_have_no_gradient(method: str, tmp_path: Path) -> None:
    """Whatever log-probability they have, the trained weights and the logged numbers are the same."""
    runs = []
    for poison in (0.0, float("nan"), 1e10):
        # a second pass over the rollout, so that the old log-probabilities are there
        args = _make(method, tmp_path, num_iterations=2, entropy_coef=0.01)
        callbacks: list[Any] = [_Poison(poison)]
        if method.startswith("saf"):
            callbacks.append(TeacherLogprobsCallback(_FixedTeacher(poison)))
        trainer = _trainer(method, args, rollout_func=_rollout_with_tool_output, callbacks=callbacks)
        trainer.train()
        assert callbacks[0].cells > 0
        runs.append(trainer)
    first, *others = runs
    skip = ("step_time", "train_runtime", "train_samples_per_second", "train_steps_per_second")
    for other in others:
        for name, value in first.model.state_dict().items():
            assert torch.equal(value, other.model.state_dict()[name]), name
        for expected, row in zip(first.state.log_history, other.state.log_history, strict=True):
            assert {k: v for k, v in expected.items() if k not in skip} == {
                k: v for k, v in row.items() if k not in skip
            }


@pytest.mark.parametrize("method", [GSPO, SAPO, SAF_GRPO])
def test_an_empty_completion_is_a_clear_error(method: str, tmp_path: Path) -> None:
    def empty(prompts: list[str], trainer: Any) -> dict[str, Any]:
        output = _fixed_rollout(prompts, trainer)
        output["completion_ids"][1] = []
        return output

    trainer = _trainer(method, _make(method, tmp_path), rollout_func=empty)
    with pytest.raises(ValueError, match=r"Rows \[1\] of the rollout have an empty completion"):
        trainer.train()


class _Keep(TrainerCallback):
    def __init__(self) -> None:
        self.rollouts: list[dict[str, Any]] = []

    def on_rollout(self, args: Any, state: Any, control: Any, *, rollout: Any, mode: str, **kwargs: Any) -> None:
        self.rollouts.append(rollout)


@pytest.mark.parametrize("pad_is_eos", [False, True], ids=["pad", "pad=eos"])
@pytest.mark.parametrize("method", [GSPO, SAPO, SAF_GRPO])
def test_several_end_tokens_and_pad_as_end(method: str, pad_is_eos: bool, tmp_path: Path) -> None:
    """A completion ends with its first end token, which counts; padding behind it does not, also where it is the same
    token."""
    ends = [1, 3, *range(100, 160)]  # so many that a random model meets them
    tokenizer = tiny.tokenizer(pad_is_eos=pad_is_eos)
    keep = _Keep()
    model = tiny.model()
    model.generation_config.eos_token_id = ends
    extra: dict[str, Any] = {}
    if method == SAF_GRPO:
        extra = dict(teacher_model=tiny.model(7), teacher_processing_class=tokenizer)
    trainer = _trainer(
        method,
        _make(method, tmp_path, max_completion_length=12, mask_truncated_completions=True),
        model=model,
        processing_class=tokenizer,
        callbacks=[keep],
        **extra,
    )
    assert set(trainer.eos_token_ids) == set(ends)
    trainer.train()
    ended = 0
    for rollout in keep.rollouts:
        for ids, mask in zip(rollout["completion_ids"].tolist(), rollout["completion_mask"].tolist(), strict=True):
            length = next((t + 1 for t, token in enumerate(ids) if token in ends), None)
            if length is None:  # truncated
                assert sum(mask) == 0
            else:
                ended += 1
                assert mask == [1] * length + [0] * (len(ids) - length)
    assert ended > 0
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())
