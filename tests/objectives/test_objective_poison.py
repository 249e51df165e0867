"""What stands in masked cells reaches nothing; a batch without valid tokens gives zero and keeps the graph."""

from __future__ import annotations

import math

import pytest
import torch
from objectives.cases import OBJECTIVES, PER_TOKEN, default_settings, ours, random_batch
from torch import Tensor

from trl_softgate.objectives import k3_divergence, reduce_loss

CASES = [(name, False) for name in OBJECTIVES] + [(name, True) for name in PER_TOKEN]
AGGREGATIONS = ["seq_mean_token_mean", "token_mean"]
POISONS = [math.nan, math.inf, -math.inf, 1e10, -1e10]


def poisoned(values: Tensor, mask: Tensor, poison: float) -> Tensor:
    return torch.where(mask, values.detach(), torch.full_like(values, poison))


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.detach(), b.detach())


@pytest.mark.parametrize(("name", "per_token"), CASES)
@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_poison_in_masked_cells_changes_nothing(name: str, per_token: bool, poison: float, dtype: torch.dtype) -> None:
    batch = random_batch(21, per_token=per_token)
    batch.mask[1] = [False] * 7  # one row without any valid token
    lp, old, advantages, mask = batch.tensors(dtype)
    options = default_settings(name)
    clean = ours(name, lp, old, advantages, mask, options)
    assert torch.isfinite(clean.per_token_loss).all()

    bad_lp = poisoned(lp, mask, poison).requires_grad_()
    bad_advantages = poisoned(advantages, mask, poison) if per_token else advantages
    bad = ours(name, bad_lp, poisoned(old, mask, poison), bad_advantages, mask, options)
    assert same(bad.per_token_loss, clean.per_token_loss)
    assert same(bad.ratio, clean.ratio)
    assert bad.metrics.keys() == clean.metrics.keys()
    for key, value in clean.metrics.items():
        assert same(bad.metrics[key], value), key

    for aggregation in AGGREGATIONS:
        loss = reduce_loss(clean.per_token_loss, mask, aggregation)
        bad_loss = reduce_loss(bad.per_token_loss, mask, aggregation)
        assert same(loss, bad_loss)
        (gradient,) = torch.autograd.grad(loss, lp, retain_graph=True)
        (bad_gradient,) = torch.autograd.grad(bad_loss, bad_lp, retain_graph=True)
        assert same(gradient, bad_gradient)
        assert not bad_gradient[~mask].any()
        assert gradient.any() or name.startswith("gspo")


@pytest.mark.parametrize("name", ["gspo_sequence", "gspo_token"])
@pytest.mark.parametrize("poison", POISONS)
def test_poison_leaves_an_unclipped_sequence_its_gradient(name: str, poison: float) -> None:
    batch = random_batch(22, per_token=False, spread=1e-5)
    lp, old, advantages, mask = batch.tensors()
    bad_lp = poisoned(lp, mask, poison).requires_grad_()
    gradients = []
    for x, y in ((lp, old), (bad_lp, poisoned(old, mask, poison))):
        out = ours(name, x, y, advantages, mask, default_settings(name))
        gradients.append(torch.autograd.grad(reduce_loss(out.per_token_loss, mask, "token_mean"), x)[0])
    assert gradients[0][mask].all()
    assert torch.equal(*gradients)


@pytest.mark.parametrize(("name", "per_token"), CASES)
@pytest.mark.parametrize("poison", POISONS)
def test_a_factor_with_poison_in_masked_cells_changes_nothing(name: str, per_token: bool, poison: float) -> None:
    lp, old, advantages, mask = random_batch(25, per_token=per_token, spread=1e-5).tensors()
    gradients = []
    for factor in (torch.ones_like(old), poisoned(torch.ones_like(old), mask, poison)):
        out = ours(name, lp, old, advantages, mask, default_settings(name))
        loss = reduce_loss(out.per_token_loss * factor + out.ratio * factor, mask, "seq_mean_token_mean")
        gradients.append(torch.autograd.grad(loss, lp)[0])
    assert gradients[0].any()
    assert torch.equal(*gradients)


@pytest.mark.parametrize(("name", "per_token"), CASES)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("poison", [0.0, *POISONS])
def test_everything_masked_gives_zero_and_keeps_the_graph(
    name: str, per_token: bool, aggregation: str, poison: float
) -> None:
    batch = random_batch(23, per_token=per_token)
    lp, old, advantages, mask = batch.tensors()
    mask = torch.zeros_like(mask)
    lp = poisoned(lp, mask, poison).requires_grad_()
    old = poisoned(old, mask, poison)
    out = ours(name, lp, old, advantages, mask, default_settings(name))
    loss = reduce_loss(out.per_token_loss, mask, aggregation)
    assert loss.requires_grad
    assert loss.item() == 0.0
    loss.backward()
    assert lp.grad is not None
    assert torch.equal(lp.grad, torch.zeros_like(lp))
    assert out.metrics
    assert all(value.item() == 0.0 for value in out.metrics.values())


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_batch_of_no_columns_gives_zero(name: str) -> None:
    lp = torch.zeros(2, 0, requires_grad=True)
    out = ours(name, lp, torch.zeros(2, 0), torch.ones(2), torch.zeros(2, 0), default_settings(name))
    loss = reduce_loss(out.per_token_loss, torch.zeros(2, 0), "seq_mean_token_mean")
    loss.backward()
    assert loss.item() == 0.0
    assert all(value.item() == 0.0 for value in out.metrics.values())


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("poison", POISONS)
def test_reduction_ignores_masked_losses(aggregation: str, poison: float) -> None:
    mask = torch.tensor([[1, 0, 1], [0, 0, 0]])
    clean = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], dtype=torch.float64)
    bad = torch.where(mask.bool(), clean, poison).requires_grad_()
    loss = reduce_loss(bad, mask, aggregation)
    assert torch.equal(loss.detach(), reduce_loss(clean, mask, aggregation))
    (gradient,) = torch.autograd.grad(loss, bad)
    assert torch.isfinite(gradient).all()
    assert not gradient[~mask.bool()].any()


@pytest.mark.parametrize("poison", POISONS)
def test_k3_ignores_masked_cells(poison: float) -> None:
    lp, teacher, _, mask = random_batch(24, per_token=False).tensors()
    clean = k3_divergence(lp.detach(), teacher, mask)
    assert torch.equal(k3_divergence(poisoned(lp, mask, poison), poisoned(teacher, mask, poison), mask), clean)
    assert not clean[~mask].any()
