"""Our loss is TRL's own, to rounding, on the same batch and weights, with each honored option on and off."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from trl import GRPOConfig, GRPOTrainer

from trl_softgate import (
    GSPOConfig,
    GSPOTrainer,
    SAFDistillConfig,
    SAFDistillTrainer,
    SAPOConfig,
    SAPOTrainer,
)

TOLERANCE = 1e-6  # on the loss and on the norm of the gradient's difference, both relative
ACCUMULATION = 2
PROMPT_LENGTHS = (5, 2, 9, 1, 7, 4)
COMPLETION_LENGTHS = (12, 7, 3, 9, 12, 1)
FULLY_MASKED = 4


@dataclass(frozen=True)
class Pair:
    """One of our trainers and the settings of the stock one that compute the same loss."""

    trainer: Callable[..., Any]
    config: type
    ours: dict[str, Any]
    stock: dict[str, Any]

    @property
    def clips(self) -> bool:
        return self.stock["loss_type"] != "sapo"


_CLIP = dict(epsilon=0.2, epsilon_high=0.27)
_SEQUENCE_CLIP = dict(epsilon=3e-4, epsilon_high=4e-4)
_NO_TEACHER = dict(opd_coef=0.0, aggregation="seq_mean_token_mean")
_SEQUENCE = dict(importance_sampling_level="sequence", **_SEQUENCE_CLIP)
PAIRS = {
    "sapo": Pair(SAPOTrainer, SAPOConfig, {}, dict(loss_type="sapo")),
    "gspo": Pair(GSPOTrainer, GSPOConfig, {}, dict(loss_type="grpo", **_SEQUENCE)),
    "saf-grpo": Pair(SAFDistillTrainer, SAFDistillConfig, _NO_TEACHER, dict(loss_type="grpo", **_CLIP)),
    "saf-grpo-token-mean": Pair(
        SAFDistillTrainer,
        SAFDistillConfig,
        dict(opd_coef=0.0, aggregation="token_mean"),
        dict(loss_type="dapo", **_CLIP),
    ),
    "saf-gspo": Pair(
        SAFDistillTrainer,
        SAFDistillConfig,
        dict(policy_objective="gspo", **_NO_TEACHER),
        dict(loss_type="grpo", **_SEQUENCE),
    ),
    "saf-sapo": Pair(
        SAFDistillTrainer, SAFDistillConfig, dict(policy_objective="sapo", **_NO_TEACHER), dict(loss_type="sapo")
    ),
}
CLIPPING = [name for name, pair in PAIRS.items() if pair.clips]


@dataclass(frozen=True)
class Option:
    """Settings of both configs, and how the batch and the trainer change with them."""

    args: dict[str, Any]
    batch: Callable[[dict[str, Any]], None] = lambda batch: None
    trainer: Callable[[Any], None] = lambda trainer: None
    model: Callable[[], Any] = tiny.model
    calls: int = 1


def _reference(batch: dict[str, Any]) -> None:
    batch["ref_per_token_logps"] = batch["old_per_token_logps"] + 0.5 * _noise(batch, 3)


def _on_policy(batch: dict[str, Any]) -> None:
    del batch["old_per_token_logps"]


def _sampling(batch: dict[str, Any]) -> None:
    batch["sampling_per_token_logps"] = batch["old_per_token_logps"] + 0.4 * _noise(batch, 4)


def _sampling_unscored(batch: dict[str, Any]) -> None:
    _sampling(batch)
    batch["sampling_per_token_logps"][1, 2] = float("nan")  # vLLM could not score this token


def _tool_mask(batch: dict[str, Any]) -> None:
    mask = torch.ones_like(batch["completion_mask"])
    mask[0, 3:6], mask[3, 0] = 0, 0
    batch["tool_mask"] = mask


def _token_correction(batch: dict[str, Any]) -> None:
    batch["importance_sampling_ratio"] = _noise(batch, 5).exp().clamp(max=3)


def _sequence_correction(batch: dict[str, Any]) -> None:
    batch["importance_sampling_ratio"] = _noise(batch, 5)[:, :1].exp()


def _use_vllm(trainer: Any) -> None:
    trainer.use_vllm = True  # after construction: no engine is needed for the loss


def _evaluate(trainer: Any) -> None:
    trainer.model.eval()


_BONUS = dict(entropy_coef=0.07)
_ADAPTIVE = dict(use_adaptive_entropy=True, entropy_coef=0.07, entropy_target=6.0, entropy_coef_delta=0.01)
OPTIONS = {
    "plain": Option({}),
    "on-policy": Option({}, _on_policy),
    "beta": Option(dict(beta=0.3, use_bias_correction_kl=False), _reference),
    "beta-corrected": Option(dict(beta=0.3, use_bias_correction_kl=True), _reference),
    "entropy": Option(_BONUS),
    # the first call measures the entropy, the second acts on it
    "entropy-adaptive": Option(_ADAPTIVE, calls=2),
    "entropy-adaptive-gated": Option({**_ADAPTIVE, "entropy_target": 0.1}, calls=2),
    "top-entropy": Option(dict(top_entropy_quantile=0.4)),
    "top-entropy-bonus": Option(dict(top_entropy_quantile=0.4, **_BONUS)),
    "top-entropy-beta": Option(dict(top_entropy_quantile=0.4, beta=0.3), _reference),
    "off-policy": Option(dict(off_policy_mask_threshold=0.02)),
    "off-policy-sampling": Option(dict(off_policy_mask_threshold=0.02), _sampling),
    "off-policy-unscored": Option(dict(off_policy_mask_threshold=0.02), _sampling_unscored),
    "tool-mask": Option({}, _tool_mask),
    "tool-mask-bonus": Option(_BONUS, _tool_mask),
    "vllm-token": Option({}, _token_correction, _use_vllm),
    "vllm-sequence": Option({}, _sequence_correction, _use_vllm),
    "vllm-uncorrected": Option(dict(vllm_importance_sampling_correction=False), trainer=_use_vllm),
    "moe": Option(dict(router_aux_loss_coef=0.5), model=tiny.moe_model),
    "moe-off": Option(dict(router_aux_loss_coef=0.0), model=tiny.moe_model),
    "temperature": Option(dict(temperature=0.6)),
    "cast-lm-head": Option(dict(cast_lm_head_to_fp32=True), model=lambda: tiny.model(tie=False)),
    "eval": Option({}, trainer=_evaluate),
    "eval-bonus": Option(_BONUS, trainer=_evaluate),
}
# The loss is one function: the other pairs differ from these three in the objective alone
CASES = [(pair, option) for pair in ("sapo", "gspo", "saf-grpo-token-mean") for option in OPTIONS]
CASES += [(pair, option) for pair in ("saf-grpo", "saf-gspo", "saf-sapo") for option in ("plain", "beta-corrected")]


def _noise(batch: dict[str, Any], seed: int) -> torch.Tensor:
    return torch.randn(batch["completion_ids"].shape, generator=torch.Generator().manual_seed(seed))


def _make_batch(trainer: Any) -> dict[str, Any]:
    """Ragged prompts and completions, advantages of both signs and 0, one row without a valid token."""
    rows, width, length = len(PROMPT_LENGTHS), max(PROMPT_LENGTHS), max(COMPLETION_LENGTHS)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(4, 256, (rows, width + length), generator=generator)
    prompt_mask = (torch.arange(width) >= width - torch.tensor(PROMPT_LENGTHS)[:, None]).long()
    completion_mask = (torch.arange(length) < torch.tensor(COMPLETION_LENGTHS)[:, None]).long()
    completion_mask[FULLY_MASKED] = 0  # what `mask_truncated_completions` does
    batch: dict[str, Any] = {
        "prompt_ids": ids[:, :width] * prompt_mask,
        "prompt_mask": prompt_mask,
        "completion_ids": ids[:, width:] * completion_mask,
        "completion_mask": completion_mask,
        "advantages": torch.tensor([1.3, -0.8, 0.0, 2.0, -1.5, -0.7]),
    }
    with torch.no_grad():
        current, _, _ = trainer._get_per_token_logps_and_entropies(
            trainer.model,
            torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1),
            torch.cat([prompt_mask, completion_mask], dim=1),
            length,
        )
    # Shifted rows: sequence ratios outside the clip range on both sides, and one of them inside
    shift = torch.tensor([0.0, -0.15, 0.1, -0.2, 0.1, 0.3])[:, None]
    drift = 0.3 * _noise(batch, 1)
    count = completion_mask.sum(-1, keepdim=True).clamp(min=1)
    drift = drift - (drift * completion_mask).sum(-1, keepdim=True) / count + shift
    batch["old_per_token_logps"] = (current + drift) * completion_mask
    return batch


_DATASET, _TOKENIZER = tiny.dataset(4), tiny.tokenizer()


def _build(trainer_class: Any, config_class: type, folder: Path, model: str, settings: dict[str, Any]) -> Any:
    trainer = trainer_class(
        model,
        reward_funcs=tiny.reward,
        args=tiny.config(
            config_class,
            folder / "out",
            per_device_train_batch_size=len(PROMPT_LENGTHS),
            gradient_accumulation_steps=ACCUMULATION,
            model_init_kwargs={"dtype": "float32"},
            **settings,
        ),
        train_dataset=_DATASET,
        processing_class=_TOKENIZER,
    )
    trainer.current_gradient_accumulation_steps = ACCUMULATION
    trainer.model.train()
    return trainer


def _loss_and_gradients(trainer: Any, batch: dict[str, Any], calls: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    loss = torch.zeros(())
    for _ in range(calls):
        trainer.model.zero_grad()
        loss = trainer.compute_loss(trainer.model, batch)
        loss.backward()
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in trainer.model.parameters()]
    return loss.detach(), torch.cat([g.flatten() for g in gradients])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Callable[[], Any]], str]:
    """Folder of a model, for a reference model is loaded from where its policy came from."""
    folders: dict[Any, str] = {}

    def save(make: Callable[[], Any]) -> str:
        if make not in folders:
            folders[make] = str(tmp_path_factory.mktemp("model"))
            make().save_pretrained(folders[make])
        return folders[make]

    return save


def _trainers(pair: Pair, option: Option, folder: Path, model: str) -> tuple[Any, Any, dict[str, Any]]:
    """Ours, TRL's, and the batch for both."""
    ours = _build(pair.trainer, pair.config, folder, model, {**pair.ours, **option.args})
    stock = _build(GRPOTrainer, GRPOConfig, folder, model, {**pair.stock, **option.args})
    batch = _make_batch(stock)
    option.batch(batch)
    tokens = (batch["completion_mask"] * batch.get("tool_mask", 1)).sum()
    for trainer in (ours, stock):
        option.trainer(trainer)
    steps = ACCUMULATION if ours.model.training else 1
    batch["num_items_in_batch"] = batch["num_tokens_in_step"] = steps * tokens
    return ours, stock, batch


