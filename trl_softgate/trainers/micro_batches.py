"""Rollout rows dealt to micro-batches that cost less: of similar length, without padding, without rows of no signal.

Letters: `B` rows, `P` prompt columns (padded on the left), `T` completion columns (padded on the right).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

_POSITIONS_BY_LENGTH = ("dynamic", "longrope")


@dataclass(frozen=True)
class Savings:
    """What may be left out of a micro-batch without changing the optimizer step's gradient.

    Attributes:
        trim_prompt, trim_completion: cut columns that are padding in every row.
        group: deal the rows that share an optimizer step by length.
        skip: leave out rows without signal.
        multiple: keep widths a multiple of this.
    """

    trim_prompt: bool
    trim_completion: bool
    group: bool
    skip: bool
    multiple: int | None


def padding_matters(config: Any) -> tuple[bool, bool]:
    """Whether padding on the left, and on the right, of a row changes what a model of this config computes.

    On the left it does unless positions are relative; on the right only where the positions of all tokens are scaled
    by the longest row.
    """
    rope = getattr(config.get_text_config(), "rope_parameters", None)
    if not rope:
        return True, False
    kinds = [rope, *(part for part in rope.values() if isinstance(part, dict))]
    by_length = any(part.get("rope_type") in _POSITIONS_BY_LENGTH for part in kinds)
    return by_length, by_length


def extents(prompt_mask: torch.Tensor, completion_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Columns that each row needs: of its prompt, from the right, and of its completion, from the left; (B,), (B,)."""
    place = torch.arange(1, prompt_mask.shape[1] + 1, device=prompt_mask.device).flip(0)
    prompts = (place * (prompt_mask != 0)).amax(1)
    place = torch.arange(1, completion_mask.shape[1] + 1, device=completion_mask.device)
    return prompts, (place * (completion_mask != 0)).amax(1)


def width(needed: list[int], available: int, trim: bool, multiple: int | None) -> int:
    """Columns that a micro-batch keeps: what its rows need, at least 1."""
    if not trim:
        return available
    columns = max([1, *needed])
    if multiple is not None:
        columns = -(-columns // multiple) * multiple
    return min(columns, available)


def deal(
    buffer: list[dict[str, Any]],
    together: int,
    savings: Savings,
    signal: Callable[[dict[str, Any]], torch.Tensor],
    tokens: Callable[[dict[str, Any]], torch.Tensor],
    most: Callable[[torch.Tensor], torch.Tensor],
) -> list[dict[str, Any]]:
    """As many micro-batches as before, with the same rows in each optimizer step.

    Rows move only among `together` neighbors. Where rows without signal leave fewer micro-batches than that, those in
    front are empty, so that the last one, at which gradients are reduced and applied, never is. A process with fewer
    rows than another fills up with rows of its own that are masked out: each calls the model equally often.

    Args:
        buffer: micro-batches of b rows; tensors of shape (b, ...), lists of b, or scalars, by name. Tensors of shape
            (b, T) belong to completions.
        together: micro-batches that always share an optimizer step; a divisor of their number.
        signal: rows -> (B,) bool, whether the row has a gradient.
        tokens: rows -> number of valid tokens, 0-dim.
        most: (K,) on this process -> the largest of all processes, element by element.

    Returns:
        Micro-batches with the entries of `buffer`, and `num_rows` and `num_tokens`: what they stand for in the
        denominators of the optimizer step, with the rows left out.
    """
    size = len(buffer[0]["completion_ids"])
    chunks = [_join(buffer[i : i + together]) for i in range(0, len(buffer), together)]
    orders = []
    for chunk in chunks:
        prompts, completions = extents(chunk["prompt_mask"], chunk["completion_mask"])
        live = signal(chunk) if savings.skip else torch.ones_like(prompts, dtype=torch.bool)
        # one transfer from the device
        orders.append(torch.stack([prompts, completions, live.long()], dim=1).tolist())
    needed = torch.tensor([max(1, -(-sum(live for *_, live in rows) // size)) for rows in orders])
    needed = (most(needed) if savings.skip else needed).tolist()

    dealt: list[dict[str, Any]] = []
    for chunk, rows, count in zip(chunks, orders, needed, strict=True):
        lengths = [prompt + completion for prompt, completion, _ in rows]
        live = [i for i, row in enumerate(rows) if row[2]]
        silent = sorted((i for i, row in enumerate(rows) if not row[2]), key=lambda i: rows[i][0])
        fillers = silent[: max(0, count - len(live))]
        if savings.group:
            # the longest first: what does not fit into memory fails at once
            live.sort(key=lambda i: -lengths[i])
        order = live + fillers
        edges = [i * len(order) // count for i in range(count + 1)]
        represented = tokens(chunk)
        parts = [[]] * (together - count) + [order[a:b] for a, b in zip(edges, edges[1:], strict=False)]
        for part in parts:
            dealt.append(
                {
                    **_take(chunk, part, [i for i in part if i in fillers], rows, savings),
                    "num_rows": size,
                    "num_tokens": torch.zeros_like(represented),
                }
            )
        dealt[-1]["num_tokens"] = represented
    return dealt


def _join(batches: list[dict[str, Any]]) -> dict[str, Any]:
    joined: dict[str, Any] = {}
    for name, first in batches[0].items():
        if isinstance(first, torch.Tensor) and first.dim() > 0:
            joined[name] = torch.cat([batch[name] for batch in batches])
        elif isinstance(first, list):
            joined[name] = [value for batch in batches for value in batch[name]]
        else:
            joined[name] = first
    return joined


def _take(
    chunk: dict[str, Any], rows: list[int], masked_out: list[int], sizes: list[list[int]], savings: Savings
) -> dict[str, Any]:
    """The given rows of a chunk, without columns of padding."""
    prompt_columns, completion_columns = chunk["prompt_ids"].shape[1], chunk["completion_ids"].shape[1]
    kept = [i for i in rows if i not in masked_out]
    prompt = width([sizes[i][0] for i in rows], prompt_columns, savings.trim_prompt, savings.multiple)
    completion = width([sizes[i][1] for i in kept], completion_columns, savings.trim_completion, savings.multiple)
    index = torch.tensor(rows, dtype=torch.long, device=chunk["completion_ids"].device)
    taken: dict[str, Any] = {}
    for name, value in chunk.items():
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            value = value[index]
            if name in ("prompt_ids", "prompt_mask"):
                value = value[:, prompt_columns - prompt :]
            elif value.dim() > 1 and value.shape[1] == completion_columns:
                value = value[:, :completion]
        elif isinstance(value, list):
            value = [value[i] for i in rows]
        taken[name] = value
    if masked_out:
        off = torch.tensor([i in masked_out for i in rows], device=index.device)
        taken["completion_mask"] = taken["completion_mask"].masked_fill(off.unsqueeze(1), 0)
    return taken
