"""Per-token policy losses: hard clip per token (GRPO) or per sequence (GSPO), and the soft gate (SAPO).

All take `per_token_logps` (log pi_theta of the sampled tokens, with gradient), `old_per_token_logps` (log pi_old),
`advantages` (B,) or (B, T), and `mask` (1 where the model wrote the token), and give the loss at each token, to be
reduced by `reduce_loss`. Masked cells may hold anything in any input.
"""

from dataclasses import dataclass
from typing import Any, Literal, cast

import torch

from ..diagnostics import statistics
from ..diagnostics.statistics import Statistic, Tokens
from ..validation import require_choice, require_number
from .gates import Gate
from .ratios import (
    LOG_RATIO_BOUND,
    as_mask,
    at_least_float32,
    bounded_exp,
    log_ratio,
    masked,
    require_shape,
    sequence_log_ratio,
)


@dataclass(frozen=True)
class ObjectiveOutput:
    """What an objective returns.

    Attributes:
        per_token_loss: (B, T), with gradient. Masked cells hold finite numbers without meaning, which `reduce_loss`
            leaves out.
        ratio: (B, T) importance ratio that the objective used, with gradient; finite at masked cells.
        statistics: detached, mergeable diagnostics over the valid tokens.
    """

    per_token_loss: torch.Tensor
    ratio: torch.Tensor
    statistics: dict[str, Statistic]

    @property
    def metrics(self) -> dict[str, torch.Tensor]:
        """The diagnostics of this batch as detached 0-dim tensors; 0 where no token is valid."""
        return statistics.results(self.statistics)


def grpo_loss(
    per_token_logps: torch.Tensor,
    old_per_token_logps: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    epsilon_low: float,
    epsilon_high: float,
    delta: float | None = None,
) -> ObjectiveOutput:
    """Clipped surrogate with one ratio per token (GRPO, arXiv 2402.03300).

    loss = -min(r * A, clip(r, 1 - epsilon_low, 1 + epsilon_high) * A), r = exp(log pi_theta - log pi_old).

    Args:
        per_token_logps, old_per_token_logps: (B, T) log-probabilities.
        advantages: (B,) or (B, T).
        mask: (B, T), 0/1.
        epsilon_low, epsilon_high: clip range around 1; finite, >= 0, `epsilon_low` < 1.
        delta: upper bound of the unclipped ratio (two-sided clip, arXiv 2505.07291); None: off.

    Raises:
        ValueError: a shape or an option is out of range.
    """
    tokens, advantages = _prepare(per_token_logps, old_per_token_logps, advantages, mask)
    ratio = bounded_exp(log_ratio(per_token_logps, old_per_token_logps, tokens.mask))
    return _clipped(ratio, ratio, advantages, tokens, epsilon_low, epsilon_high, delta)


def gspo_loss(
    per_token_logps: torch.Tensor,
    old_per_token_logps: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    epsilon_low: float,
    epsilon_high: float,
    level: Literal["sequence", "token"] = "sequence",
    delta: float | None = None,
) -> ObjectiveOutput:
    """Clipped surrogate with one ratio per sequence (GSPO, arXiv 2507.18071, eqs. 5-7, and GSPO-token, eqs. 13-14).

    `"sequence"`: s = exp(mean over the row of the log-ratio), for advantages of shape (B,).
    `"token"`: s_t = sg(s) * pi_theta / sg(pi_theta): the value of s, and at each token the gradient of its own
    advantage. With (B,) advantages both have the same loss, clip decisions and gradient; with (B, T) only
    `"token"` is right, and `"sequence"` is refused because it would average the advantages over the row.

    Args and raises: as `grpo_loss`; the paper clips at `epsilon_low` 3e-4 and `epsilon_high` 4e-4.
    """
    require_choice("level", level, ("sequence", "token"))
    if level == "sequence" and advantages.dim() == 2:
        raise ValueError(
            "`advantages` of shape (B, T) need `level='token'` (GSPO-token): one ratio for the row would average "
            "them over its tokens."
        )
    tokens, advantages = _prepare(per_token_logps, old_per_token_logps, advantages, mask)
    token = log_ratio(per_token_logps, old_per_token_logps, tokens.mask)
    row = sequence_log_ratio(token, tokens.per_row)
    ratio = value = bounded_exp(row)
    if level == "token":
        # exp(x - sg(x) + sg(log s)) is s, and s its slope, or 0 where log s is out of bounds; only there can x be
        # infinite, and x - sg(x) no number.
        value = value.detach()
        inside = row.detach().abs() <= LOG_RATIO_BOUND
        ratio = value + value * torch.where(inside, token - token.detach(), 0.0)
    return _clipped(ratio, value, advantages, tokens, epsilon_low, epsilon_high, delta)


