"""SAPO's gate and its weight: published values, the weight as derivative of the gate, tau by the sign of A."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import reference
import torch

from trl_softgate.objectives import GATE_KERNELS, Gate, sapo_loss, soft_gate, soft_gate_weight
from trl_softgate.objectives.gates import ratio_distance

DATA = Path(__file__).parents[1] / "data"
VALUES = json.loads((DATA / "sapo_gate_values.json").read_text())["values"]


@pytest.mark.parametrize("value", VALUES, ids=lambda v: f"r={v['ratio']},tau={v['tau']}")
def test_published_values(value: dict[str, float]) -> None:
    ratio = torch.tensor([value["ratio"]], dtype=torch.float64)
    assert soft_gate(ratio, value["tau"]).item() == pytest.approx(value["gate"], rel=1e-14)
    # The file's weight is 4 p (1 - p) as it stands: next to p = 1 its last digits are rounding.
    assert soft_gate_weight(ratio, value["tau"]).item() == pytest.approx(value["weight"], rel=1e-14, abs=1e-15)
    assert reference.soft_gate(value["ratio"], value["tau"]) == pytest.approx(value["gate"], rel=1e-14)
    assert reference.soft_gate_weight(value["ratio"], value["tau"]) == pytest.approx(
        value["weight"], rel=1e-12, abs=1e-15
    )


@pytest.mark.parametrize("value", VALUES, ids=lambda v: f"r={v['ratio']},tau={v['tau']}")
def test_the_weight_is_the_derivative_of_the_gate(value: dict[str, float]) -> None:
    ratio = torch.tensor([value["ratio"]], dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(soft_gate(ratio, value["tau"]).sum(), ratio)
    weight = soft_gate_weight(ratio.detach(), value["tau"])
    torch.testing.assert_close(slope, weight, rtol=1e-12, atol=1e-15)


# A ratio of 0 lies below the bound on log-ratios, so no loss can have it.
@pytest.mark.parametrize(
    "value", [v for v in VALUES if v["ratio"] > 0], ids=lambda v: f"r={v['ratio']},tau={v['tau']}"
)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_loss_uses_the_published_gate(value: dict[str, float], sign: float) -> None:
    lp = torch.tensor([[value["ratio"]]], dtype=torch.float64).log().requires_grad_()
    # The other sign's temperature is set to something that would show.
    taus: Any = {"tau_pos": value["tau"], "tau_neg": 77.0} if sign > 0 else {"tau_pos": 77.0, "tau_neg": value["tau"]}
    advantages = torch.tensor([sign * 2.0], dtype=torch.float64)
    out = sapo_loss(lp, torch.zeros_like(lp), advantages, torch.ones(1, 1), **taus)
    (gradient,) = torch.autograd.grad(out.per_token_loss.sum(), lp)
    assert out.per_token_loss.item() == pytest.approx(-sign * 2.0 * value["gate"], rel=1e-12)
    assert gradient.item() == pytest.approx(-sign * 2.0 * value["weight"] * value["ratio"], rel=1e-9, abs=1e-13)
    key, other = ("gate/weight_pos", "gate/weight_neg") if sign > 0 else ("gate/weight_neg", "gate/weight_pos")
    assert out.metrics[key].item() == pytest.approx(value["weight"], rel=1e-9, abs=1e-13)
    assert out.metrics[other].item() == 0.0


def test_temperature_follows_the_sign_at_each_token() -> None:
    lp = torch.full((1, 3), -1.0, dtype=torch.float64)
    old = lp - 0.5
    advantages = torch.tensor([[1.0, -1.0, 0.0]], dtype=torch.float64)
    out = sapo_loss(lp, old, advantages, torch.ones(1, 3), tau_pos=1.0, tau_neg=3.0)
    ratio = reference.bounded_exp(0.5)[0]
    expected = [-reference.soft_gate(ratio, 1.0), reference.soft_gate(ratio, 3.0), 0.0]
    assert out.per_token_loss.tolist()[0] == pytest.approx(expected, rel=1e-12)
    assert out.metrics["gate/weight_pos"].item() == pytest.approx(reference.soft_gate_weight(ratio, 1.0), rel=1e-12)
    assert out.metrics["gate/weight_neg"].item() == pytest.approx(reference.soft_gate_weight(ratio, 3.0), rel=1e-12)


def test_temperatures_keep_float64_beside_float32_advantages() -> None:
    lp = torch.tensor([[-1.0, -1.0]], dtype=torch.float64)
    out = sapo_loss(lp, lp - 0.5, torch.tensor([[1.0, -1.0]]), torch.ones(1, 2), tau_pos=0.95, tau_neg=1.05)
    ratio = reference.bounded_exp(0.5)[0]
    expected = [-reference.soft_gate(ratio, 0.95), reference.soft_gate(ratio, 1.05)]
    assert out.per_token_loss.dtype == torch.float64
    assert out.per_token_loss.tolist()[0] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("tau", [0.3, 1.0, 1.05, 20.0])
@pytest.mark.parametrize("advantage", [1.3, -0.4])
def test_on_policy_the_gradient_is_the_policy_gradient_for_every_temperature(tau: float, advantage: float) -> None:
    lp = torch.tensor([[-2.0, -0.1]], dtype=torch.float64, requires_grad=True)
    out = sapo_loss(
        lp, lp.detach(), torch.tensor([advantage], dtype=torch.float64), torch.ones(1, 2), tau_pos=tau, tau_neg=tau
    )
    (gradient,) = torch.autograd.grad(out.per_token_loss.sum(), lp)
    assert gradient.tolist()[0] == pytest.approx([-advantage, -advantage], rel=1e-12)


def test_gates_take_a_temperature_per_token() -> None:
    ratio = torch.tensor([0.5, 2.0], dtype=torch.float64)
    tau: Any = torch.tensor([1.0, 3.0], dtype=torch.float64)
    gate, weight = soft_gate(ratio, tau), soft_gate_weight(ratio, tau)
    assert gate.tolist() == pytest.approx([reference.soft_gate(0.5, 1.0), reference.soft_gate(2.0, 3.0)], rel=1e-14)
    assert weight.tolist() == pytest.approx(
        [reference.soft_gate_weight(0.5, 1.0), reference.soft_gate_weight(2.0, 3.0)], rel=1e-12
    )


kernels = pytest.mark.parametrize("kernel", GATE_KERNELS)


@kernels
@pytest.mark.parametrize("tau", [0.3, 1.0, 7.0])
def test_every_kernel_begins_as_the_sigmoid(kernel: str, tau: float) -> None:
    ratio = torch.ones(1, dtype=torch.float64, requires_grad=True)
    gate = soft_gate(ratio, tau, kernel)
    (slope,) = torch.autograd.grad(gate.sum(), ratio)
    assert gate.item() == pytest.approx(2 / tau, rel=1e-15)
    assert slope.item() == soft_gate_weight(ratio.detach(), tau, kernel).item() == 1.0
    # the weight falls on both sides alike; the smooth ones as 1 - x^2 / 4
    near = torch.tensor([-1e-3, 1e-3], dtype=torch.float64)
    weight = soft_gate_weight(1 + near / tau, tau, kernel)
    expected = 1 - 1e-3 / 2 if kernel == "exponential" else 1 - 1e-6 / 4
    assert weight.tolist() == pytest.approx([expected, expected], abs=2e-7 if kernel == "exponential" else 1e-12)


@kernels
@pytest.mark.parametrize("tau", [0.3, 1.0, 7.0])
def test_the_gate_is_the_integral_of_its_weight(kernel: str, tau: float) -> None:
    ratio = torch.cat([torch.linspace(0, 1, 20001), torch.linspace(1, 30, 200001)[1:]]).double().requires_grad_()
    gate = soft_gate(ratio, tau, kernel)
    (slope,) = torch.autograd.grad(gate.sum(), ratio)
    weight = soft_gate_weight(ratio.detach(), tau, kernel)
    torch.testing.assert_close(slope, weight, rtol=1e-12, atol=1e-15)
    area = torch.cumulative_trapezoid(weight, ratio.detach())
    torch.testing.assert_close((gate - gate[0])[1:], area, rtol=1e-6, atol=1e-8)
    assert (gate.diff() >= 0).all() and (weight <= 1).all() and (weight >= 0).all()


@kernels
@pytest.mark.parametrize("weight", [1e-3, 0.5, 0.9, 1.0])
def test_the_distance_is_where_the_weight_has_fallen(kernel: str, weight: float) -> None:
    tau = 2.5
    ratio = torch.tensor([1 + ratio_distance(weight, kernel) / tau], dtype=torch.float64)
    assert soft_gate_weight(ratio, tau, kernel).item() == pytest.approx(weight, rel=1e-9)


@kernels
def test_a_hard_stop_takes_the_gradient_beyond_it(kernel: str) -> None:
    lp = torch.tensor([[math.log(4.0), math.log(1.5), math.log(0.2), 500.0]], dtype=torch.float64, requires_grad=True)
    out = sapo_loss(
        lp,
        torch.zeros_like(lp),
        torch.ones(1, dtype=torch.float64),
        torch.ones(1, 4),
        tau_pos=1.0,
        tau_neg=1.0,
        kernel=kernel,
        hard_stop=3.0,
    )
    (gradient,) = torch.autograd.grad(out.per_token_loss.sum(), lp)
    weight = reference.soft_gate_weight(1.5, 1.0, kernel)
    assert gradient.tolist()[0] == pytest.approx([0.0, -1.5 * weight, 0.0, 0.0], rel=1e-12)
    values = [-reference.soft_gate(r, 1.0, kernel) for r in (3.0, 1.5, 1 / 3, 3.0)]
    assert out.per_token_loss.tolist()[0] == pytest.approx(values, rel=1e-12)
    assert out.metrics["gate/stopped_share"].item() == 0.75
    assert out.metrics["gate/weight_pos"].item() == pytest.approx(weight / 4, rel=1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(tau_pos=0.0), "`tau_pos` must be a finite number above 0"),
        (dict(tau_neg=float("nan")), "`tau_neg` must be a finite number above 0"),
        (dict(kernel="tanh"), "`kernel` must be one of 'sigmoid', 'gaussian', 'exponential', 'student_t'"),
        (dict(hard_stop=1.0), "`hard_stop` must be a finite number above 1"),
    ],
)
def test_a_gate_refuses(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Gate(**{"tau_pos": 1.0, "tau_neg": 1.05, **options})
