"""Statistics of parts merge into the statistic of the whole, whichever way the tokens are dealt."""

from __future__ import annotations

import math
from typing import Any

import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from objectives.cases import OBJECTIVES, default_settings, ours, random_batch

from trl_softgate.diagnostics import statistics
from trl_softgate.fusion import fuse_advantages


@st.composite
def cells(draw: st.DrawFn) -> tuple[list[list[float]], list[list[bool]]]:
    size, length = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    values = [draw(st.lists(st.floats(-1e3, 1e3), min_size=length, max_size=length)) for _ in range(size)]
    mask = [draw(st.lists(st.booleans(), min_size=length, max_size=length)) for _ in range(size)]
    return values, mask


def all_three(x: torch.Tensor, mask: torch.Tensor) -> dict[str, statistics.Statistic]:
    return {
        "mean": statistics.mean(x, mask),
        "min": statistics.minimum(x, mask),
        "max": statistics.maximum(x, mask),
    }


def expected_of(values: list[list[float]], mask: list[list[bool]]) -> dict[str, float]:
    flat = [x for row, keep in zip(values, mask, strict=True) for x, m in zip(row, keep, strict=True) if m]
    return {"mean": reference.mean(flat), "min": min(flat, default=0.0), "max": max(flat, default=0.0)}


@settings(max_examples=100, deadline=None)
@given(case=cells(), cut=st.integers(0, 5))
def test_values_and_merges(case: Any, cut: int) -> None:
    values, mask = case
    x, m = torch.tensor(values, dtype=torch.float64), torch.tensor(mask)
    whole = all_three(x, m)
    expected = expected_of(values, mask)
    assert {k: v.item() for k, v in statistics.results(whole).items()} == pytest.approx(expected, rel=1e-12, abs=1e-12)

    merged: dict[str, statistics.Statistic] = {}
    for part in (slice(0, cut), slice(cut, None)):
        statistics.merge(merged, all_three(x[part], m[part]))
    assert {k: v.item() for k, v in statistics.results(merged).items()} == pytest.approx(
        expected, rel=1e-12, abs=1e-12
    )
    rows = torch.cat([statistics.pack(all_three(x[p], m[p])) for p in (slice(0, cut), slice(cut, None))])
    unpacked = statistics.results(statistics.unpack(rows, whole))
    assert {k: v.item() for k, v in unpacked.items()} == pytest.approx(expected, rel=1e-12, abs=1e-12)

    floats = statistics.to_floats([merged, {}])
    assert floats[1] == {}
    if m.any():
        assert floats[0] == pytest.approx(expected, rel=1e-12, abs=1e-12)
    else:
        assert floats[0] == {}


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
def test_masked_cells_do_not_count(poison: float) -> None:
    x = torch.tensor([[1.0, poison, -3.0]])
    out = statistics.results(all_three(x, torch.tensor([[True, False, True]])))
    assert {k: v.item() for k, v in out.items()} == {"mean": -1.0, "min": -3.0, "max": 1.0}


def test_a_part_without_tokens_changes_nothing() -> None:
    x, m = torch.tensor([[2.0, 4.0]]), torch.tensor([[True, True]])
    nothing = all_three(torch.zeros(0, 2), torch.zeros(0, 2, dtype=torch.bool))
    assert all(v.item() == 0.0 for v in statistics.results(nothing).values())
    for first, second in ((all_three(x, m), nothing), (nothing, all_three(x, m))):
        merged = dict(first)
        statistics.merge(merged, second)
        assert {k: v.item() for k, v in statistics.results(merged).items()} == {"mean": 3.0, "min": 2.0, "max": 4.0}


def test_rows_may_share_a_value() -> None:
    x = torch.tensor([[2.0], [math.nan], [-1.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, False], [False, False, False], [False, True, False]])
    tokens = statistics.Tokens.of(mask)
    each = all_three(x.expand(3, 3), mask)
    rows = {"mean": tokens.mean(x), "min": tokens.minimum(x), "max": tokens.maximum(x)}
    assert statistics.results(rows) == statistics.results(each)
    assert tokens.mean(x > 0).result().item() == pytest.approx(2 / 3)
    assert tokens.count.item() == 3
    assert tokens.per_row.tolist() == [[2], [0], [1]]


