"""Wrong arguments are refused with a message that names the argument."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from objectives.cases import random_batch

from trl_softgate.objectives import grpo_loss, gspo_loss, k3_divergence, reduce_loss, sapo_loss

LP, OLD, ADVANTAGES, MASK = random_batch(0, per_token=False).tensors()
BAND = {"epsilon_low": 0.2, "epsilon_high": 0.2}


@pytest.mark.parametrize("name", ["epsilon_low", "epsilon_high"])
@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf])
def test_epsilon(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        grpo_loss(LP, OLD, ADVANTAGES, MASK, **(BAND | {name: value}))
    with pytest.raises(ValueError, match=name):
        gspo_loss(LP, OLD, ADVANTAGES, MASK, level="token", **(BAND | {name: value}))


@pytest.mark.parametrize("value", [-1.0, 0.0, math.nan])
def test_delta(value: float) -> None:
    with pytest.raises(ValueError, match="delta"):
        grpo_loss(LP, OLD, ADVANTAGES, MASK, delta=value, **BAND)
    with pytest.raises(ValueError, match="delta"):
        gspo_loss(LP, OLD, ADVANTAGES, MASK, level="token", delta=value, **BAND)


@pytest.mark.parametrize("name", ["tau_pos", "tau_neg"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_tau(name: str, value: float) -> None:
    taus: Any = {"tau_pos": 1.0, "tau_neg": 1.05, name: value}
    with pytest.raises(ValueError, match=name):
        sapo_loss(LP, OLD, ADVANTAGES, MASK, **taus)


def test_level() -> None:
    unknown: Any = "tokens"
    with pytest.raises(ValueError, match="(?s)level.*tokens|tokens.*level"):
        gspo_loss(LP, OLD, ADVANTAGES, MASK, level=unknown, **BAND)


def test_aggregation() -> None:
    unknown: Any = "sum"
    with pytest.raises(ValueError, match="seq_mean_token_mean"):
        reduce_loss(LP, MASK, unknown)


@pytest.mark.parametrize("advantages", [torch.ones(3), torch.ones(4, 3), torch.ones(7), torch.tensor(1.0)])
def test_shape_of_the_advantages(advantages: torch.Tensor) -> None:
    for loss in (
        lambda: grpo_loss(LP, OLD, advantages, MASK, **BAND),
        lambda: gspo_loss(LP, OLD, advantages, MASK, level="token", **BAND),
        lambda: sapo_loss(LP, OLD, advantages, MASK, tau_pos=1.0, tau_neg=1.0),
    ):
        with pytest.raises(ValueError, match="advantages"):
            loss()


shapes = pytest.mark.parametrize("shape", [(4, 6), (1, 7), (7,), (4, 1)])


@shapes
def test_shapes_of_an_objective(shape: tuple[int, ...]) -> None:
    wrong = torch.zeros(shape)
    with pytest.raises(ValueError, match="old_per_token_logps"):
        grpo_loss(LP, wrong, ADVANTAGES, MASK, **BAND)
    with pytest.raises(ValueError, match="mask"):
        gspo_loss(LP, OLD, ADVANTAGES, wrong, level="token", **BAND)
    with pytest.raises(ValueError, match="mask"):
        sapo_loss(LP, OLD, ADVANTAGES, wrong, tau_pos=1.0, tau_neg=1.0)


@shapes
def test_shapes_of_a_reduction(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="mask"):
        reduce_loss(LP, torch.zeros(shape), "token_mean")


@shapes
def test_shapes_of_k3(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="teacher_per_token_logps"):
        k3_divergence(LP, torch.zeros(shape), MASK)
    with pytest.raises(ValueError, match="mask"):
        k3_divergence(LP, OLD, torch.zeros(shape))
