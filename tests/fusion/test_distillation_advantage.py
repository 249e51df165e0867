"""A_opd, its two magnitude stages and the fused advantage."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_softgate.fusion import (
    fuse_advantages,
    has_teacher_value,
    opd_advantage,
    tanh_compress,
    top_k_percent_filter,
)

DATA = Path(__file__).parents[1] / "data"
RESPONSES: list[dict[str, Any]] = json.loads((DATA / "saf_appendix_d.json").read_text())["responses"]
POISONS = [math.nan, math.inf, -math.inf, 1e10, -1e10]
responses = pytest.mark.parametrize("response", RESPONSES, ids=lambda r: f"step{r['step']}-{r['verdict']}")


def doubles(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


# -- Appendix D ----------------------------------------------------------------------------------------------------


@responses
def test_appendix_d_stage_1(response: dict[str, Any]) -> None:
    row = response["first15_opd"]
    out = top_k_percent_filter(doubles([row]), torch.ones(1, 15), 20.0)[0]
    kept = response["first15_stage1_k20"]["kept_positions"]
    assert out.nonzero().flatten().tolist() == kept
    assert out[kept].tolist() == [row[t] for t in kept]
    tau = response["first15_stage1_k20"]["tau"]
    assert float(reference.quantile([abs(x) for x in row], reference.Fraction(4, 5))) == pytest.approx(tau, rel=1e-12)
    assert out[kept].abs().min().item() >= tau


@responses
def test_appendix_d_stage_2(response: dict[str, Any]) -> None:
    row, mask = doubles([response["first15_opd"]]), torch.ones(1, 15)
    expected = response["first15_stage2_k20_c0.1"]
    staged = tanh_compress(top_k_percent_filter(row, mask, 20.0), 0.1)
    assert staged[0].tolist() == pytest.approx(expected, rel=1e-14)
    fused = fuse_advantages(
        doubles([response["grpo_advantage"]]), row, mask, multiplier=0.5, top_k_percent=20.0, tanh_coef=0.1
    )
    total = [response["grpo_advantage"] + 0.5 * x for x in expected]
    assert fused.advantages[0].tolist() == pytest.approx(total, rel=1e-14)


def test_appendix_d_first_tokens_as_one_padded_batch() -> None:
    rows = torch.zeros(len(RESPONSES), 40, dtype=torch.float64)
    mask = torch.zeros(len(RESPONSES), 40, dtype=torch.bool)
    for b, response in enumerate(RESPONSES):
        start = 2 * b  # each row padded by another number of tokens on each side
        rows[b] = 1e6
        rows[b, start : start + 15] = doubles(response["first15_opd"])
        mask[b, start : start + 15] = True
    staged = tanh_compress(top_k_percent_filter(rows, mask, 20.0), 0.1)
    for b, response in enumerate(RESPONSES):
        assert staged[b, mask[b]].tolist() == pytest.approx(response["first15_stage2_k20_c0.1"], rel=1e-14)
    assert not staged[~mask].any()


@responses
def test_appendix_d_top_12_of_a_whole_response(response: dict[str, Any]) -> None:
    n, positions = response["num_tokens"], response["top12_positions"]
    row = torch.zeros(1, 4000, dtype=torch.float64)
    row[0, :15] = doubles(response["first15_opd"])
    row[0, positions] = doubles(response["top12_opd"])
    mask = (torch.arange(4000) < n).unsqueeze(0)
    # The quantile falls between the 13th and the 12th largest of n values. The tokens in between are not published:
    # they count as 0 here, which leaves the 12 largest where they are.
    out = top_k_percent_filter(row, mask, 100 * 11.5 / (n - 1))
    assert out[0].nonzero().flatten().tolist() == positions
    assert out[0, positions].tolist() == response["top12_opd"]
    assert min(response["top12_opd"]) == response["summary"]["min"]
    assert max(response["top12_opd"]) < 0 < response["summary"]["max"]
    for t, value in zip(positions, response["top12_opd"], strict=True):
        assert t >= 15 or response["first15_opd"][t] == value
    compressed = tanh_compress(out, 0.1)[0, positions].tolist()
    assert compressed == pytest.approx([0.1 * math.tanh(x) for x in response["top12_opd"]], rel=1e-14)
    assert compressed == pytest.approx([-0.1] * 12, rel=1e-4)


@responses
def test_appendix_d_grpo_advantage(response: dict[str, Any]) -> None:
    # Eight completions, one of which differs from the other seven.
    odd, rest = {-2.4749: (0.0, 1.0), 2.4749: (1.0, 0.0), 0.3536: (1.0, 0.0), -0.3536: (0.0, 1.0)}[
        response["grpo_advantage"]
    ]
    if abs(response["grpo_advantage"]) > 1:
        group = [odd] + [rest] * 7
    else:
        group = [odd] * 7 + [rest]
    assert reference.group_advantages(group)[0] == pytest.approx(response["grpo_advantage"], abs=5e-5)


# -- A_opd ---------------------------------------------------------------------------------------------------------


def test_opd_advantage_by_hand() -> None:
    lp = doubles([[-1.0, -2.0, -3.0, -4.0, -5.0]]).requires_grad_()
    teacher = doubles([[-0.5, math.nan, -math.inf, math.inf, -9.0]])
    out = opd_advantage(lp, teacher, torch.tensor([[1, 1, 1, 1, 0]]))
    assert out.tolist() == [[0.5, 0.0, 0.0, 0.0, 0.0]]
    assert not out.requires_grad


@pytest.mark.parametrize("poison", POISONS)
def test_opd_advantage_ignores_masked_cells(poison: float) -> None:
    torch.manual_seed(0)
    lp, teacher, mask = -torch.rand(3, 5), -torch.rand(3, 5), torch.rand(3, 5) < 0.5
    clean = opd_advantage(lp, teacher, mask)
    assert torch.equal(opd_advantage(lp.masked_fill(~mask, poison), teacher.masked_fill(~mask, poison), mask), clean)
    assert torch.equal(clean, torch.where(mask, teacher - lp, 0.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_opd_advantage_upcasts(dtype: torch.dtype) -> None:
    lp, teacher = torch.tensor([[-1.0, -8.5]], dtype=dtype), torch.tensor([[-1.0078125, -0.001]], dtype=dtype)
    out = opd_advantage(lp, teacher, torch.ones(1, 2))
    assert out.dtype == torch.float32
    assert torch.equal(out, teacher.float() - lp.float())


# -- Stage 1 -------------------------------------------------------------------------------------------------------

# Multiples of 1/64: many ties, and no two values so close that rounding the quantile decides between them.
grid = st.integers(-256, 256).map(lambda i: i / 64)
shares = st.one_of(
    st.none(),
    st.integers(1, 100).map(float),
    st.floats(0.01, 100.0),
    st.sampled_from([1e-9, 1e-3, 12.5, 25.0, 33.3, 50.0, 99.999, 100.0]),
)


@st.composite
def filter_cases(draw: st.DrawFn) -> tuple[list[list[float]], list[list[bool]], float | None]:
    size, length = draw(st.integers(1, 4)), draw(st.integers(1, 16))
    rows = [draw(st.lists(grid, min_size=length, max_size=length)) for _ in range(size)]
    mask = [draw(st.lists(st.booleans(), min_size=length, max_size=length)) for _ in range(size)]
    return rows, mask, draw(shares)


def decided_by_rounding(row: list[float], mask: list[bool], k: float | None) -> bool:
    """Whether the quantile's position is so close to a value that float64 may put it on either side."""
    if k is None or k == 100:
        return False
    position = (1 - reference.Fraction(k) / 100) * max(sum(mask) - 1, 0)
    return 0 < abs(position - round(position)) < 1e-9