@pytest.mark.parametrize("length", [1, 4])
def test_what_is_zero_elsewhere_needs_no_mask(length: int) -> None:
    torch.manual_seed(0)
    x, mask = torch.rand(3, length), torch.rand(3, length) < 0.6
    tokens = statistics.Tokens.of(mask)
    zeroed = tokens.zero_elsewhere(x.masked_fill(~mask, math.nan))
    assert torch.equal(tokens.mean(zeroed, zeroed=True).result(), statistics.mean(x, mask).result())
    assert torch.equal(tokens.maximum(zeroed, zeroed=True).result(), statistics.maximum(x, mask).result())


def test_long_rows_of_float32_do_not_depend_on_how_they_are_dealt() -> None:
    torch.manual_seed(0)
    x, mask = torch.rand(8, 8192) * 4.9e8, torch.rand(8, 8192) < 0.7
    whole = statistics.mean(x, mask).result().item()
    assert whole == pytest.approx(x[mask].double().mean().item(), rel=1e-6)
    merged: dict[str, statistics.Statistic] = {}
    for b in range(8):
        statistics.merge(merged, {"x": statistics.mean(x[b : b + 1], mask[b : b + 1])})
    assert merged["x"].result().item() == pytest.approx(whole, rel=1e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_of_lower_precision_are_taken_in_float32(dtype: torch.dtype) -> None:
    x = torch.ones(2, 5000, dtype=dtype)
    assert statistics.mean(x, x > 0).value.item() == 10_000


def test_ratio_of_sums() -> None:
    parts = [([1.0, 2.0], [1.0, 0.0]), ([5.0], [3.0])]
    merged: dict[str, statistics.Statistic] = {}
    for numerator, denominator in parts:
        statistics.merge(merged, {"r": statistics.ratio(torch.tensor(numerator), torch.tensor(denominator))})
    assert statistics.results(merged)["r"].item() == 2.0


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("sizes", [[1, 5], [2, 2, 2], [1] * 6])
def test_micro_batches_of_an_objective_merge_into_the_step(name: str, sizes: list[int]) -> None:
    batch = random_batch(31, per_token=False, size=6, spread=1e-3 if name.startswith("gspo") else 0.4)
    batch.mask[4] = [False] * 7  # so that some micro-batches hold no token
    lp, old, advantages, mask = (x.detach() for x in batch.tensors())
    options = default_settings(name)
    whole = ours(name, lp, old, advantages, mask, options)
    merged: dict[str, statistics.Statistic] = {}
    parts = [x.split(sizes) for x in (lp, old, advantages, mask)]
    for a, b, c, d in zip(*parts, strict=True):
        statistics.merge(merged, ours(name, a, b, c, d, options).statistics)
    assert set(merged) == set(whole.metrics)
    for key, value in statistics.results(merged).items():
        torch.testing.assert_close(value, whole.metrics[key], rtol=1e-13, atol=1e-15, check_dtype=False)


@pytest.mark.parametrize("sizes", [[1, 3], [2, 2], [1] * 4])
def test_micro_batches_of_the_fusion_merge_into_the_step(sizes: list[int]) -> None:
    torch.manual_seed(0)
    advantages, opd = torch.randn(4, dtype=torch.float64), torch.randn(4, 9, dtype=torch.float64)
    mask = torch.rand(4, 9) < 0.7
    mask[3] = False
    options: dict[str, Any] = {"multiplier": 0.5, "top_k_percent": 20.0, "tanh_coef": 0.1}
    whole = fuse_advantages(advantages, opd, mask, **options)
    merged: dict[str, statistics.Statistic] = {}
    for part in zip(*(x.split(sizes) for x in (advantages, opd, mask)), strict=True):
        statistics.merge(merged, fuse_advantages(*part, **options).statistics)
    assert set(merged) == set(whole.metrics)
    for key, value in statistics.results(merged).items():
        torch.testing.assert_close(value, whole.metrics[key], rtol=1e-13, atol=1e-15, check_dtype=False)
