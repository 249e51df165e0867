"""Importance ratios in log space, masked first and bounded before `exp`."""

import torch

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to +-20 right before `exp`: a ratio of 4.9e8 or 2.1e-9 carries no more information, while
`exp` in float32 overflows at 88.7 and turns the gradient NaN even where a clip or a gate hides it in the loss."""


def as_mask(mask: torch.Tensor, like: torch.Tensor | None = None) -> torch.Tensor:
    """The 0/1 mask as bool.

    Raises:
        ValueError: `mask` has another shape than `like`, (B, T); broadcasting would hide a mistake.
    """
    if like is not None:
        require_shape("mask", mask, like)
    return mask if mask.dtype == torch.bool else mask != 0


def require_shape(name: str, tensor: torch.Tensor, like: torch.Tensor) -> None:
    """Raise `ValueError` unless `tensor` has the shape of `like`, which is (B, T)."""
    if like.dim() != 2 or tensor.shape != like.shape:
        raise ValueError(
            f"`{name}` must have the shape (B, T) of what it belongs to, got {tuple(tensor.shape)} and "
            f"{tuple(like.shape)}."
        )


def at_least_float32(x: torch.Tensor) -> torch.Tensor:
    """float32 and float64 pass through; everything below is raised to float32."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def masked(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`x` in float32 at least, with 0 in the cells where the bool `mask` is false, whatever stood there.

    Must come before any arithmetic: 0 * NaN is NaN, in the loss and in the gradient.
    """
    return torch.where(mask, at_least_float32(x), 0.0)


def bounded_exp(x: torch.Tensor) -> torch.Tensor:
    """`exp(x)`, with `x` clamped to +-`LOG_RATIO_BOUND`; outside, the gradient is 0."""
    # hardtanh is a clamp whose backward is one pass instead of four
    return torch.nn.functional.hardtanh(x, -LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def is_finite(x: torch.Tensor) -> torch.Tensor:
    """`torch.isfinite`, with fewer passes over `x`."""
    return x.abs() < float("inf")


def log_ratio(per_token_logps: torch.Tensor, old_per_token_logps: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Per-token log importance ratio, log pi_theta - log pi_old: (B, T), 0 at masked cells, not yet bounded."""
    # A difference hands its gradient on as it is, so masking it masks both terms; in place, because it is the one
    # (B, T) tensor that GSPO needs.
    difference = at_least_float32(per_token_logps) - at_least_float32(old_per_token_logps)
    return difference.masked_fill_(~mask, 0.0)


def sequence_log_ratio(token_log_ratio: torch.Tensor, tokens_per_row: torch.Tensor) -> torch.Tensor:
    """Length-normalized log-ratio of each row (GSPO, arXiv 2507.18071, eq. 7): (B, T), (B, 1) -> (B, 1); 0 where
    empty."""
    return token_log_ratio.sum(-1, keepdim=True) / tokens_per_row.clamp(min=1)
