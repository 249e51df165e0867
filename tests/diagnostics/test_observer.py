"""Histograms, percentiles, row statistics and the gate's gap against numpy and plain loops."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trl_softgate.diagnostics.observer import (
    ABSOLUTE_EDGES,
    LOG_RATIO_EDGES,
    RATIO_EDGES,
    TOP_TOKENS,
    WEIGHT_EDGES,
    StepObserver,
    gate_gap,
    row_log_ratios,
)
from trl_softgate.diagnostics.statistics import histogram, percentile
from trl_softgate.objectives import Gate

EDGES = {"log-ratio": LOG_RATIO_EDGES, "weight": WEIGHT_EDGES, "absolute": ABSOLUTE_EDGES}


def random_batch(seed: int, rows: int = 5, length: int = 17) -> tuple[torch.Tensor, torch.Tensor]:
    """Values of many magnitudes, and a mask with one empty row."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, length, generator=generator, dtype=torch.float64)
    x *= 10 ** torch.empty(rows, length, dtype=torch.float64).uniform_(-7, 2, generator=generator)
    mask = torch.rand(rows, length, generator=generator) < 0.7
    mask[1] = False
    return x, mask


def test_edges_ascend() -> None:
    for edges in (*EDGES.values(), RATIO_EDGES):
        assert all(low < high for low, high in zip(edges, edges[1:], strict=False))
    assert RATIO_EDGES[0] == 0 and RATIO_EDGES[-1] == math.inf


@pytest.mark.parametrize("edges", EDGES.values(), ids=EDGES)
@pytest.mark.parametrize("seed", range(5))
def test_histograms_are_numpys(edges: list[float], seed: int) -> None:
    x, mask = random_batch(seed)
    x = x.abs().clamp(max=1) if edges is WEIGHT_EDGES else x.abs() if edges is ABSOLUTE_EDGES else x
    expected, _ = np.histogram(x[mask].numpy(), bins=np.array(edges))
    assert histogram(x, mask, edges).tolist() == expected.tolist()


@pytest.mark.parametrize("edges", EDGES.values(), ids=EDGES)
def test_a_value_on_an_edge_is_in_the_bin_above(edges: list[float]) -> None:
    x = torch.tensor([edges[1:-1]], dtype=torch.float64)
    expected, _ = np.histogram(x.numpy(), bins=np.array(edges))
    assert histogram(x, torch.ones_like(x, dtype=torch.bool), edges).tolist() == expected.tolist()


def test_what_lies_outside_and_what_is_no_number_counts_at_the_ends() -> None:
    x = torch.tensor([[-1.0, 2.0, float("nan"), 0.5, float("inf")]])
    counts = histogram(x, torch.ones_like(x, dtype=torch.bool), WEIGHT_EDGES)
    assert counts[0] == 1 and counts[-1] == 3 and counts.sum() == 5
    assert histogram(x, torch.zeros_like(x, dtype=torch.bool), WEIGHT_EDGES).sum() == 0


