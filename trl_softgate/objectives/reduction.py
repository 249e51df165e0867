"""From per-token losses to one number."""

import torch

from ..validation import require_choice
from .ratios import as_mask, masked

AGGREGATIONS = ("seq_mean_token_mean", "token_mean")


def reduce_loss(
    per_token_loss: torch.Tensor,
    mask: torch.Tensor,
    aggregation: str,
    denominator: float | torch.Tensor | None = None,
) -> torch.Tensor:
    """Reduce a (B, T) loss over tokens and rows.

    `"seq_mean_token_mean"` (GRPO, GSPO and SAPO papers): sum over rows of the row's token mean, over the number of
    rows. A row without a valid token counts as 0, and still counts as a row.
    `"token_mean"` (SAF-OPD's reference runs): sum over all valid tokens, over the number of valid tokens.

    Args:
        per_token_loss: (B, T); masked cells may hold anything.
        mask: (B, T), 0/1.
        aggregation: one of the two names.
        denominator: rows (first form) or tokens (second form) of the whole optimizer step, so that the sum of the
            micro-batches' losses is the loss of the step; default: those of this batch. Clamped to at least 1.

    Returns:
        0-dim tensor; exactly 0, with its graph kept, when no token is valid.

    Raises:
        ValueError: unknown `aggregation`, or a mask of another shape.
    """
    require_choice("aggregation", aggregation, AGGREGATIONS)
    mask = as_mask(mask, per_token_loss)
    loss = masked(per_token_loss, mask)
    if aggregation == "seq_mean_token_mean":
        loss = loss.sum(-1) / mask.sum(-1, dtype=torch.int32).clamp(min=1)
        size: float | torch.Tensor = loss.shape[0] if denominator is None else denominator
    else:
        size = mask.sum() if denominator is None else denominator
    return loss.sum() / (size.clamp(min=1) if isinstance(size, torch.Tensor) else max(size, 1))
