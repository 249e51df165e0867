"""GSPO at sequence and token level, and the worked examples of its paper."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import reference
import torch
from objectives.cases import random_batch

from trl_softgate.objectives import grpo_loss, gspo_loss, reduce_loss

DATA = Path(__file__).parents[1] / "data"
EXAMPLES = json.loads((DATA / "gspo_examples.json").read_text())["examples"]
GSPO = {"epsilon_low": 3e-4, "epsilon_high": 4e-4}
GRPO = {"epsilon_low": 0.2, "epsilon_high": 0.27}


def example_tensors(example: dict[str, Any], advantage: float) -> tuple[torch.Tensor, ...]:
    log_ratios = torch.tensor([example["log_ratios"]], dtype=torch.float64)
    # old = 0 keeps lp - old equal to the listed log-ratio to the last bit.
    return log_ratios.requires_grad_(), torch.zeros(1, 8), torch.tensor([advantage]), torch.ones(1, 8)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: f"delta={e['delta']},sigma={e['sigma']}")
@pytest.mark.parametrize("level", ["sequence", "token"])
def test_paper_example_sequence(example: dict[str, Any], level: Any) -> None:
    outside = 0.0
    for advantage in (1.0, -1.0):
        out = gspo_loss(*example_tensors(example, advantage), level=level, **GSPO)
        assert out.ratio.tolist()[0] == pytest.approx([example["sequence_ratio"]] * 8, rel=1e-12)
        assert out.metrics["ratio/mean"].item() == pytest.approx(example["sequence_ratio"], rel=1e-12)
        outside += out.metrics["clip_ratio/region_mean"].item()
    # A ratio outside the band is clipped under exactly one sign of the advantage, and takes all its tokens along.
    assert outside == float(example["sequence_outside_gspo"])


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda e: f"delta={e['delta']},sigma={e['sigma']}")
def test_paper_example_tokens(example: dict[str, Any]) -> None:
    outside = 0.0
    for advantage in (1.0, -1.0):
        out = grpo_loss(*example_tensors(example, advantage), **GRPO)
        outside += 8 * out.metrics["clip_ratio/region_mean"].item()
    assert outside == pytest.approx(example["tokens_outside_grpo_0_8_1_27"], abs=1e-6)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("delta", [None, 1.001])
@pytest.mark.parametrize("aggregation", ["seq_mean_token_mean", "token_mean"])
def test_levels_agree_for_one_advantage_per_row(seed: int, delta: float | None, aggregation: str) -> None:
    batch = random_batch(seed, per_token=False, size=6, spread=1e-3)
    losses, gradients, metrics = [], [], []
    for level in ("sequence", "token"):
        lp, old, advantages, mask = batch.tensors()
        out = gspo_loss(lp, old, advantages, mask, level=level, delta=delta, **GSPO)
        loss = reduce_loss(out.per_token_loss, mask, aggregation)
        gradients.append(torch.autograd.grad(loss, lp)[0])
        losses.append(out.per_token_loss.detach())
        metrics.append({key: value.item() for key, value in out.metrics.items()})
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-14, atol=0.0)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-12, atol=1e-16)
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-14)


def test_the_seeds_above_clip_some_rows_and_keep_others() -> None:
    shares = [
        gspo_loss(*random_batch(seed, per_token=False, size=6, spread=1e-3).tensors(), level="token", **GSPO)
        .metrics["clip_ratio/region_mean"]
        .item()
        for seed in range(6)
    ]
    assert any(0.0 < share < 1.0 for share in shares)


@pytest.mark.parametrize("seed", range(4))
def test_each_token_gets_the_gradient_of_its_own_advantage(seed: int) -> None:
    batch = random_batch(seed, per_token=True, spread=1e-5)
    lp, old, advantages, mask = batch.tensors()
    out = gspo_loss(lp, old, advantages, mask, level="token", **GSPO)
    (gradient,) = torch.autograd.grad(out.per_token_loss[mask].sum(), lp)
    ratios = [reference.bounded_exp(x)[0] for x in reference.sequence_log_ratios(batch.lp, batch.old, batch.mask)]
    for b, row in enumerate(batch.mask):
        for t, valid in enumerate(row):
            wanted = -ratios[b] * batch.advantages[b][t] if valid else 0.0
            assert gradient[b, t].item() == pytest.approx(wanted, rel=1e-12)


def test_tokens_of_one_row_clip_by_their_own_sign() -> None:
    # Sequence ratio e^0.001, above the band: only the positive advantage is clipped.
    lp = torch.full((1, 3), -1.0, dtype=torch.float64, requires_grad=True)
    old = lp.detach() - 1e-3
    advantages = torch.tensor([[1.0, -1.0, 0.0]], dtype=torch.float64)
    out = gspo_loss(lp, old, advantages, torch.ones(1, 3), level="token", **GSPO)
    (gradient,) = torch.autograd.grad(out.per_token_loss.sum(), lp)
    ratio = reference.bounded_exp(1e-3)[0]
    assert gradient.tolist()[0] == pytest.approx([0.0, ratio, 0.0], rel=1e-9)
    assert out.per_token_loss.tolist()[0] == pytest.approx([-1.0004, ratio, 0.0], rel=1e-9)
    assert out.metrics["clip_ratio/high_mean"].item() == pytest.approx(1 / 3)
    assert out.metrics["clip_ratio/low_mean"].item() == 0.0


def test_a_clipped_sequence_counts_all_its_tokens() -> None:
    lp = torch.full((2, 4), -1.0, dtype=torch.float64)
    old = lp - torch.tensor([[1e-3], [0.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])
    out = gspo_loss(lp, old, torch.tensor([1.0, 1.0]), mask, level="sequence", **GSPO)
    assert out.metrics["clip_ratio/high_mean"].item() == pytest.approx(3 / 4)
    assert out.metrics["clip_ratio/region_mean"].item() == pytest.approx(3 / 4)


def test_sequence_level_refuses_advantages_per_token() -> None:
    lp, old, advantages, mask = random_batch(0, per_token=True).tensors()
    with pytest.raises(ValueError, match="token"):
        gspo_loss(lp, old, advantages, mask, level="sequence", **GSPO)