def sapo_loss(
    per_token_logps: torch.Tensor,
    old_per_token_logps: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    tau_pos: float,
    tau_neg: float,
    kernel: str = "sigmoid",
    hard_stop: float | None = None,
) -> ObjectiveOutput:
    """Soft-gated surrogate with one ratio per token (SAPO, arXiv 2511.20347, eqs. 5-6).

    loss = -A * soft_gate(r, tau), with tau = `tau_pos` where A > 0 and `tau_neg` elsewhere, token by token.

    Args:
        per_token_logps, old_per_token_logps, advantages, mask: as in `grpo_loss`.
        tau_pos, tau_neg: temperatures; finite, > 0 (paper: 1.0 and 1.05).
        kernel: shape of the gate, one of `GATE_KERNELS` (paper: `"sigmoid"`).
        hard_stop: a ratio R > 1: tokens whose ratio is outside [1/R, R] give no gradient; None: off (as in the paper).

    Raises:
        ValueError: a shape or an option is out of range.
    """
    gate = Gate(tau_pos, tau_neg, kernel, hard_stop)
    tokens, advantages = _prepare(per_token_logps, old_per_token_logps, advantages, mask)
    ratio = bounded_exp(log_ratio(per_token_logps, old_per_token_logps, tokens.mask))
    # each diagnostic as soon as it can be had: its temporaries then lie beside fewer other tensors
    found = _ratio_statistics(ratio, tokens)
    positive = advantages > 0
    value, weight = gate(ratio, positive)
    found["gate/weight_pos"] = statistics.mean(weight, tokens.mask & positive)
    found["gate/weight_neg"] = statistics.mean(weight, tokens.mask & (advantages < 0))
    if hard_stop is not None:
        found["gate/stopped_share"] = tokens.mean((ratio > hard_stop) | (ratio < 1 / hard_stop))
    del weight
    return ObjectiveOutput(per_token_loss=-advantages * value, ratio=ratio, statistics=found)


def _prepare(
    per_token_logps: torch.Tensor, old_per_token_logps: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor
) -> tuple[Tokens, torch.Tensor]:
    """The valid tokens, and the advantages as `broadcast_advantages` gives them; shapes are checked."""
    require_shape("old_per_token_logps", old_per_token_logps, per_token_logps)
    mask = as_mask(mask, per_token_logps)
    return Tokens.of(mask), broadcast_advantages(advantages, mask)


def token_advantages(advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Advantages of shape (B,) or (B, T) at each token: (B, T), 0 at masked cells.

    Raises:
        ValueError: any other shape.
    """
    mask = as_mask(mask)
    return masked(broadcast_advantages(advantages, mask).expand(mask.shape), mask)


def broadcast_advantages(advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Advantages of shape (B,) as (B, 1), which costs nothing per token; those of shape (B, T) with 0 at masked cells.

    Raises:
        ValueError: any other shape.
    """
    if advantages.shape == mask.shape[:1]:
        return at_least_float32(advantages).unsqueeze(1)
    if advantages.shape == mask.shape:
        return masked(advantages, mask)
    raise ValueError(
        f"`advantages` must have shape {tuple(mask.shape[:1])} or {tuple(mask.shape)}, got {tuple(advantages.shape)}."
    )


def _clipped(
    ratio: torch.Tensor,
    value: torch.Tensor,
    advantages: torch.Tensor,
    tokens: Tokens,
    epsilon_low: float,
    epsilon_high: float,
    delta: float | None,
) -> ObjectiveOutput:
    """`ratio`: (B, T), or (B, 1) where all tokens of a row share it; `value`: its values, (B, 1) where they are equal
    in a row."""
    require_number("epsilon_low", epsilon_low, minimum=0, below=1)
    require_number("epsilon_high", epsilon_high, minimum=0)
    low, high = 1 - epsilon_low, 1 + epsilon_high
    limit = float("inf")
    if delta is not None:
        require_number("delta", delta, above=0)
        limit = delta
    # The smaller of r * A and clip(r) * A is A times the ratio within bounds that depend on the sign of A.
    positive = advantages > 0
    floor = torch.where(positive, ratio.new_zeros((), requires_grad=False), low)
    ceiling = torch.where(positive, ratio.new_full((), min(high, limit), requires_grad=False), max(high, limit))
    found = _ratio_statistics(value, tokens)
    clipped_low = tokens.mean((value < low) & (advantages < 0))
    clipped_high = tokens.mean((value > high) & positive)
    per_token_loss = -advantages * ratio.clamp(floor, ceiling)
    return ObjectiveOutput(
        per_token_loss=_at_tokens(per_token_loss, tokens.mask),
        ratio=_at_tokens(ratio, tokens.mask),
        statistics=found
        | {
            "clip_ratio/low_mean": clipped_low,
            "clip_ratio/high_mean": clipped_high,
            # no token is both: the sign of its advantage decides
            "clip_ratio/region_mean": Statistic("mean", clipped_low.value + clipped_high.value, tokens.count),
        },
    )


class _RowAtTokens(torch.autograd.Function):
    """(B, 1) seen as (B, T), without a copy; what a caller multiplies masked cells by, NaN included, does not reach
    the row's gradient."""

    @staticmethod
    def forward(ctx: Any, row: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(mask)
        return row.expand(mask.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (mask,), (gradient,) = ctx.saved_tensors, gradients
        # half by half: the peak of the whole loss is here
        half = mask.shape[1] // 2
        first = torch.where(mask[:, :half], gradient[:, :half], 0.0).sum(-1, keepdim=True)
        return first + torch.where(mask[:, half:], gradient[:, half:], 0.0).sum(-1, keepdim=True), None


def _at_tokens(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return x if x.shape == mask.shape else cast(torch.Tensor, _RowAtTokens.apply(x, mask))


def _ratio_statistics(ratio: torch.Tensor, tokens: Tokens) -> dict[str, Statistic]:
    smallest = tokens.minimum(ratio)
    zeroed = tokens.zero_elsewhere(ratio)
    return {
        "ratio/min": smallest,
        "ratio/mean": tokens.mean(zeroed, zeroed=True),
        "ratio/max": tokens.maximum(zeroed, zeroed=True),
    }
