"""The on-policy-distillation advantage, its magnitude control (stages 1 and 2), and the fused advantage.

Everything here is detached: advantages are constants of the policy gradient. Letters as in `objectives`.
"""

from dataclasses import dataclass

import torch

from ..diagnostics import statistics
from ..diagnostics.statistics import Statistic, Tokens
from ..objectives.policy import broadcast_advantages
from ..objectives.ratios import as_mask, is_finite, log_ratio, masked, require_shape
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
    return as_mask(mask, teacher_per_token_logps) & is_finite(teacher_per_token_logps)


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
    difference = log_ratio(teacher_per_token_logps, per_token_logps, as_mask(mask, per_token_logps))
    # a student's -inf would be an advantage of inf; its NaN is not hidden, it reaches the loss through the ratio
    return difference.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


@torch.no_grad()
def top_k_percent_filter(advantages: torch.Tensor, mask: torch.Tensor, k: float | None) -> torch.Tensor:
    """Stage 1: keep, in each row, the advantages with |A| >= tau, and set the others to 0.

    tau is the (1 - k/100) quantile of |A| over the row's valid tokens, linearly interpolated (arXiv 2607.29209,
    section 3.2). Ties at tau are all kept. One selection over (B, T), so there is no limit on the number of elements.

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
    return torch.where(_keep_set(advantages.abs(), Tokens.of(mask), k), advantages, 0.0)


def _keep_set(magnitude: torch.Tensor, tokens: Tokens, k: float | None) -> torch.Tensor:
    """(B, T) bool: the tokens at or above their row's quantile. `magnitude` is 0 elsewhere."""
    if k is None:
        return tokens.mask
    require_number("k", k, above=0, maximum=100)
    length = magnitude.shape[-1]
    if k == 100 or length == 0:
        return tokens.mask
    last = (tokens.per_row - 1).clamp(min=0)
    # float64: in float32 the position of a quantile in a long row is off by whole ranks
    position = last.double() * (1 - k / 100)
    below = position.long()
    # The quantile lies between two neighbors from the top `size` values of its row, at a rank that depends on the
    # number of valid tokens. Values of inf, as many as a row needs, bring it to the end of the top `size` in every
    # row: then nothing is sorted, and one selection serves all rows.
    size = length - int((length - 1) * (1 - k / 100))
    ranks = torch.arange(size, device=magnitude.device)
    padding = torch.where(ranks < size - 1 - (last - below), float("inf"), magnitude.new_zeros(()))
    top = torch.cat([magnitude, padding], dim=-1).topk(size, dim=-1, sorted=False).values
    neighbors = top.topk(min(2, size), dim=-1, largest=False).values
    low, high = neighbors[:, :1], neighbors[:, -1:]
    fraction = (position - below).to(magnitude.dtype)
    # where(): at fraction 0 the upper neighbor may be the padding's inf, and inf * 0 is NaN
    tau = torch.where(fraction > 0, torch.lerp(low, high, fraction), low)
    return tokens.mask & (magnitude >= tau)


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
    taught, valid = Tokens.of(known), Tokens.of(mask)
    opd = masked(opd_advantages, known)
    size = opd.abs()
    kept = _keep_set(size, taught, top_k_percent)
    term = opd_coef * multiplier * tanh_compress(torch.where(kept, opd, 0.0), tanh_coef)
    final = term.abs()
    final_mean = taught.mean(final, zeroed=True)
    grpo = grpo_coef * broadcast_advantages(advantages, mask).to(term.dtype)
    return FusionOutput(
        advantages=torch.where(mask, grpo + term, 0.0),
        statistics={
            "distill/opd_abs_mean": taught.mean(size, zeroed=True),
            "distill/opd_abs_max": taught.maximum(size, zeroed=True),
            "distill/opd_abs_mean_final": final_mean,
            "distill/opd_abs_max_final": taught.maximum(final, zeroed=True),
            "distill/kept_share": taught.mean(kept, zeroed=True),
            "distill/opd_to_grpo": Statistic("mean", final_mean.value, valid.mean(grpo.abs()).value),
            "distill/missing_share": statistics.mean(~known, wanted),
        },
    )
