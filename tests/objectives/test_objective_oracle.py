"""Losses, ratios, metrics and gradients against plain float64 loops and against autograd of the published formulas."""

from __future__ import annotations

import math

import pytest
import reference
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from objectives.cases import (
    OBJECTIVES,
    PER_TOKEN,
    Batch,
    Settings,
    away_from_kinks,
    batches,
    default_settings,
    oracle,
    ours,
    random_batch,
    reference_cells,
    rounding_floor,
    settings_of,
    valid_cells,
)
from torch import Tensor

from trl_softgate.objectives import reduce_loss

AGGREGATIONS = ["seq_mean_token_mean", "token_mean"]
CASES = [(name, False) for name in OBJECTIVES] + [(name, True) for name in PER_TOKEN]
cases = pytest.mark.parametrize(("name", "per_token"), CASES)


def assert_close(actual: list[float], expected: list[float], *, rel: float, abs_: float) -> None:
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected, strict=True):
        assert math.isfinite(a)
        assert math.isclose(a, e, rel_tol=rel, abs_tol=abs_), f"{a!r} instead of {e!r}"


def check(name: str, batch: Batch, options: Settings, dtype: torch.dtype, *, rel: float, unit: float) -> None:
    """Everything an objective returns, for a random positive weighting and for both reductions."""
    expected = oracle(name, batch, options)
    lp, old, advantages, mask = batch.tensors(dtype)
    out = ours(name, lp, old, advantages, mask, options)
    assert out.per_token_loss.dtype == dtype
    # float32 keeps the loss only to the rounding of its largest term.
    largest = max([abs(x) for x in reference_cells(expected.loss, batch.mask)], default=0.0)
    assert_close(
        valid_cells(out.per_token_loss, batch.mask),
        reference_cells(expected.loss, batch.mask),
        rel=rel,
        abs_=1e-300,
    )
    assert_close(valid_cells(out.ratio, batch.mask), reference_cells(expected.ratio, batch.mask), rel=rel, abs_=1e-300)

    # Masked cells hold no meaning, but nothing that would poison a sum.
    assert torch.isfinite(out.per_token_loss).all()
    assert torch.isfinite(out.ratio).all()
    assert out.per_token_loss.shape == out.ratio.shape == mask.shape
    assert set(out.metrics) == set(expected.metrics)
    for key, value in out.metrics.items():
        assert value.ndim == 0
        assert not value.requires_grad
        assert_close([value.item()], [expected.metrics[key]], rel=rel, abs_=unit)

    floor = rounding_floor(name, batch, expected, unit)
    weights = [[0.5 + ((3 * b + 5 * t) % 7) for t in range(len(row))] for b, row in enumerate(batch.mask)]
    cotangent = torch.tensor(weights, dtype=dtype)
    (gradient,) = torch.autograd.grad((out.per_token_loss * cotangent)[mask].sum(), lp, retain_graph=True)
    flat = [x for row in gradient.tolist() for x in row]
    assert_close(flat, [x for row in expected.gradient(weights) for x in row], rel=rel, abs_=8 * floor)

    for aggregation in AGGREGATIONS:
        loss = reduce_loss(out.per_token_loss, mask, aggregation)
        assert loss.ndim == 0
        wanted = reference.reduce(expected.loss, batch.mask, aggregation)
        assert_close([loss.item()], [wanted], rel=rel, abs_=unit * max(1.0, largest))
        (gradient,) = torch.autograd.grad(loss, lp, retain_graph=True)
        flat = [x for row in gradient.tolist() for x in row]
        expected_gradient = expected.gradient(reference.reduction_weights(batch.mask, aggregation))
        assert_close(flat, [x for row in expected_gradient for x in row], rel=rel, abs_=floor)


@cases
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_float64_matches_the_reference(name: str, per_token: bool, data: st.DataObject) -> None:
    batch = data.draw(batches(per_token=per_token, infinite=True))
    options = data.draw(settings_of(name))
    assume(away_from_kinks(name, batch, options, 1e-9))
    check(name, batch, options, torch.float64, rel=1e-6, unit=1e-12)


@cases
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_float32_matches_the_reference(name: str, per_token: bool, data: st.DataObject) -> None:
    # The mean of a row with log-ratios of 1e4 has lost the digits that the clip band of GSPO needs, in float32.
    batch = data.draw(batches(per_token=per_token, extreme=not name.startswith("gspo"), single=True))
    options = data.draw(settings_of(name))
    assume(away_from_kinks(name, batch, options, 1e-5))
    check(name, batch, options, torch.float32, rel=1e-4, unit=1e-6)


