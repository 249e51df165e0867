"""Aggregation over tokens and the k3 divergence."""

from __future__ import annotations

import math
from typing import Any

import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_softgate.objectives import k3_divergence, reduce_loss

AGGREGATIONS: list[Any] = ["seq_mean_token_mean", "token_mean"]


@st.composite
def losses_and_masks(draw: st.DrawFn) -> tuple[list[list[float]], list[list[bool]]]:
    size, length = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    loss = [draw(st.lists(st.floats(-5, 5), min_size=length, max_size=length)) for _ in range(size)]
    mask = [draw(st.lists(st.booleans(), min_size=length, max_size=length)) for _ in range(size)]
    return loss, mask


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@settings(max_examples=80, deadline=None)
@given(case=losses_and_masks(), denominator=st.one_of(st.none(), st.integers(0, 40)), as_tensor=st.booleans())
def test_reduction_matches_the_reference(
    aggregation: Any, case: Any, denominator: int | None, as_tensor: bool
) -> None:
    rows, mask = case
    loss = torch.tensor(rows, dtype=torch.float64, requires_grad=True)
    given_denominator: Any = denominator
    if denominator is not None and as_tensor:
        given_denominator = torch.tensor(float(denominator))
    out = reduce_loss(loss, torch.tensor(mask), aggregation, given_denominator)
    assert out.ndim == 0
    assert out.item() == pytest.approx(reference.reduce(rows, mask, aggregation, denominator), rel=1e-12, abs=1e-14)
    (gradient,) = torch.autograd.grad(out, loss)
    expected = torch.tensor(reference.reduction_weights(mask, aggregation, denominator), dtype=torch.float64)
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=0.0)


def test_an_empty_row_counts_as_a_row_but_not_as_a_token() -> None:
    loss = torch.tensor([[1.0, 3.0], [5.0, 7.0]])
    mask = torch.tensor([[1, 1], [0, 0]])
    assert reduce_loss(loss, mask, "seq_mean_token_mean").item() == 1.0
    assert reduce_loss(loss, mask, "token_mean").item() == 2.0


def test_rows_weigh_the_same_in_one_and_tokens_in_the_other() -> None:
    loss = torch.tensor([[1.0, 0.0, 0.0, 0.0], [2.0, 2.0, 2.0, 2.0]])
    mask = torch.tensor([[1, 0, 0, 0], [1, 1, 1, 1]])
    assert reduce_loss(loss, mask, "seq_mean_token_mean").item() == pytest.approx(1.5)
    assert reduce_loss(loss, mask, "token_mean").item() == pytest.approx(1.8)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_micro_batches_add_up_to_the_step(aggregation: Any) -> None:
    torch.manual_seed(0)
    loss = torch.randn(6, 5, dtype=torch.float64)
    mask = torch.rand(6, 5) < 0.6
    mask[3] = False
    whole = reduce_loss(loss, mask, aggregation)
    denominator = 6 if aggregation == "seq_mean_token_mean" else int(mask.sum())
    for sizes in ([1, 5], [2, 2, 2], [1] * 6):
        parts = [
            reduce_loss(x, m, aggregation, denominator)
            for x, m in zip(loss.split(sizes), mask.split(sizes), strict=True)
        ]
        torch.testing.assert_close(torch.stack(parts).sum(), whole, rtol=1e-13, atol=0.0)


log_probs = st.one_of(st.floats(-12.0, 0.0), st.sampled_from([0.0, -1.0, -30.0, -200.0, -1e4]))
teachers = st.one_of(log_probs, st.sampled_from([math.nan, math.inf, -math.inf]))


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_k3_matches_the_reference(data: st.DataObject) -> None:
    size, length = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 5))

    def rows(strategy: st.SearchStrategy[Any]) -> list[list[Any]]:
        return [data.draw(st.lists(strategy, min_size=length, max_size=length)) for _ in range(size)]

    lp, teacher, mask = rows(log_probs), rows(teachers), rows(st.booleans())
    out = k3_divergence(
        torch.tensor(lp, dtype=torch.float64), torch.tensor(teacher, dtype=torch.float64), torch.tensor(mask)
    )
    # e^x - x - 1 as written cancels to about 1e-16 near 0.
    torch.testing.assert_close(
        out, torch.tensor(reference.k3(lp, teacher, mask), dtype=torch.float64), rtol=1e-6, atol=1e-14
    )


def test_k3_by_hand() -> None:
    lp = torch.tensor([[-1.0, -1.0, -1.0, -50.0, -1.0]])
    teacher = torch.tensor([[-1.0, -2.0, -61.0, -1.0, math.nan]])
    out = k3_divergence(lp, teacher, torch.ones(1, 5)).tolist()[0]
    # Equal; x = -1; x = -60 held at -20, so 19 held at 10; x = 49 held at 20, then at 10; no teacher value.
    assert out == pytest.approx([0.0, math.exp(-1.0), 10.0, 10.0, 0.0], rel=1e-6)


def test_k3_bounds_x_before_the_divergence() -> None:
    lp = torch.tensor([[-1.0]], dtype=torch.float64)
    assert k3_divergence(lp, lp - 9.5, torch.ones(1, 1)).item() == pytest.approx(math.exp(-9.5) + 8.5)


def test_k3_upcasts() -> None:
    lp = torch.tensor([[-1.0, -2.0]], dtype=torch.bfloat16)
    teacher = torch.tensor([[-1.5, -1.75]], dtype=torch.bfloat16)
    out = k3_divergence(lp, teacher, torch.ones(1, 2))
    assert out.dtype == torch.float32
    assert torch.equal(out, k3_divergence(lp.float(), teacher.float(), torch.ones(1, 2)))