@settings(max_examples=300, deadline=None)
@given(case=filter_cases(), dtype=st.sampled_from([torch.float32, torch.float64]))
def test_filter_matches_the_reference_and_numpy(case: Any, dtype: torch.dtype) -> None:
    rows, mask, k = case
    out = top_k_percent_filter(torch.tensor(rows, dtype=dtype), torch.tensor(mask), k)
    assert out.dtype == dtype
    expected = reference.top_k_percent_filter(rows, mask, k)
    for b, row in enumerate(rows):
        if decided_by_rounding(row, mask[b], k):
            continue
        assert out[b].tolist() == expected[b]
        sizes = np.abs(np.array(row))[np.array(mask[b])]
        if k is not None and sizes.size:
            tau = np.quantile(sizes, 1 - k / 100, method="linear")
            kept = [t for t, m in enumerate(mask[b]) if m and abs(row[t]) >= tau - 1e-12]
            assert [t for t, m in enumerate(mask[b]) if m and out[b, t] == row[t]] == [
                t for t, m in enumerate(mask[b]) if m and (t in kept or row[t] == 0.0)
            ]


@pytest.mark.parametrize("k", list(range(1, 100)))
def test_whole_percentages_of_every_length(k: int) -> None:
    # Where (1 - k/100) * (n - 1) is a whole number the quantile is a value of the row, which must be kept.
    lengths = list(range(1, 42)) + [101, 201]
    rows = torch.zeros(len(lengths), 201, dtype=torch.float32)
    mask = torch.zeros(len(lengths), 201, dtype=torch.bool)
    for b, n in enumerate(lengths):
        rows[b, :n] = torch.arange(1, n + 1) * torch.where(torch.arange(n) % 2 == 0, 1.0, -1.0)
        mask[b, :n] = True
    out = top_k_percent_filter(rows, mask, float(k))
    for b, n in enumerate(lengths):
        position = reference.Fraction(100 - k, 100) * (n - 1)
        kept = n - math.ceil(position)
        assert int((out[b] != 0).sum()) == kept, f"{n} tokens"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", [0.1, 0.3, 1e-3, 7.7, 1e-30])