def _compare(pair: Pair, option: Option, folder: Path, model: str) -> None:
    ours, stock, batch = _trainers(pair, option, folder, model)
    expected_loss, expected = _loss_and_gradients(stock, batch, option.calls)
    loss, gradient = _loss_and_gradients(ours, batch, option.calls)
    assert expected.norm() > 1e-3  # something is compared
    assert torch.isfinite(gradient).all()
    assert abs(loss - expected_loss) <= TOLERANCE * max(abs(expected_loss), torch.tensor(0.1))
    difference = (gradient.double() - expected.double()).norm() / expected.double().norm()
    assert difference <= TOLERANCE

    mode, steps = ("train", ACCUMULATION) if ours.model.training else ("eval", 1)
    ours._reduce_statistics(mode)
    ours._publish_statistics(mode)
    metrics, theirs = ours._metrics[mode], stock._metrics[mode]
    shared = {"entropy", "kl", "policy_loss", "aux_loss", "entropy_coef"} & theirs.keys()
    if ours.importance_sampling_level == "token":  # at the sequence level TRL counts rows and we count tokens
        shared |= {f"clip_ratio/{name}_mean" for name in ("low", "high", "region")} & theirs.keys()
    assert "entropy" in shared
    assert ("kl" in shared) == ("beta" in option.args)
    assert ("policy_loss" in shared) == ("entropy_coef" in option.args)
    assert ("aux_loss" in shared) == (option.args.get("router_aux_loss_coef", 0) != 0)
    for name in shared:
        # with token means TRL logs each micro-batch's share of the step's loss, we the loss itself
        share = steps if name == "policy_loss" and pair.stock["loss_type"] == "dapo" else 1
        assert metrics[name][-1] == pytest.approx(share * theirs[name][-1], rel=TOLERANCE, abs=1e-8), name