@given(st.integers(0, 10**6), st.sampled_from([0.05, 0.5, 0.95]))
def test_percentiles_are_within_a_bin(seed: int, share: float) -> None:
    x = torch.rand(1, 400, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    counts = histogram(x, torch.ones_like(x, dtype=torch.bool), WEIGHT_EDGES).tolist()
    assert percentile(counts, WEIGHT_EDGES, share) == pytest.approx(np.quantile(x.numpy(), share), abs=0.011)
    assert math.isnan(percentile([0] * 100, WEIGHT_EDGES, share))


@pytest.mark.parametrize("seed", range(3))
def test_rows_are_numpys(seed: int) -> None:
    x, mask = random_batch(seed)
    z = torch.where(mask, x, 0.0)
    mean, variance = row_log_ratios(z, mask)
    for i in range(len(x)):
        valid = x[i][mask[i]].numpy()
        assert mean[i] == pytest.approx(valid.mean() if valid.size else 0)
        assert variance[i] == pytest.approx(valid.var() if valid.size else 0)


@given(st.integers(0, 10**6), st.floats(0.05, 8), st.floats(1e-4, 3))
def test_the_gap_is_within_its_bound(seed: int, tau: float, spread: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    z = spread * torch.randn(4, 9, generator=generator, dtype=torch.float64)
    mask = torch.rand(4, 9, generator=generator) < 0.7
    mask[0] = False
    z = torch.where(mask, z, 0.0)
    gap, bound = gate_gap(z, mask, torch.full((4,), tau, dtype=torch.float64))
    for i in range(4):
        valid = z[i][mask[i]].tolist()
        if not valid:
            assert gap[i] == bound[i] == 0
            continue
        mean = sum(valid) / len(valid)
        average = sum(1 / math.cosh(tau * value / 2) ** 2 for value in valid) / len(valid)
        assert gap[i] == pytest.approx(abs(average - 1 / math.cosh(tau * mean / 2) ** 2), abs=1e-12)
        assert bound[i] == pytest.approx(tau**2 / 4 * sum((v - mean) ** 2 for v in valid) / len(valid))
        assert gap[i] <= bound[i] + 1e-12


SAPO_GATE = Gate(1.0, 1.05)


def observed(*seeds: int, gate: Gate | None = SAPO_GATE, teacher: bool = True) -> StepObserver:
    observer = StepObserver()
    for seed in seeds:
        x, mask = random_batch(seed)
        logps, old = -x.abs().clamp(max=3), -x.abs().clamp(max=3) - 0.3 * x.sign()
        advantages = torch.linspace(-1, 1, len(x), dtype=torch.float64)
        observer.ratios(logps.float(), old.float(), advantages.float(), mask, gate)
        if teacher:
            observer.teacher(x, torch.arange(x.numel()).view(x.shape), advantages, mask)
    return observer


def alone(counts: torch.Tensor) -> torch.Tensor:
    return counts


def test_micro_batches_and_processes_add_up() -> None:
    whole = observed(0, 1).read(alone, list)
    first, second = observed(0), observed(1)
    one, two = (
        observer.read(lambda counts: sum(torch.cat(list(o.counts.values())) for o in (first, second)), list)  # type: ignore[arg-type, return-value]
        for observer in (first, second)
    )
    assert one.histograms == two.histograms == whole.histograms
    assert one.rows + two.rows == whole.rows
    assert len(whole.rows) == 2 * 4  # a row without a token is none
    _, mask = random_batch(0)
    assert sum(whole.histograms["ratio/sequence"][1]) == 8
    assert sum(first.counts["ratio/token"]) == mask.sum()
    weights = [sum(whole.histograms[f"gate/weight_{sign}"][1]) for sign in ("pos", "neg")]
    assert min(weights) > 0 and sum(weights) < sum(whole.histograms["ratio/token"][1])  # the middle row has A = 0


def test_without_a_gate_there_is_no_gap() -> None:
    seen = observed(0, gate=None, teacher=False).read(alone, list)
    assert seen.histograms.keys() == {"ratio/token", "ratio/sequence"}
    assert all(math.isnan(row[4]) and math.isnan(row[5]) for row in seen.rows)
    assert seen.notable_rows() == []


def test_another_gate_has_weights_but_no_bound() -> None:
    seen = observed(0, gate=Gate(1.0, 1.05, "gaussian", hard_stop=1.2), teacher=False).read(alone, list)
    edges, counts = seen.histograms["gate/weight_pos"]
    assert counts[0] == sum(counts) > 0  # all ratios are e^0.3, beyond the stop
    assert all(math.isnan(row[4]) and math.isnan(row[5]) for row in seen.rows)


def test_notable_rows() -> None:
    x, mask = random_batch(3, length=40)
    observer = StepObserver()
    observer.teacher(x, torch.arange(x.numel()).view(x.shape), torch.arange(5.0), mask)
    notable = {kind: (row, tokens, a) for kind, row, tokens, a in observer.read(alone, list).notable_rows()}
    means = [x[i][mask[i]].mean().item() if mask[i].any() else math.nan for i in range(5)]
    assert notable["most negative"][0] == np.nanargmin(means)
    assert notable["most positive"][0] == np.nanargmax(means)
    assert notable["neutral"][0] == np.nanargmin(np.abs(means))
    for row, tokens, advantage in notable.values():
        assert advantage == row
        valid = [(abs(x[row, t].item()), t) for t in range(40) if mask[row, t]]
        expected = [t for _, t in sorted(valid, reverse=True)[:TOP_TOKENS]]
        assert [position for position, _, _ in tokens] == expected
        for position, token, value in tokens:
            assert token == row * 40 + position
            assert value == x[row, position]


def test_completions_shorter_than_the_tokens_wanted() -> None:
    observer = StepObserver()
    mask = torch.tensor([[True, False, True], [False, False, False]])
    observer.teacher(
        torch.tensor([[3.0, 9.0, -4.0], [1.0, 1.0, 1.0]]), torch.tensor([[5, 6, 7]] * 2), torch.ones(2), mask
    )
    (_, row, tokens, _), *_ = observer.read(alone, list).notable_rows()
    assert (row, tokens) == (0, [(2, 7, -4.0), (0, 5, 3.0)])
