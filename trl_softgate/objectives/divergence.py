"""Divergences between policies, estimated on the student's own samples."""

import torch

from .ratios import LOG_RATIO_BOUND, as_mask, is_finite, log_ratio, require_shape

_KL_BOUND = 10.0


def k3_divergence(
    per_token_logps: torch.Tensor, teacher_per_token_logps: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """KL(pi_theta || pi_T) at each token, on tokens sampled by the student (k3 estimator).

    x = clamp(log pi_T - log pi_theta, -20, 20), kl = clamp(exp(x) - x - 1, -10, 10) (SAF-OPD, arXiv 2607.29209,
    appendix C). Tokens whose teacher value is not finite give 0; leave them out of the mean, as masked cells.

    Args:
        per_token_logps, teacher_per_token_logps: (B, T) log-probabilities of the same tokens.
        mask: (B, T), 0/1.

    Returns:
        (B, T), 0 at masked cells.

    Raises:
        ValueError: the shapes differ.
    """
    require_shape("teacher_per_token_logps", teacher_per_token_logps, per_token_logps)
    mask = as_mask(mask, per_token_logps) & is_finite(teacher_per_token_logps)
    x = log_ratio(teacher_per_token_logps, per_token_logps, mask).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return (x.exp() - x - 1).clamp(-_KL_BOUND, _KL_BOUND)
