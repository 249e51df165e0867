"""Per-token policy losses: hard clip per token (GRPO) or per sequence (GSPO), and the soft gate (SAPO).

All take `per_token_logps` (log pi_theta of the sampled tokens, with gradient), `old_per_token_logps` (log pi_old),
`advantages` (B,) or (B, T), and `mask` (1 where the model wrote the token), and give the loss at each token, to be
reduced by `reduce_loss`. Masked cells may hold anything in any input.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from ..diagnostics import statistics
from ..diagnostics.statistics import Statistic
from ..validation import require_choice, require_number
from .ratios import as_mask, bounded_exp, log_ratio, masked, require_shape, sequence_log_ratio


@dataclass(frozen=True)
class ObjectiveOutput:
    """What an objective returns.

    Attributes:
        per_token_loss: (B, T), with gradient; 0 at masked cells.
        ratio: (B, T) importance ratio that the objective used, with gradient; 1 at masked cells.
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
    mask, advantages = _prepare(per_token_logps, old_per_token_logps, advantages, mask)
    ratio = bounded_exp(log_ratio(per_token_logps, old_per_token_logps, mask))
    return _clipped(ratio, advantages, mask, epsilon_low, epsilon_high, delta)


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
    mask, advantages = _prepare(per_token_logps, old_per_token_logps, advantages, mask)
    row = sequence_log_ratio(log_ratio(per_token_logps, old_per_token_logps, mask), mask)
    if level == "sequence":
        exponent = torch.where(mask, row, 0.0)
    else:
        # x - sg(x) is 0 with the gradient of x; a log-probability of -inf would make it NaN
        logps = masked(per_token_logps, mask & torch.isfinite(per_token_logps))
        exponent = torch.where(mask, logps - logps.detach() + row.detach(), 0.0)
    return _clipped(bounded_exp(exponent), advantages, mask, epsilon_low, epsilon_high, delta)


def sapo_loss(
    per_token_logps: torch.Tensor,
    old_per_token_logps: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    tau_pos: float,
    tau_neg: float,
) -> ObjectiveOutput:
    """Soft-gated surrogate with one ratio per token (SAPO, arXiv 2511.20347, eqs. 5-6).

    loss = -A * soft_gate(r, tau), with tau = `tau_pos` where A > 0 and `tau_neg` elsewhere, token by token.

    Args:
        per_token_logps, old_per_token_logps, advantages, mask: as in `grpo_loss`.
        tau_pos, tau_neg: temperatures; finite, > 0 (paper: 1.0 and 1.05).

    Raises:
        ValueError: a shape or an option is out of range.
    """
    require_number("tau_pos", tau_pos, above=0)
    require_number("tau_neg", tau_neg, above=0)
    mask, advantages = _prepare(per_token_logps, old_per_token_logps, advantages, mask)
    ratio = bounded_exp(log_ratio(per_token_logps, old_per_token_logps, mask))
    positive = advantages > 0
    # of the ratio's dtype from the start: where() of two floats is float32
    tau = torch.full_like(ratio, tau_neg, requires_grad=False).masked_fill(positive, tau_pos)
    weight = soft_gate_weight(ratio.detach(), tau)
    return ObjectiveOutput(
        per_token_loss=-advantages * soft_gate(ratio, tau),
        ratio=ratio,
        statistics=_ratio_statistics(ratio, mask)
        | {
            "gate/weight_pos": statistics.mean(weight, mask & positive),
            "gate/weight_neg": statistics.mean(weight, mask & (advantages < 0)),
        },
    )


def soft_gate(ratio: torch.Tensor, tau: float | torch.Tensor) -> torch.Tensor:
    """SAPO's gate f(r) = 4 / tau * sigmoid(tau * (r - 1)) (arXiv 2511.20347, eq. 6): any shape, slope 1 at r = 1."""
    return torch.sigmoid(tau * (ratio - 1)) * (4 / tau)


def soft_gate_weight(ratio: torch.Tensor, tau: float | torch.Tensor) -> torch.Tensor:
    """Derivative of the gate, w(r) = 4 p (1 - p), p = sigmoid(tau * (r - 1)): in [0, 1], 1 at r = 1 for every tau.

    The policy gradient of a token is w(r) * r * A * grad log pi_theta (arXiv 2511.20347, section 3).
    """
    p = torch.sigmoid(tau * (ratio - 1))
    return 4 * p * (1 - p)


def _prepare(
    per_token_logps: torch.Tensor, old_per_token_logps: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Checked bool mask and (B, T) advantages, 0 at masked cells."""
    require_shape("old_per_token_logps", old_per_token_logps, per_token_logps)
    return as_mask(mask, per_token_logps), token_advantages(advantages, mask)


def token_advantages(advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Advantages of shape (B,) or (B, T) at each token: (B, T), 0 at masked cells.

    Raises:
        ValueError: any other shape.
    """
    if advantages.shape == mask.shape[:1]:
        advantages = advantages.unsqueeze(1).expand(mask.shape)
    elif advantages.shape != mask.shape:
        raise ValueError(
            f"`advantages` must have shape {tuple(mask.shape[:1])} or {tuple(mask.shape)}, got "
            f"{tuple(advantages.shape)}."
        )
    return masked(advantages, as_mask(mask))


def _clipped(
    ratio: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    epsilon_low: float,
    epsilon_high: float,
    delta: float | None,
) -> ObjectiveOutput:
    require_number("epsilon_low", epsilon_low, minimum=0, below=1)
    require_number("epsilon_high", epsilon_high, minimum=0)
    low, high = 1 - epsilon_low, 1 + epsilon_high
    unclipped = ratio
    if delta is not None:
        require_number("delta", delta, above=0)
        unclipped = ratio.clamp(max=delta)
    per_token_loss = -torch.min(unclipped * advantages, ratio.clamp(low, high) * advantages)
    clipped_low = (ratio < low) & (advantages < 0)
    clipped_high = (ratio > high) & (advantages > 0)
    return ObjectiveOutput(
        per_token_loss=per_token_loss,
        ratio=ratio,
        statistics=_ratio_statistics(ratio, mask)
        | {
            "clip_ratio/low_mean": statistics.mean(clipped_low, mask),
            "clip_ratio/high_mean": statistics.mean(clipped_high, mask),
            "clip_ratio/region_mean": statistics.mean(clipped_low | clipped_high, mask),
        },
    )


def _ratio_statistics(ratio: torch.Tensor, mask: torch.Tensor) -> dict[str, Statistic]:
    return {
        "ratio/min": statistics.minimum(ratio, mask),
        "ratio/mean": statistics.mean(ratio, mask),
        "ratio/max": statistics.maximum(ratio, mask),
    }