def naive_formula(name: str, lp: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, options: Settings) -> Tensor:
    """The published per-token loss, with no bound on the log-ratio; (B, T)."""
    a = advantages if advantages.ndim == 2 else advantages.unsqueeze(-1)
    log_ratio = lp - old
    if name == "sapo":
        ratio = torch.exp(log_ratio)
        tau = torch.where(a > 0, torch.full_like(a, options["tau_pos"]), torch.full_like(a, options["tau_neg"]))
        return -a * (4.0 / tau * torch.sigmoid(tau * (ratio - 1.0)))
    if name != "grpo":
        weights = mask.to(lp.dtype)
        log_ratio = (log_ratio * weights).sum(-1, keepdim=True) / weights.sum(-1, keepdim=True).clamp(min=1.0)
        if name == "gspo_token":
            log_ratio = lp - lp.detach() + log_ratio.detach()
    ratio = torch.exp(log_ratio)
    clipped = torch.clamp(ratio, 1.0 - options["epsilon_low"], 1.0 + options["epsilon_high"])
    return (-torch.min(ratio * a, clipped * a)).expand(lp.shape)


@cases
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_inside_the_bound_nothing_differs_from_the_published_formula(
    name: str, per_token: bool, data: st.DataObject
) -> None:
    batch = data.draw(batches(per_token=per_token, extreme=False))
    options = {k: v for k, v in data.draw(settings_of(name)).items() if k not in ("delta", "kernel", "hard_stop")}
    lp, old, advantages, mask = batch.tensors()
    out = ours(name, lp, old, advantages, mask, options).per_token_loss
    (gradient,) = torch.autograd.grad(out[mask].sum(), lp)
    naive = naive_formula(name, lp, old, advantages, mask, options)
    (naive_gradient,) = torch.autograd.grad(naive[mask].sum(), lp)
    assert torch.equal(out[mask], naive[mask])
    # Gradients add up over a row in an order of autograd's choice.
    torch.testing.assert_close(gradient, naive_gradient, rtol=1e-14, atol=1e-15)


# GSPO-token with (B, T) advantages is left out: its stop-gradient makes the derivative differ from the slope of the
# value, which is the point of eq. 14.
@pytest.mark.parametrize(("name", "per_token"), [case for case in CASES if case != ("gspo_token", True)])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_gradcheck(name: str, per_token: bool, seed: int, aggregation: str) -> None:
    batch = random_batch(seed, per_token=per_token, size=3, length=4, spread=0.2)
    options = default_settings(name)
    if name.startswith("gspo"):
        options = {"epsilon_low": 0.05, "epsilon_high": 0.04}
    if seed % 2 and name != "sapo":
        options["delta"] = 1.5
    assert away_from_kinks(name, batch, options, 1e-4)
    lp, old, advantages, mask = batch.tensors()

    def loss(x: Tensor) -> Tensor:
        out = ours(name, x, old, advantages, mask, options).per_token_loss
        return reduce_loss(out, mask, aggregation)

    assert torch.autograd.gradcheck(loss, (lp,))


@pytest.mark.parametrize("name", ["grpo", "sapo", "gspo_sequence"])
@pytest.mark.parametrize("seed", range(3))
def test_gradcheck_of_the_per_token_loss(name: str, seed: int) -> None:
    batch = random_batch(100 + seed, per_token=name != "gspo_sequence", size=2, length=4, spread=0.2)
    options = default_settings(name)
    assert away_from_kinks(name, batch, options, 1e-5)
    lp, old, advantages, mask = batch.tensors()
    assert torch.autograd.gradcheck(
        lambda x: ours(name, x, old, advantages, mask, options).per_token_loss[mask], (lp,)
    )


@cases
def test_the_ratio_carries_its_gradient(name: str, per_token: bool) -> None:
    batch = random_batch(7, per_token=per_token)
    lp, old, advantages, mask = batch.tensors()
    ratio = ours(name, lp, old, advantages, mask, default_settings(name)).ratio
    (gradient,) = torch.autograd.grad(ratio[mask].sum(), lp)
    # Token ratio: r. Sequence and GSPO-token: each token collects s, from n tokens at s / n or from itself alone.
    torch.testing.assert_close(gradient[mask], ratio[mask].detach(), rtol=1e-12, atol=0.0)
    assert not gradient[~mask].any()