@pytest.mark.parametrize(("pair", "option"), CASES)
def test_loss_gradient_and_metrics_are_trls(pair: str, option: str, tmp_path: Path, saved: Any) -> None:
    _compare(PAIRS[pair], OPTIONS[option], tmp_path, saved(OPTIONS[option].model))


def _delta(pair: Pair) -> float:
    """A bound that the batch passes; the ratios of sequences spread less than those of tokens."""
    return 1.1 if "importance_sampling_level" in pair.stock else 1.5


@pytest.mark.parametrize("pair", CLIPPING)
def test_two_sided_clip_is_trls(pair: str, tmp_path: Path, saved: Any) -> None:
    _compare(PAIRS[pair], Option(dict(delta=_delta(PAIRS[pair]))), tmp_path, saved(tiny.model))


@pytest.mark.parametrize("pair", CLIPPING)
def test_the_batch_clips_on_both_sides(pair: str, tmp_path: Path, saved: Any) -> None:
    """Otherwise the comparison would say nothing about clipping."""
    ours, stock, batch = _trainers(PAIRS[pair], Option({}), tmp_path, saved(tiny.model))
    stock.compute_loss(stock.model, batch)
    metrics = stock._metrics["train"]
    assert metrics["clip_ratio/low_mean"][0] > 0
    assert metrics["clip_ratio/high_mean"][0] > 0
    assert metrics["clip_ratio/region_mean"][0] < 0.9
    _, unbounded = _loss_and_gradients(ours, batch)
    ours.args.delta = _delta(PAIRS[pair])
    _, bounded = _loss_and_gradients(ours, batch)
    assert not torch.equal(bounded, unbounded)


