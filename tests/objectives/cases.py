"""Batches and settings drawn at random, and one way to call each objective on tensors and on the reference."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import reference
import torch
from hypothesis import strategies as st
from torch import Tensor

from trl_softgate.objectives import GATE_KERNELS, ObjectiveOutput, grpo_loss, gspo_loss, sapo_loss

OBJECTIVES = ["grpo", "gspo_sequence", "gspo_token", "sapo"]
PER_TOKEN = ["grpo", "gspo_token", "sapo"]  # those that take (B, T) advantages

Settings = dict[str, Any]


@dataclass
class Batch:
    lp: list[list[float]]
    old: list[list[float]]
    advantages: list[Any]
    mask: list[list[bool]]

    def tensors(self, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """lp (a leaf with gradient), old, advantages, mask."""
        lp = torch.tensor(self.lp, dtype=dtype, requires_grad=True)
        old = torch.tensor(self.old, dtype=dtype)
        return lp, old, torch.tensor(self.advantages, dtype=dtype), torch.tensor(self.mask)


def ours(name: str, lp: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, settings: Settings) -> ObjectiveOutput:
    if name == "grpo":
        return grpo_loss(lp, old, advantages, mask, **settings)
    if name == "sapo":
        return sapo_loss(lp, old, advantages, mask, **settings)
    level = "token" if name == "gspo_token" else "sequence"
    return gspo_loss(lp, old, advantages, mask, level=level, **settings)


def oracle(name: str, batch: Batch, settings: Settings) -> reference.Objective:
    args = (batch.lp, batch.old, batch.advantages, batch.mask)
    if name == "grpo":
        return reference.grpo(*args, **settings)
    if name == "sapo":
        return reference.sapo(*args, **settings)
    level = "token" if name == "gspo_token" else "sequence"
    return reference.gspo(*args, level=level, **settings)


def default_settings(name: str) -> Settings:
    if name == "sapo":
        return {"tau_pos": 1.0, "tau_neg": 1.05}
    if name == "grpo":
        return {"epsilon_low": 0.2, "epsilon_high": 0.27}
    return {"epsilon_low": 3e-4, "epsilon_high": 4e-4}


@st.composite
def settings_of(draw: st.DrawFn, name: str) -> Settings:
    out: Settings
    if name == "sapo":
        out = {"tau_pos": draw(st.floats(0.1, 10.0)), "tau_neg": draw(st.floats(0.1, 10.0))}
        out["kernel"] = draw(st.sampled_from(GATE_KERNELS))
        if draw(st.booleans()):
            out["hard_stop"] = draw(st.floats(1.01, 1e3))
        return out
    widest = 0.5 if name == "grpo" else 0.05
    out = {
        "epsilon_low": draw(st.floats(1e-4, widest)),
        "epsilon_high": draw(st.floats(1e-4, widest)),
    }
    if draw(st.booleans()):
        out["delta"] = draw(st.floats(1.0 + widest + 0.01, 4.0))
    return out


moderate_log_ratios = st.one_of(
    st.just(0.0),
    st.floats(-1e-3, 1e-3),
    st.floats(-0.6, 0.6),
    st.floats(-3.0, 3.0),
)
extreme_log_ratios = st.one_of(
    moderate_log_ratios,
    st.floats(-19.0, 19.0),
    st.sampled_from([21.0, 89.0, 200.0, 500.0, -21.0, -120.0, -500.0, -1e4]),
)


@st.composite
def batches(
    draw: st.DrawFn, *, per_token: bool, extreme: bool = True, infinite: bool = False, single: bool = False
) -> Batch:
    """B 1-4, T 1-6, masks with holes and empty rows, ratios of exactly 1, zero and negative advantages.

    extreme: log-ratios up to 500 and down to -1e4; infinite: some rows have old = +inf or -inf at a valid cell
    (one sign per row, the mean of both is undefined); single: round every number to float32.
    """
    size, length = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    log_ratios = extreme_log_ratios if extreme else moderate_log_ratios
    # Products with an advantage near float32's smallest numbers would lose their digits.
    advantage = st.one_of(
        st.floats(-3.0, 3.0).map(lambda a: a if abs(a) > 1e-6 else 0.0), st.sampled_from([-1.0, 0.0, 1.0])
    )
    lp, old, mask, advantages = [], [], [], []
    for _ in range(size):
        infinity = draw(st.sampled_from([math.inf, -math.inf])) if infinite and draw(st.booleans()) else None
        lp_row = draw(st.lists(st.floats(-12.0, -1e-3), min_size=length, max_size=length))
        gaps = draw(st.lists(log_ratios, min_size=length, max_size=length))
        old_row = [p - x for p, x in zip(lp_row, gaps, strict=True)]
        if infinity is not None:
            old_row[draw(st.integers(0, length - 1))] = infinity
        lp.append(lp_row)
        old.append(old_row)
        mask.append(draw(st.lists(st.booleans(), min_size=length, max_size=length)))
        row_advantages = draw(st.lists(advantage, min_size=length, max_size=length))
        advantages.append(row_advantages if per_token else row_advantages[0])
    batch = Batch(lp, old, advantages, mask)
    return as_float32(batch) if single else batch


def as_float32(batch: Batch) -> Batch:
    def rounded(values: list[Any]) -> list[Any]:
        return np.asarray(values, dtype=np.float32).astype(np.float64).tolist()

    return Batch(rounded(batch.lp), rounded(batch.old), rounded(batch.advantages), batch.mask)


def away_from_kinks(name: str, batch: Batch, settings: Settings, margin: float) -> bool:
    """Whether no ratio lies within `margin` (relative) of a clip edge or of the bound on log-ratios.

    There the derivative jumps, and one rounding error decides which side is taken.
    """
    if name.startswith("gspo"):
        logs = reference.sequence_log_ratios(batch.lp, batch.old, batch.mask)
    else:
        rows = reference.token_log_ratios(batch.lp, batch.old, batch.mask)
        logs = [x for row, keep in zip(rows, batch.mask, strict=True) for x, m in zip(row, keep, strict=True) if m]
    edges = [reference.LOG_RATIO_BOUND, -reference.LOG_RATIO_BOUND]
    if name != "sapo":
        edges += [math.log(1.0 - settings["epsilon_low"]), math.log(1.0 + settings["epsilon_high"])]
        if settings.get("delta") is not None:
            edges.append(math.log(settings["delta"]))
    elif settings.get("hard_stop") is not None:
        edges += [math.log(settings["hard_stop"]), -math.log(settings["hard_stop"])]
    return all(abs(x - edge) > margin * max(1.0, abs(edge)) for x in logs for edge in edges)


def valid_cells(values: Tensor, mask: list[list[bool]]) -> list[float]:
    return [x for row, keep in zip(values.tolist(), mask, strict=True) for x, m in zip(row, keep, strict=True) if m]


def reference_cells(values: reference.Rows, mask: list[list[bool]]) -> list[float]:
    return [x for row, keep in zip(values, mask, strict=True) for x, m in zip(row, keep, strict=True) if m]


def rounding_floor(name: str, batch: Batch, expected: reference.Objective, unit: float) -> float:
    """Absolute error that rounding alone explains in a gradient.

    SAPO multiplies r by p (1 - p); where p is next to 1 the difference has lost its digits, and r magnifies what is
    left. Beyond tau * (r - 1) = 40 both float64 values are 0.
    """
    if name != "sapo":
        return unit
    sizes = [
        abs(reference.advantage_at(batch.advantages, b, t)) * ratio
        for b, row in enumerate(expected.ratio)
        for t, ratio in enumerate(row)
        if ratio < 1e3
    ]
    return unit * max(1.0, max(sizes, default=1.0))


def random_batch(seed: int, *, per_token: bool, size: int = 4, length: int = 7, spread: float = 0.4) -> Batch:
    """A batch from a seed, with holes in the mask and every row non-empty."""
    rng = np.random.default_rng(seed)
    lp = -rng.uniform(0.05, 6.0, (size, length))
    old = lp - rng.normal(0.0, spread, (size, length))
    mask = rng.random((size, length)) < 0.7
    mask[np.arange(size), rng.integers(0, length, size)] = True
    advantages = rng.normal(size=(size, length) if per_token else size)
    return Batch(lp.tolist(), old.tolist(), advantages.tolist(), mask.tolist())
