"""Trimmed, grouped and skipped rows leave each optimizer step's gradient as it is; what would not is refused."""

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback

from trl_softgate import (
    GSPOConfig,
    GSPOTrainer,
    SAFDistillConfig,
    SAFDistillTrainer,
    SAPOConfig,
    SAPOTrainer,
)

pytestmark = pytest.mark.filterwarnings("ignore:`epsilon:UserWarning")

OPTIONS = ("trim_padding", "group_rows_by_length", "skip_zero_signal_rows")
OFF: dict[str, Any] = dict.fromkeys(OPTIONS, False)
METHODS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    # wide clips: some rows are clipped after the first update, not all
    "gspo": (GSPOTrainer, GSPOConfig, dict(epsilon=0.2, epsilon_high=0.3)),
    "sapo": (SAPOTrainer, SAPOConfig, dict(aggregation="token_mean")),
    "saf": (SAFDistillTrainer, SAFDistillConfig, dict(opd_warmup_steps=0)),
    "saf-annealed": (SAFDistillTrainer, SAFDistillConfig, dict(opd_coef=0.0)),
}
# accumulation, micro-batches per generation, iterations
WINDOWS = {"one": (4, 4, 1), "reuse": (2, 4, 2), "across": (4, 2, 2), "odd": (3, 2, 3), "single": (1, 1, 1)}


class Gradients(TrainerCallback):
    """The gradient of each optimizer step, and the rows and tokens pushed through the model for it."""

    def __init__(self) -> None:
        self.steps: list[torch.Tensor] = []
        self.pushed = [0, 0]

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.steps.append(torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None]))


def rollout(seed: int) -> Any:
    """Completions of random lengths, some of them truncated, the same for every trainer."""

    def generate(prompts: list[str], trainer: Any) -> dict[str, Any]:
        rng = random.Random(f"{seed} {prompts}")
        completions = [[rng.randrange(4, 250) for _ in range(rng.choice([1, 2, 5, 11]))] for _ in prompts]
        completions = [ids + [1] if rng.random() < 0.7 else ids for ids in completions]
        return {
            "prompt_ids": trainer.processing_class(prompts)["input_ids"],
            "completion_ids": completions,
            "logprobs": None,
        }

    return generate


def sometimes_alike(completions: list[str], **kwargs: Any) -> list[float]:
    """About half of the groups of 2 have one reward."""
    rewards = tiny.reward(completions)
    return [rewards[i - i % 2] if len(completions[i - i % 2]) % 2 else rewards[i] for i in range(len(rewards))]