@pytest.mark.parametrize("pair", ["sapo", "gspo", "saf-grpo"])
def test_clip_shares_count_tokens_also_for_sequences(pair: str, tmp_path: Path, saved: Any) -> None:
    """GSPO paper, figure 2: a clipped sequence counts all its tokens. SAPO clips nothing and says so."""
    ours, _, batch = _trainers(PAIRS[pair], Option({}), tmp_path, saved(tiny.model))
    ours.compute_loss(ours.model, batch)
    ours._reduce_statistics("train")
    ours._publish_statistics("train")
    metrics = ours._metrics["train"]
    if pair == "sapo":
        assert not any(name.startswith("clip_ratio") for name in metrics)
        assert 0 < metrics["gate/weight_pos"][0] < 1
        assert 0 < metrics["gate/weight_neg"][0] < 1
    if pair == "gspo":
        # row 5 falls below with A < 0, row 3 rises above with A > 0; the others move the way that is not clipped
        lengths = torch.tensor(COMPLETION_LENGTHS)
        total = lengths.sum() - lengths[FULLY_MASKED]
        assert metrics["clip_ratio/low_mean"][0] == pytest.approx((lengths[5] / total).item())
        assert metrics["clip_ratio/high_mean"][0] == pytest.approx((lengths[3] / total).item())


@pytest.mark.parametrize("old", [-500.0, 500.0, -1e4], ids=str)
@pytest.mark.parametrize("pair", list(PAIRS))
def test_finite_where_trl_is_not(pair: str, old: float, tmp_path: Path, saved: Any) -> None:
    """A log-ratio of 500 makes TRL's gradient NaN where `exp` overflows; ours is bounded before."""
    option = Option(dict(beta=0.1), _reference)
    ours, stock, batch = _trainers(PAIRS[pair], option, tmp_path, saved(tiny.model))
    batch["old_per_token_logps"][0, 2] = old
    batch["old_per_token_logps"][1, 1] = old
    batch["ref_per_token_logps"][3, 1] = abs(old)
    _, theirs = _loss_and_gradients(stock, batch)
    loss, gradient = _loss_and_gradients(ours, batch)
    assert not torch.isfinite(theirs).all()
    assert torch.isfinite(loss)
    assert torch.isfinite(gradient).all()
    assert gradient.norm() > 0


@pytest.mark.parametrize("poison", [float("nan"), float("-inf"), 1e10], ids=str)
@pytest.mark.parametrize("pair", list(PAIRS))
def test_masked_cells_change_nothing(pair: str, poison: float, tmp_path: Path, saved: Any) -> None:
    """Whatever stands at padding, tool output and masked rows, in every (B, T) tensor of the batch."""

    def everything(batch: dict[str, Any]) -> None:
        for add in (_reference, _sampling, _tool_mask, _token_correction):
            add(batch)

    option = Option(
        dict(beta=0.1, off_policy_mask_threshold=0.02, top_entropy_quantile=0.7, **_BONUS), everything, _use_vllm
    )
    ours, _, batch = _trainers(PAIRS[pair], option, tmp_path, saved(tiny.model))
    loss, gradient = _loss_and_gradients(ours, batch)
    clean = ours._reduce_statistics("train")
    outside = (batch["completion_mask"] * batch["tool_mask"]) == 0
    for name in (
        "old_per_token_logps",
        "ref_per_token_logps",
        "sampling_per_token_logps",
        "importance_sampling_ratio",
    ):
        batch[name] = batch[name].masked_fill(outside, poison)
    poisoned_loss, poisoned_gradient = _loss_and_gradients(ours, batch)
    assert torch.equal(loss, poisoned_loss)
    assert torch.equal(gradient, poisoned_gradient)
    poisoned = ours._reduce_statistics("train")
    assert {k: v.result() for k, v in clean.items()} == {k: v.result() for k, v in poisoned.items()}


@pytest.mark.parametrize("pair", list(PAIRS))
def test_a_batch_without_a_valid_token(pair: str, tmp_path: Path, saved: Any) -> None:
    ours, _, batch = _trainers(PAIRS[pair], Option(dict(beta=0.1), _reference), tmp_path, saved(tiny.model))
    batch["completion_mask"] = torch.zeros_like(batch["completion_mask"])
    batch["num_tokens_in_step"] = torch.tensor(0)
    loss, gradient = _loss_and_gradients(ours, batch)
    assert loss == 0
    assert torch.equal(gradient, torch.zeros_like(gradient))
