"""The adaptive temperature against numpy's quantile of the same tokens."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from trl_softgate.diagnostics.statistics import histogram
from trl_softgate.objectives import GATE_KERNELS, AdaptiveTemperature, soft_gate_weight
from trl_softgate.objectives.temperature import SPREAD_EDGES

OPTIONS: dict[str, Any] = dict(quantile=0.95, weight=0.9, minimum=0.01, maximum=100.0)


def counted(log_ratios: np.ndarray) -> list[int]:
    x = torch.from_numpy(np.abs(log_ratios))
    return histogram(x, torch.ones_like(x, dtype=torch.bool), SPREAD_EDGES).tolist()


def drawn(spread: float, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_t(3, 20_000) * spread


@pytest.mark.parametrize("kernel", GATE_KERNELS)
@pytest.mark.parametrize("spread", [1e-3, 0.02, 0.3])
def test_the_quantile_keeps_the_weight(kernel: str, spread: float) -> None:
    adaptive = AdaptiveTemperature(1.0, 1.05, kernel=kernel, **{**OPTIONS, "maximum": 1e5})
    x = drawn(spread)
    adaptive.observe(counted(x))
    quantile = np.quantile(np.abs(x), 0.95)
    assert adaptive.spread == pytest.approx(quantile, rel=0.02)  # within a bin, whose width is 15 %
    tau_pos, tau_neg = adaptive.temperatures
    assert tau_neg == pytest.approx(1.05 * tau_pos)
    weight = soft_gate_weight(torch.tensor(np.exp(adaptive.spread)), tau_pos, kernel).item()
    assert weight == pytest.approx(0.9, rel=1e-6)
    # so that of the tokens themselves, on both sides of 1, that share keeps it
    kept = (soft_gate_weight(torch.from_numpy(np.exp(x)), tau_pos, kernel) >= 0.9).double().mean().item()
    assert 0.945 < kept < 0.98


def test_a_wider_spread_gives_a_lower_temperature() -> None:
    taus = []
    for spread in (0.01, 0.03, 0.1, 0.3):
        adaptive = AdaptiveTemperature(1.0, 1.05, **OPTIONS)
        adaptive.observe(counted(drawn(spread)))
        taus.append(adaptive.temperatures[0])
    assert taus == sorted(taus, reverse=True)
    assert taus[0] > 10 * taus[-1]


def test_bounds() -> None:
    adaptive = AdaptiveTemperature(1.0, 2.0, **{**OPTIONS, "minimum": 0.5, "maximum": 20.0})
    adaptive.observe(counted(np.zeros(10)))  # every ratio is 1
    assert adaptive.temperatures == (20.0, 40.0)
    adaptive.observe(counted(np.full(10_000, 500.0)))
    assert adaptive.temperatures == (0.5, 1.0)


def test_older_steps_count_less() -> None:
    adaptive = AdaptiveTemperature(1.0, 1.0, **{**OPTIONS, "quantile": 0.5})
    adaptive.observe(counted(np.full(1000, 0.1)))
    adaptive.observe(counted(np.full(1000, 0.2)))
    weights = np.repeat([0.9, 1.0], 1000)
    x = np.repeat([0.1, 0.2], 1000)
    median = x[np.searchsorted(np.cumsum(weights), weights.sum() / 2)]
    assert adaptive.spread == pytest.approx(median, rel=0.16)
    assert adaptive.spread > 0.15


def test_nothing_seen() -> None:
    adaptive = AdaptiveTemperature(1.0, 1.05, **OPTIONS)
    assert math.isnan(adaptive.spread)
    adaptive.observe([0] * (len(SPREAD_EDGES) - 1))
    assert adaptive.temperatures == (1.0, 1.05)


def test_state() -> None:
    one, other = (AdaptiveTemperature(1.0, 1.05, **OPTIONS) for _ in range(2))
    for seed in range(3):
        one.observe(counted(drawn(0.05, seed)))
    other.load_state_dict(one.state_dict())
    assert other.temperatures == one.temperatures != (1.0, 1.05)
    for adaptive in (one, other):
        adaptive.observe(counted(drawn(0.2, 9)))
    assert other.temperatures == one.temperatures


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(quantile=1.0), "`quantile` must be a finite number above 0 and below 1"),
        (dict(weight=0.0), "`weight` must be a finite number above 0 and below 1"),
        (dict(minimum=0.0), "`minimum` must be a finite number above 0"),
        (dict(maximum=0.001), "`maximum` must be a finite number at least 0.01"),
    ],
)
def test_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AdaptiveTemperature(1.0, 1.05, **{**OPTIONS, **options})