@pytest.mark.parametrize("k", [1e-6, 7.0, 20.0, 33.3, 66.6, 99.0])
def test_ties_are_all_kept(dtype: torch.dtype, value: float, k: float) -> None:
    row = torch.full((1, 11), value, dtype=dtype)
    row[0, ::2] *= -1
    assert torch.equal(top_k_percent_filter(row, torch.ones(1, 11), k), row)
    # Ties at the quantile among other values: the upper 5 of 11 are equal, and 20 % asks for fewer than that.
    row[0, :6] *= 0.25
    if k <= 20:
        out = top_k_percent_filter(row, torch.ones(1, 11), k)
        assert torch.equal(out[0, 6:], row[0, 6:])
        assert not out[0, :6].any()


def test_rows_of_no_and_of_one_valid_token() -> None:
    rows = doubles([[3.0, -2.0, 1.0], [3.0, -2.0, 1.0], [3.0, -2.0, 1.0]])
    mask = torch.tensor([[0, 0, 0], [0, 0, 1], [1, 1, 1]])
    out = top_k_percent_filter(rows, mask, 1e-6)
    assert out.tolist() == [[0, 0, 0], [0, 0, 1.0], [3.0, 0, 0]]
    for off in (None, 100, 100.0):
        assert torch.equal(top_k_percent_filter(rows, mask, off), rows * mask)


def test_filter_of_an_empty_batch() -> None:
    assert top_k_percent_filter(torch.zeros(2, 0), torch.zeros(2, 0), 20.0).shape == (2, 0)


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("k", [None, 20.0, 100.0])
def test_filter_ignores_masked_cells(poison: float, k: float | None) -> None:
    torch.manual_seed(0)
    values, mask = torch.randn(4, 9), torch.rand(4, 9) < 0.6
    mask[2] = False
    clean = top_k_percent_filter(values, mask, k)
    assert torch.equal(top_k_percent_filter(values.masked_fill(~mask, poison), mask, k), clean)
    assert not clean[~mask].any()