@cases
@pytest.mark.parametrize("old_value", [-200.0, -1e4, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_one_vanishing_old_log_prob_leaves_everything_finite(
    name: str, per_token: bool, old_value: float, dtype: torch.dtype, sign: float
) -> None:
    batch = random_batch(11, per_token=per_token)
    batch.mask[0][2] = True
    batch.old[0][2] = old_value
    lp, old, advantages, mask = batch.tensors(dtype)
    advantages = sign * advantages.abs()
    out = ours(name, lp, old, advantages, mask, default_settings(name))
    loss = reduce_loss(out.per_token_loss, mask, "token_mean")
    loss.backward()
    assert lp.grad is not None
    assert torch.isfinite(loss)
    assert torch.isfinite(lp.grad).all()
    assert all(torch.isfinite(value) for value in out.metrics.values())
    # The rest of the batch still learns.
    assert lp.grad[1:].any() or name.startswith("gspo")


@pytest.mark.parametrize("name", OBJECTIVES)
def test_lower_precision_is_computed_in_float32(name: str) -> None:
    batch = random_batch(3, per_token=False)
    for dtype in (torch.bfloat16, torch.float16):
        lp, old, advantages, mask = batch.tensors(dtype)
        out = ours(name, lp, old, advantages, mask, default_settings(name))
        assert out.per_token_loss.dtype == torch.float32
        assert out.ratio.dtype == torch.float32
        assert all(value.dtype in (torch.float32, torch.float64) for value in out.metrics.values())
        full = lp.detach().float().requires_grad_()
        same = ours(name, full, old.float(), advantages.float(), mask, default_settings(name))
        assert torch.equal(out.per_token_loss, same.per_token_loss)
        (gradient,) = torch.autograd.grad(out.per_token_loss[mask].sum(), lp)
        (full_gradient,) = torch.autograd.grad(same.per_token_loss[mask].sum(), full)
        assert gradient.dtype == dtype
        assert torch.equal(gradient, full_gradient.to(dtype))


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.int32, torch.int64, torch.float32, torch.float64])
def test_every_mask_type_means_the_same(name: str, mask_dtype: torch.dtype) -> None:
    lp, old, advantages, mask = random_batch(5, per_token=False).tensors()
    expected = ours(name, lp, old, advantages, mask, default_settings(name))
    out = ours(name, lp, old, advantages, mask.to(mask_dtype), default_settings(name))
    assert torch.equal(out.per_token_loss, expected.per_token_loss)
    for aggregation in AGGREGATIONS:
        assert torch.equal(
            reduce_loss(out.per_token_loss, mask.to(mask_dtype), aggregation),
            reduce_loss(expected.per_token_loss, mask, aggregation),
        )


@pytest.mark.parametrize("name", ["grpo", "gspo_sequence", "gspo_token"])
def test_a_ratio_of_one_learns_with_a_band_of_zero_width(name: str) -> None:
    batch = random_batch(9, per_token=False)
    batch.old = [list(row) for row in batch.lp]
    options = {"epsilon_low": 0.0, "epsilon_high": 0.0}
    lp, old, advantages, mask = batch.tensors()
    out = ours(name, lp, old, advantages, mask, options)
    loss = reduce_loss(out.per_token_loss, mask, "token_mean")
    (gradient,) = torch.autograd.grad(loss, lp)
    expected = oracle(name, batch, options).gradient(reference.reduction_weights(batch.mask, "token_mean"))
    torch.testing.assert_close(gradient, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", ["grpo", "gspo_token", "gspo_sequence"])
def test_delta_limits_what_a_negative_advantage_can_cost(name: str) -> None:
    # Log-ratio 2 at every token: the ratio e^2 = 7.4 lies above delta = 3.
    lp = torch.full((2, 3), -1.0, dtype=torch.float64, requires_grad=True)
    old = torch.full((2, 3), -3.0, dtype=torch.float64)
    advantages = torch.tensor([-0.5, 0.5], dtype=torch.float64)
    mask = torch.ones(2, 3, dtype=torch.bool)
    options = {"epsilon_low": 0.2, "epsilon_high": 0.3}
    free = ours(name, lp, old, advantages, mask, options).per_token_loss
    bounded = ours(name, lp, old, advantages, mask, options | {"delta": 3.0}).per_token_loss
    assert free[0].tolist() == pytest.approx([0.5 * math.exp(2.0)] * 3)
    assert bounded[0].tolist() == pytest.approx([1.5] * 3)
    assert bounded[1].tolist() == pytest.approx([-0.65] * 3)
    (gradient,) = torch.autograd.grad(bounded.sum(), lp)
    assert not gradient.any()
