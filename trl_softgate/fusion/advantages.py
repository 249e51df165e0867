"""The on-policy-distillation advantage, its magnitude control (stages 1 and 2), and the fused advantage.

Everything here is detached: advantages are constants of the policy gradient. Letters as in `objectives`.
"""

from dataclasses import dataclass

import torch

from ..diagnostics import statistics
from ..diagnostics.statistics import Statistic
from ..objectives.policy import token_advantages
from ..objectives.ratios import as_mask, masked, require_shape
from ..validation import require_number


@dataclass(frozen=True)
class FusionOutput:
    """The fused advantages, (B, T), detached, 0 at masked cells, with mergeable diagnostics."""

    advantages: torch.Tensor
    statistics: dict[str, Statistic]

    @property
    def metrics(self) -> dict[str, torch.Tensor]:
        """The diagnostics of this batch as 0-dim tensors; 0 where no token is valid."""
        return statistics.results(self.statistics)


def has_teacher_value(teacher_per_token_logps: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """(B, T) bool: valid tokens for which the teacher gave a finite log-probability."""
    return as_mask(mask, teacher_per_token_logps) & torch.isfinite(teacher_per_token_logps)


@torch.no_grad()
def opd_advantage(
    per_token_logps: torch.Tensor, teacher_per_token_logps: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """A_opd = log pi_T - sg(log pi_theta) (arXiv 2607.29209, section 3.1).

    Args:
        per_token_logps, teacher_per_token_logps: (B, T) log-probabilities of the same tokens.
        mask: (B, T), 0/1.

    Returns:
        (B, T), detached; 0 at masked cells and where the teacher's value is missing or not finite.

    Raises:
        ValueError: the shapes differ.
    """
    require_shape("teacher_per_token_logps", teacher_per_token_logps, per_token_logps)
    # a student's -inf would be an advantage of inf; its NaN is not hidden, it reaches the loss through the ratio
    known = has_teacher_value(teacher_per_token_logps, mask) & torch.isfinite(per_token_logps)
    return masked(teacher_per_token_logps, known) - masked(per_token_logps, known)


@torch.no_grad()
def top_k_percent_filter(advantages: torch.Tensor, mask: torch.Tensor, k: float | None) -> torch.Tensor:
    """Stage 1: keep, in each row, the advantages with |A| >= tau, and set the others to 0.

    tau is the (1 - k/100) quantile of |A| over the row's valid tokens, linearly interpolated (arXiv 2607.29209,
    section 3.2). Ties at tau are all kept. One sort over (B, T), so there is no limit on the number of elements.

    Args:
        advantages: (B, T).
        mask: (B, T), 0/1: the tokens that take part.
        k: percentage in (0, 100]; None or 100: off.

    Returns:
        (B, T), detached; 0 at masked cells.

    Raises:
        ValueError: `k` out of range.
    """
    mask = as_mask(mask, advantages)
    advantages = masked(advantages, mask)
    return torch.where(_keep_set(advantages.abs(), mask, k), advantages, 0.0)


def _keep_set(magnitude: torch.Tensor, mask: torch.Tensor, k: float | None) -> torch.Tensor:
    """(B, T) bool: the valid tokens at or above their row's quantile."""
    if k is None:
        return mask
    require_number("k", k, above=0, maximum=100)
    if k == 100 or magnitude.shape[-1] == 0:
        return mask
    ascending = magnitude.masked_fill(~mask, float("inf")).sort(dim=-1).values
    # float64: in float32 the position of a quantile in a long row is off by whole ranks
    position = (mask.sum(-1, keepdim=True) - 1).clamp(min=0).double() * (1 - k / 100)
    below = position.long()
    above = (below + 1).clamp(max=magnitude.shape[-1] - 1)
    fraction = (position - below).to(magnitude.dtype)
    low, high = ascending.gather(-1, below), ascending.gather(-1, above)
    # where(): at fraction 0 the upper neighbor may be the padding's inf, and inf * 0 is NaN
    tau = torch.where(fraction > 0, torch.lerp(low, high, fraction), low)
    return mask & (magnitude >= tau)


@torch.no_grad()
def tanh_compress(advantages: torch.Tensor, c: float | None) -> torch.Tensor:
    """Stage 2: c * tanh(A), so that no token moves the policy by more than c (arXiv 2607.29209, section 3.2).

    Args:
        advantages: any shape.
        c: bound, > 0 (paper: 0.1); None: off.

    Raises:
        ValueError: `c` out of range.
    """
    if c is None:
        return advantages
    require_number("c", c, above=0)
    return c * torch.tanh(advantages)


@torch.no_grad()
def fuse_advantages(
    advantages: torch.Tensor,
    opd_advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    available: torch.Tensor | None = None,
    expected: torch.Tensor | None = None,
    grpo_coef: float = 1.0,
    opd_coef: float = 1.0,
    multiplier: float = 1.0,
    top_k_percent: float | None = None,
    tanh_coef: float | None = None,
) -> FusionOutput:
    """A_total = grpo_coef * A_grpo + opd_coef * multiplier * tanh_compress(top_k_percent_filter(A_opd)).

    Args:
        advantages: A_grpo, (B,) or (B, T).
        opd_advantages: A_opd, (B, T), from `opd_advantage`.
        mask: (B, T), 0/1.
        available: (B, T), 0/1: tokens with a teacher value, from `has_teacher_value`; the others get A_grpo alone
            and take no part in the quantile. Default: all valid tokens.
        expected: (B, T), 0/1: tokens that should have a teacher value. Default: all valid tokens.
        grpo_coef, opd_coef: weights of the two terms.
        multiplier: scale * coefficient of the running step, from `FusionSchedule`.
        top_k_percent, tanh_coef: stages 1 and 2; None: off.

    Returns:
        `FusionOutput`; its metrics are `distill/opd_abs_mean|max` (|A_opd| before the stages),
        `distill/opd_abs_mean_final|max_final` (the term as it enters the sum), `distill/kept_share` (of the tokens
        with a teacher value), `distill/opd_to_grpo` (mean |term| over mean |grpo_coef * A_grpo|) and
        `distill/missing_share` (expected tokens without teacher value).

    Raises:
        ValueError: a shape or an option is out of range.
    """
    mask = as_mask(mask, opd_advantages)
    known = mask
    if available is not None:
        require_shape("available", available, opd_advantages)
        known = mask & as_mask(available)
    wanted = mask
    if expected is not None:
        require_shape("expected", expected, opd_advantages)
        wanted = mask & as_mask(expected)
    opd = masked(opd_advantages, known)
    kept = _keep_set(opd.abs(), known, top_k_percent)
    term = opd_coef * multiplier * tanh_compress(torch.where(kept, opd, 0.0), tanh_coef)
    grpo = grpo_coef * token_advantages(advantages, mask).to(term.dtype)
    return FusionOutput(
        advantages=grpo + term,
        statistics={
            "distill/opd_abs_mean": statistics.mean(opd.abs(), known),
            "distill/opd_abs_max": statistics.maximum(opd.abs(), known),
            "distill/opd_abs_mean_final": statistics.mean(term.abs(), known),
            "distill/opd_abs_max_final": statistics.maximum(term.abs(), known),
            "distill/kept_share": statistics.mean(kept, known),
            "distill/opd_to_grpo": statistics.ratio(term.abs(), grpo.abs()),
            "distill/missing_share": statistics.mean(~known, wanted),
        },
    )