def test_filter_carries_no_gradient_through_the_keep_set() -> None:
    values = torch.randn(2, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    out = top_k_percent_filter(values, torch.ones(2, 9), 20.0)
    if out.requires_grad:
        # Kept values may pass their own gradient; the threshold passes none.
        (gradient,) = torch.autograd.grad(out.sum(), values)
        assert torch.equal(gradient, (out != 0).double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("k", [0.1, 20.0, 37.5])
def test_filter_on_long_rows(dtype: torch.dtype, k: float) -> None:
    rng = np.random.default_rng(0)
    values = torch.tensor(rng.normal(size=(3, 20_000)), dtype=dtype)
    mask = torch.tensor(rng.random((3, 20_000)) < 0.9)
    mask[2] = torch.arange(20_000) < 7
    out = top_k_percent_filter(values, mask, k)
    for b in range(3):
        sizes = values[b].abs().double().numpy()
        tau = np.quantile(sizes[mask[b].numpy()], 1 - k / 100, method="linear")
        # float32 may round the quantile onto a neighbour.
        doubtful = np.abs(sizes - tau) <= 2 * np.spacing(np.array(tau, dtype=values.numpy().dtype))
        expected = mask[b].numpy() & (sizes >= tau)
        assert ((out[b] != 0).numpy() == expected)[~doubtful].all()
        assert doubtful.sum() <= 2


def test_filter_beyond_2_to_the_24_elements() -> None:
    length = 6_000_000
    generator = torch.Generator().manual_seed(0)
    # Integers below 2^21, where float32 still tells a fifth of 1 apart: no quantile is rounded onto a value.
    values = torch.randint(1, 2**21, (3, length), generator=generator, dtype=torch.int32).float()
    values[1] *= -1
    mask = torch.ones(3, length, dtype=torch.bool)
    mask[2, length // 2 :] = False
    out = top_k_percent_filter(values, mask, 20.0)
    for b, n in enumerate((length, length, length // 2)):
        # numpy.partition finds the two neighbours of the quantile without a full sort.
        position = reference.Fraction(4, 5) * (n - 1)
        below = math.floor(position)
        sizes = values[b, :n].abs().numpy()
        part = np.partition(sizes, [below, below + 1])
        tau = float(part[below]) + float(position - below) * (float(part[below + 1]) - float(part[below]))
        kept = out[b] != 0
        assert int(kept.sum()) == int((sizes >= tau).sum())
        assert out[b, kept].abs().min().item() >= tau
        assert not kept[n:].any()


def test_filter_in_lower_precision() -> None:
    values = torch.randn(2, 30, generator=torch.Generator().manual_seed(1)).bfloat16()
    out = top_k_percent_filter(values, torch.ones(2, 30), 20.0)
    expected = reference.top_k_percent_filter(values.double().tolist(), [[1] * 30] * 2, 20.0)
    assert out.tolist() == expected


@pytest.mark.parametrize("k", [0.0, -1.0, 100.5, math.nan, math.inf, -math.inf])
def test_filter_refuses_a_share_outside_0_to_100(k: float) -> None:
    with pytest.raises(ValueError, match="(?i)k"):
        top_k_percent_filter(torch.zeros(1, 2), torch.ones(1, 2), k)
    with pytest.raises(ValueError, match="top_k_percent|k"):
        fuse_advantages(torch.zeros(1), torch.zeros(1, 2), torch.ones(1, 2), top_k_percent=k)


# -- Stage 2 -------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(row=st.lists(st.floats(-1e4, 1e4), min_size=1, max_size=6), c=st.one_of(st.none(), st.floats(1e-3, 10.0)))
def test_compression_matches_the_reference(row: list[float], c: float | None) -> None:
    out = tanh_compress(doubles([row]), c)
    assert out[0].tolist() == pytest.approx(reference.tanh_compress([row], c)[0], rel=1e-13, abs=1e-300)


@pytest.mark.parametrize("c", [0.0, -0.1, math.nan])
def test_compression_refuses_a_coefficient_that_is_not_positive(c: float) -> None:
    with pytest.raises(ValueError):
        tanh_compress(torch.zeros(1, 2), c)
    with pytest.raises(ValueError):
        fuse_advantages(torch.zeros(1), torch.zeros(1, 2), torch.ones(1, 2), tanh_coef=c)


# -- Fusion --------------------------------------------------------------------------------------------------------


@st.composite
def fusion_cases(draw: st.DrawFn) -> tuple[Any, list[list[float]], Any, Any, dict[str, Any]]:
    """A_grpo, A_opd, mask, available, options."""
    size, length = draw(st.integers(1, 4)), draw(st.integers(1, 6))

    def rows(strategy: st.SearchStrategy[Any]) -> list[list[Any]]:
        return draw(st.lists(st.lists(strategy, min_size=length, max_size=length), min_size=size, max_size=size))

    one = st.one_of(st.just(0.0), st.floats(-3.0, 3.0))
    per_token = draw(st.booleans())
    advantages: Any = rows(one) if per_token else draw(st.lists(one, min_size=size, max_size=size))
    available = rows(st.booleans()) if draw(st.booleans()) else None
    options = {
        "grpo_coef": draw(st.sampled_from([0.0, 1.0, 0.5])),
        "opd_coef": draw(st.sampled_from([0.0, 1.0, 2.5])),
        "multiplier": draw(st.sampled_from([0.0, 0.3, 1.0])),
        "top_k_percent": draw(st.sampled_from([None, 100.0, 20.0, 50.0, 12.5])),
        "tanh_coef": draw(st.sampled_from([None, 0.1, 2.0])),
    }
    return advantages, rows(grid), rows(st.booleans()), available, options


@settings(max_examples=200, deadline=None)
@given(case=fusion_cases())
def test_fusion_matches_the_reference(case: Any) -> None:
    advantages, opd, mask, available, options = case
    given_tokens = None if available is None else torch.tensor(available)
    out = fuse_advantages(doubles(advantages), doubles(opd), torch.tensor(mask), available=given_tokens, **options)
    expected = reference.fuse(advantages, opd, mask, available, **options)
    assert out.advantages.shape == (len(mask), len(mask[0]))
    assert not out.advantages.requires_grad
    for actual, wanted in zip(out.advantages.tolist(), expected.advantages, strict=True):
        assert actual == pytest.approx(wanted, rel=1e-12, abs=1e-15)
    assert set(out.metrics) == set(expected.metrics)
    for name, value in out.metrics.items():
        assert value.ndim == 0
        assert not value.requires_grad
        # Tokens whose A_opd is exactly 0 pass stage 1 in the reference whenever tau is 0; see the test of kept_share.
        if name != "distill/kept_share" or not any(x == 0.0 for row in opd for x in row):
            assert value.item() == pytest.approx(expected.metrics[name], rel=1e-12, abs=1e-15), name


def test_kept_share_by_hand() -> None:
    opd = doubles([[0.1, -5.0, 2.0, 0.3, 0.2], [1.0, 9.0, 1.0, 9.0, 9.0]])
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 0, 1, 1, 0]])
    available = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    out = fuse_advantages(torch.zeros(2), opd, mask, available=available, top_k_percent=20.0)
    # Row 1 keeps 1 of 5 (tau = 2.6), row 2 both of its ties; one of the eight valid tokens has no teacher value.
    assert out.metrics["distill/kept_share"].item() == pytest.approx(3 / 7)
    assert out.metrics["distill/missing_share"].item() == pytest.approx(1 / 8)
    assert out.advantages.tolist() == [[0, -5.0, 0, 0, 0], [1.0, 0, 1.0, 0, 0]]


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("poison", POISONS)
def test_fusion_ignores_masked_cells(poison: float, per_token: bool) -> None:
    torch.manual_seed(0)
    opd, mask, available = torch.randn(4, 9), torch.rand(4, 9) < 0.6, torch.rand(4, 9) < 0.8
    advantages = torch.randn(4, 9) if per_token else torch.randn(4)
    mask[1] = False
    options: dict[str, Any] = {"multiplier": 0.7, "top_k_percent": 20.0, "tanh_coef": 0.1, "available": available}
    clean = fuse_advantages(advantages, opd, mask, **options)
    bad_advantages = advantages.masked_fill(~mask, poison) if per_token else advantages
    bad = fuse_advantages(bad_advantages, opd.masked_fill(~(mask & available), poison), mask, **options)
    assert torch.equal(bad.advantages, clean.advantages)
    assert not clean.advantages[~mask].any()
    assert bad.metrics.keys() == clean.metrics.keys()
    for name, value in clean.metrics.items():
        assert torch.equal(bad.metrics[name], value), name


def test_tokens_without_a_teacher_value_keep_the_advantage_of_the_parent() -> None:
    torch.manual_seed(0)
    advantages, opd, available = torch.randn(4), torch.randn(4, 9), torch.rand(4, 9) < 0.6
    out = fuse_advantages(advantages, opd, torch.ones(4, 9), available=available, top_k_percent=20.0, tanh_coef=0.1)
    assert torch.equal(out.advantages[~available], advantages.unsqueeze(1).expand(4, 9)[~available])
    # They take no part in the quantile either.
    opd[~available] *= 1e6
    again = fuse_advantages(advantages, opd, torch.ones(4, 9), available=available, top_k_percent=20.0, tanh_coef=0.1)
    assert torch.equal(again.advantages, out.advantages)


def test_which_tokens_have_a_teacher_value() -> None:
    teacher = torch.tensor([[-1.0, math.nan, -math.inf, math.inf, -2.0]])
    known = has_teacher_value(teacher, torch.tensor([[1, 1, 1, 1, 0]]))
    assert known.tolist() == [[True, False, False, False, False]]


@pytest.mark.parametrize("poison", POISONS)
def test_fusion_of_a_batch_without_valid_tokens(poison: float) -> None:
    empty = torch.zeros(2, 5)
    out = fuse_advantages(
        torch.full((2, 5), poison), torch.full((2, 5), poison), empty, top_k_percent=20.0, tanh_coef=0.1
    )
    assert torch.equal(out.advantages, empty)
    assert all(value.item() == 0.0 for value in out.metrics.values())


def test_fusion_is_detached_and_keeps_its_inputs() -> None:
    advantages = torch.randn(2, requires_grad=True)
    opd = torch.randn(2, 5, requires_grad=True)
    copies = advantages.detach().clone(), opd.detach().clone()
    out = fuse_advantages(advantages, opd, torch.ones(2, 5), top_k_percent=20.0, tanh_coef=0.1)
    assert not out.advantages.requires_grad
    assert torch.equal(advantages, copies[0])
    assert torch.equal(opd, copies[1])


def test_all_stages_off_is_fixed_fusion() -> None:
    advantages, opd = torch.randn(3, dtype=torch.float64), torch.randn(3, 6, dtype=torch.float64)
    out = fuse_advantages(advantages, opd, torch.ones(3, 6))
    assert torch.equal(out.advantages, advantages.unsqueeze(1) + opd)


def test_without_the_distillation_term_the_parent_objective_is_left_exactly() -> None:
    advantages, opd = torch.randn(3), torch.randn(3, 6)
    expected = advantages.unsqueeze(1).expand(3, 6)
    off: list[dict[str, Any]] = [{"opd_coef": 0.0}, {"multiplier": 0.0}]
    for options in off:
        out = fuse_advantages(advantages, opd, torch.ones(3, 6), top_k_percent=20.0, tanh_coef=0.1, **options)
        assert torch.equal(out.advantages, expected)


def test_a_group_without_spread_still_distills() -> None:
    opd = torch.randn(2, 6, dtype=torch.float64)
    out = fuse_advantages(torch.zeros(2, dtype=torch.float64), opd, torch.ones(2, 6), tanh_coef=0.1)
    assert torch.equal(out.advantages, 0.1 * torch.tanh(opd))


@pytest.mark.parametrize("advantages", [torch.zeros(3), torch.zeros(2, 3), torch.zeros(6), torch.tensor(0.0)])
def test_fusion_refuses_other_shapes(advantages: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="advantages"):
        fuse_advantages(advantages, torch.zeros(2, 6), torch.ones(2, 6))


shapes = pytest.mark.parametrize("shape", [(2, 5), (1, 6), (6,), (2, 1)])


@shapes
def test_fusion_refuses_a_mask_of_another_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="mask"):
        fuse_advantages(torch.zeros(2), torch.zeros(2, 6), torch.ones(shape))
    with pytest.raises(ValueError, match="available"):
        fuse_advantages(torch.zeros(2), torch.zeros(2, 6), torch.ones(2, 6), available=torch.ones(shape))


@shapes
def test_filter_refuses_a_mask_of_another_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="mask"):
        top_k_percent_filter(torch.zeros(2, 6), torch.ones(shape), 20.0)


@shapes
def test_opd_advantage_refuses_other_shapes(shape: tuple[int, ...]) -> None:
    values = torch.zeros(2, 6)
    with pytest.raises(ValueError, match="mask"):
        opd_advantage(values, values, torch.ones(shape))
    with pytest.raises(ValueError, match="teacher_per_token_logps"):
        opd_advantage(values, torch.zeros(shape), torch.ones(2, 6))