def train(
    method: str,
    window: str,
    folder: Path,
    seed: int = 0,
    reward: Any = sometimes_alike,
    model: Any = None,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> tuple[Any, Gradients]:
    """In float64, so that little of a difference is rounding (rotations and norms stay float32)."""
    trainer_class, config_class, method_options = METHODS[method]
    accumulation, per_generation, iterations = WINDOWS[window]
    teacher = tiny.teacher() if method == "saf" else {}
    record = Gradients()
    model = tiny.model() if model is None else model
    trainer = trainer_class(
        model if isinstance(model, str) else model.to(dtype),
        reward,
        tiny.config(
            config_class,
            folder,
            per_device_train_batch_size=8 if window == "single" else 4,
            gradient_accumulation_steps=accumulation,
            steps_per_generation=per_generation,
            num_iterations=iterations,
            max_steps=3,
            mask_truncated_completions=True,
            optim="sgd",
            learning_rate=0.1,
            max_grad_norm=0.0,
            **{**method_options, **options},
        ),
        tiny.dataset(32),
        processing_class=tiny.tokenizer(),
        rollout_func=rollout(seed),
        callbacks=[record],
        **teacher,
    )

    def count(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if module.training and torch.is_grad_enabled():
            record.pushed[0] += len(kwargs["input_ids"])
            record.pushed[1] += kwargs["input_ids"].numel()

    trainer.model.register_forward_pre_hook(count, with_kwargs=True)
    trainer.train()
    return trainer, record


def assert_same_gradients(ours: Gradients, expected: Gradients, tolerance: float = 1e-6) -> None:
    assert len(ours.steps) == len(expected.steps) == 3
    largest = max(step.norm() for step in expected.steps)
    assert largest > 1e-3
    for gradient, reference in zip(ours.steps, expected.steps, strict=True):
        assert (gradient - reference).norm() <= tolerance * largest


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.filterwarnings("ignore:`aggregation='token_mean'`:UserWarning")
def test_the_gradient_is_the_same(method: str, window: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {}
    if window == "odd":  # the tokens of a step are not known at its start
        options["aggregation"] = "seq_mean_token_mean"
    _, expected = train(method, window, tmp_path, **OFF, **options)
    _, record = train(method, window, tmp_path, **options)
    assert_same_gradients(record, expected)
    rows, tokens = (ours / theirs for ours, theirs in zip(record.pushed, expected.pushed, strict=True))
    assert tokens < 0.9
    assert rows < 0.9 if method != "saf" else rows <= 1  # a teacher has something to say about every row


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.filterwarnings("ignore:`aggregation='token_mean'`:UserWarning")
def test_the_gradient_is_the_same_in_float32(method: str, tmp_path: Path) -> None:
    _, expected = train(method, "reuse", tmp_path, dtype=torch.float32, **OFF)
    _, record = train(method, "reuse", tmp_path, dtype=torch.float32)
    assert_same_gradients(record, expected, tolerance=1e-6)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("on", [names for k in (1, 2) for names in itertools.combinations(OPTIONS, k)], ids="+".join)
def test_each_option_by_itself(on: tuple[str, ...], seed: int, tmp_path: Path) -> None:
    _, expected = train("gspo", "reuse", tmp_path, seed, **OFF)
    options: dict[str, Any] = {**OFF, **dict.fromkeys(on, True)}
    _, record = train("gspo", "reuse", tmp_path, seed, **options)
    assert_same_gradients(record, expected)
    if on != ("group_rows_by_length",):  # which by itself saves nothing
        assert record.pushed[1] < expected.pushed[1]


# What enters the loss of each row beside its advantage
EXTRA: dict[str, dict[str, Any]] = {
    "beta": dict(beta=0.3),
    "entropy": dict(entropy_coef=0.05),
    "off-policy": dict(off_policy_mask_threshold=1e-3),
    "multiple": dict(pad_to_multiple_of=4),
    "top-entropy": dict(top_entropy_quantile=0.5),
}


@pytest.mark.parametrize("extra", EXTRA)
def test_with_other_options_of_the_loss(extra: str, tmp_path: Path) -> None:
    args: Any = dict(aggregation="seq_mean_token_mean", **EXTRA[extra])
    if extra == "beta":  # the reference model is loaded from where the policy came from
        tiny.model().save_pretrained(tmp_path / "model")
        args |= dict(model=str(tmp_path / "model"), model_init_kwargs={"dtype": "float32"})
    _, expected = train("sapo", "reuse", tmp_path, **args, **OFF)
    trainer, record = train("sapo", "reuse", tmp_path, **args)
    assert_same_gradients(record, expected)
    assert record.pushed[1] < expected.pushed[1]
    assert (record.pushed[0] < expected.pushed[0]) == (extra in ("off-policy", "multiple"))
    logged = {name for entry in trainer.state.log_history for name in entry}
    assert ("skipped_rows_share" in logged) == (extra in ("off-policy", "multiple"))


def test_router_loss_keeps_its_micro_batches(tmp_path: Path) -> None:
    options: Any = dict(router_aux_loss_coef=0.5, dtype=torch.float32)
    trainer, record = train("gspo", "one", tmp_path, model=tiny.moe_model(), **options)
    assert not trainer._savings.group
    assert not trainer._savings.skip
    _, expected = train("gspo", "one", tmp_path, model=tiny.moe_model(), **options, **OFF)
    assert_same_gradients(record, expected)
    with pytest.raises(ValueError, match="`skip_zero_signal_rows=True` would change the gradient, because the router"):
        train("gspo", "one", tmp_path, model=tiny.moe_model(), **options, skip_zero_signal_rows=True)


def test_absolute_positions_keep_their_left_padding(tmp_path: Path) -> None:
    def gpt2() -> GPT2LMHeadModel:
        torch.manual_seed(0)
        size: Any = dict(n_embd=32, n_layer=2, n_head=2, n_positions=64, pad_token_id=0, eos_token_id=1)
        dropout: Any = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
        return GPT2LMHeadModel(GPT2Config(vocab_size=300, bos_token_id=1, **size, **dropout))

    _, expected = train("sapo", "one", tmp_path, model=gpt2(), **OFF)
    trainer, record = train("sapo", "one", tmp_path, model=gpt2())
    assert not trainer._savings.trim_prompt
    assert trainer._savings.trim_completion
    assert_same_gradients(record, expected)


def test_the_share_of_skipped_rows_is_logged(tmp_path: Path) -> None:
    trainer, _ = train("sapo", "one", tmp_path)
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    for entry in logs:
        # rows without a spread of rewards, and truncated ones
        assert entry["frac_reward_zero_std"] <= entry["skipped_rows_share"] < 1
        assert entry["skipped_rows_share"] * 16 == pytest.approx(round(entry["skipped_rows_share"] * 16))


def test_a_step_without_any_signal(tmp_path: Path) -> None:
    """One masked row goes through the model: gradients are 0, not absent, as an optimizer with momentum expects."""
    trainer, record = train("gspo", "one", tmp_path, reward=lambda completions, **kwargs: [1.0] * len(completions))
    assert record.pushed[0] == 3
    assert len(record.steps) == 3
    assert all(torch.equal(step, torch.zeros_like(step)) and len(step) for step in record.steps)
    entry = trainer.state.log_history[0]
    assert entry["skipped_rows_share"] == 1
    assert entry["loss"] == 0
    assert "entropy" not in entry  # no row was scored


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        (dict(beta=0.1, skip_zero_signal_rows=True), "KL term"),
        (dict(entropy_coef=0.1, skip_zero_signal_rows=True), "entropy bonus"),
        (dict(use_adaptive_entropy=True, skip_zero_signal_rows=True), "entropy bonus"),
        (dict(top_entropy_quantile=0.5, skip_zero_signal_rows=True), "quantile"),
        (dict(top_entropy_quantile=0.5, group_rows_by_length=True), "quantile"),
    ],
)
def test_what_would_change_the_gradient_is_refused(option: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"would change the gradient, because .*{reason}.*: leave it out"):
        tiny.config(GSPOConfig, tmp_path, **option)


class _OwnAdvantages(SAPOTrainer):
    def _policy_advantages(self, inputs: dict[str, Any], *args: Any) -> torch.Tensor:
        return inputs["advantages"] + 1


class _OwnSignal(_OwnAdvantages):
    def _has_signal(self, inputs: dict[str, Any], mask: torch.Tensor) -> torch.Tensor:
        return mask.any(1)


@pytest.mark.parametrize(("cls", "skips"), [(SAPOTrainer, True), (_OwnAdvantages, False), (_OwnSignal, True)])
def test_own_advantages_are_not_taken_for_zero(cls: Any, skips: bool, tmp_path: Path) -> None:
    args = tiny.config(SAPOConfig, tmp_path)
    trainer = cls(tiny.model(), tiny.reward, args, tiny.dataset(8), processing_class=tiny.tokenizer())
    assert trainer._savings.skip == skips
