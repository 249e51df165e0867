"""What a recorded optimizer step holds beyond its scalars: histograms, one line per row, the tokens of a few rows.

Pure torch, collected on the device micro-batch by micro-batch, and read once at the end of the step.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ..objectives.gates import Gate
from ..objectives.policy import token_advantages
from ..objectives.ratios import as_mask, bounded_exp, log_ratio, sequence_log_ratio
from .statistics import histogram

TOP_TOKENS = 12


def _around_zero(decades: tuple[int, int], last: float) -> list[float]:
    """Edges on a logarithmic scale on both sides of 0, eight per decade, open at the ends."""
    first, end = decades
    steps = [10 ** (first + i / 8) for i in range(8 * (end - first) + 1)]
    positive = [step for step in steps if step < last] + [last]
    return [-float("inf"), *(-edge for edge in reversed(positive)), *positive, float("inf")]


# Of log-ratios. Token ratios differ from 1 by 1e-1, those of sequences by 1e-4, and both may run away.
LOG_RATIO_EDGES = _around_zero((-6, 1), 20.0)
RATIO_EDGES = [math.exp(edge) for edge in LOG_RATIO_EDGES]
WEIGHT_EDGES = [i / 100 for i in range(101)]
ABSOLUTE_EDGES = [0.0, *(10 ** (-6 + i / 8) for i in range(65)), float("inf")]


def row_log_ratios(token_log_ratio: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and (population) variance of the log-ratio over each row's valid tokens: (B,), (B,); 0 where empty."""
    count = mask.sum(-1, keepdim=True).clamp(min=1)
    mean = sequence_log_ratio(token_log_ratio, count)
    variance = ((token_log_ratio - mean).square() * mask).sum(-1, keepdim=True) / count
    return mean.squeeze(1), variance.squeeze(1)


def gate_gap(
    token_log_ratio: torch.Tensor, mask: torch.Tensor, tau: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """D_i = |mean over the row of g(log r_t) - g(log s_i)| and its bound tau^2 / 4 * Var_i; g(z) = sech(tau z / 2)^2.

    How far SAPO's gate of the tokens is from a gate of the sequence (arXiv 2511.20347, section 4). The bound is that
    of a Taylor expansion to second order, whose second derivative is at most tau^2 / 2 in absolute value.

    Args:
        token_log_ratio: (B, T), 0 at masked cells.
        mask: (B, T) bool.
        tau: (B,), > 0.

    Returns:
        (B,), (B,).
    """
    mean, variance = row_log_ratios(token_log_ratio, mask)
    tau = tau.to(mean.dtype)

    def gate(z: torch.Tensor, tau: torch.Tensor) -> torch.Tensor:
        p = torch.sigmoid(tau * z)
        return 4 * p * (1 - p)

    tokens = gate(token_log_ratio, tau.unsqueeze(1)) * mask
    average = tokens.sum(-1) / mask.sum(-1).clamp(min=1)
    gap = torch.where(mask.any(-1), (average - gate(mean, tau)).abs(), 0.0)
    return gap, tau.square() / 4 * variance


@dataclass
class StepObserver:
    """Collects over the micro-batches of one optimizer step of one process."""

    counts: dict[str, torch.Tensor] = field(default_factory=dict)
    changed_experts: torch.Tensor | None = None
    _edges: dict[str, list[float]] = field(default_factory=dict)
    _rows: list[torch.Tensor] = field(default_factory=list)
    _tokens: list[torch.Tensor] = field(default_factory=list)

    def histogram(
        self, name: str, x: torch.Tensor, mask: torch.Tensor, edges: list[float], shown: list[float] | None = None
    ) -> None:
        """Count `x` over the cells of the bool `mask`, of the same shape; `shown`: the edges to report."""
        counts = histogram(x, mask, edges)
        self._edges[name] = edges if shown is None else shown
        self.counts[name] = self.counts[name] + counts if name in self.counts else counts

    def ratios(
        self,
        per_token_logps: torch.Tensor,
        old_per_token_logps: torch.Tensor,
        advantages: torch.Tensor,
        mask: torch.Tensor,
        gate: Gate | None = None,
    ) -> None:
        """Token and sequence ratios, and what they say of each row, and of SAPO's gate.

        Args:
            per_token_logps, old_per_token_logps, mask: (B, T).
            advantages: (B,) or (B, T); a row counts as positive by its mean.
        """
        mask = as_mask(mask)
        token = log_ratio(per_token_logps.detach(), old_per_token_logps, mask)
        mean, variance = row_log_ratios(token, mask)
        filled = mask.any(-1)
        self.histogram("ratio/token", token, mask, LOG_RATIO_EDGES, RATIO_EDGES)
        self.histogram("ratio/sequence", mean, filled, LOG_RATIO_EDGES, RATIO_EDGES)
        count = mask.sum(-1)
        advantage = advantages
        if advantages.dim() == 2:
            advantage = torch.where(mask, advantages, 0.0).sum(-1) / count.clamp(min=1)
        gap = bound = torch.full_like(mean, float("nan"))
        if gate is not None:
            if gate.kernel == "sigmoid":  # the bound is derived for that one
                gap, bound = gate_gap(token, mask, gate.tau(advantage > 0, mean))
            signs = token_advantages(advantages, mask)
            _, weight = gate(bounded_exp(token), signs > 0)
            self.histogram("gate/weight_pos", weight, mask & (signs > 0), WEIGHT_EDGES)
            self.histogram("gate/weight_neg", weight, mask & (signs < 0), WEIGHT_EDGES)
        rows = torch.stack([advantage.to(mean.dtype), count.to(mean.dtype), mean, variance, gap, bound], dim=1)
        # rows without a token, with which a process fills up, carry nothing
        self._rows.append(torch.where(filled.unsqueeze(1), rows, float("inf")))

    def teacher(
        self, opd_advantages: torch.Tensor, completion_ids: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor
    ) -> None:
        """|A_opd| of all tokens, and the largest of each row with their places.

        Args:
            opd_advantages, completion_ids, mask: (B, T); `mask` are tokens with a teacher value.
            advantages: (B,) or (B, T), of the reward.
        """
        self.histogram("distill/opd_abs", opd_advantages.abs(), mask, ABSOLUTE_EDGES)
        count = mask.sum(-1, keepdim=True)
        advantage = advantages.unsqueeze(1) if advantages.dim() == 1 else advantages[:, :1]
        magnitude = torch.where(mask, opd_advantages.abs(), -1.0)
        largest, place = magnitude.topk(min(TOP_TOKENS, mask.shape[1]), dim=1)
        wide = torch.float32 if mask.device.type == "mps" else torch.float64  # holds any token id
        values = opd_advantages.gather(1, place).masked_fill(largest < 0, float("nan"))
        mean = torch.where(mask, opd_advantages, 0.0).sum(-1, keepdim=True) / count.clamp(min=1)
        parts = [mean.masked_fill(count == 0, float("nan")), advantage, values, place, completion_ids.gather(1, place)]
        lines = torch.cat([part.to(wide) for part in parts], dim=1)
        missing = 2 + 3 * TOP_TOKENS - lines.shape[1]
        if missing:  # fewer columns than tokens wanted
            head, *groups = lines[:, :2], *lines[:, 2:].split(largest.shape[1], dim=1)
            pad = (0, TOP_TOKENS - largest.shape[1])
            lines = torch.cat([head, *(torch.nn.functional.pad(g, pad, value=float("nan")) for g in groups)], dim=1)
        self._tokens.append(lines)

    def experts(self, changed: torch.Tensor) -> None:
        """Add up, for each layer, choices of experts that changed since the rollout, and all: (layers, 2)."""
        self.changed_experts = changed if self.changed_experts is None else self.changed_experts + changed

    def read(self, reduce: Callable[[torch.Tensor], torch.Tensor], gather: Callable[[list[Any]], list[Any]]) -> "Seen":
        """The step over all processes.

        Args:
            reduce: sum over processes.
            gather: lists of all processes, joined.
        """
        histograms = {}
        if self.counts:
            totals = reduce(torch.cat(list(self.counts.values()))).split([len(c) for c in self.counts.values()])
            histograms = {
                name: (self._edges[name], counts.tolist()) for name, counts in zip(self.counts, totals, strict=True)
            }
        experts: list[float] = []
        if self.changed_experts is not None:
            experts = [changed / max(total, 1) for changed, total in reduce(self.changed_experts).tolist()]
        rows = torch.cat(self._rows).tolist() if self._rows else []
        tokens = torch.cat(self._tokens).tolist() if self._tokens else []
        return Seen(histograms, gather([row for row in rows if row[1] != float("inf")]), tokens, experts)


@dataclass(frozen=True)
class Seen:
    """What was observed in one optimizer step.

    Attributes:
        histograms: (edges, counts) by name.
        rows: of all processes, each [advantage, length, mean log-ratio, its variance, gate gap, gate bound].
        tokens: of this process, each [mean A_opd, advantage, A_opd x 12, position x 12, token id x 12].
        changed_experts: by layer, share of the experts chosen at the rollout that are chosen no more.
    """

    histograms: dict[str, tuple[list[float], list[int]]]
    rows: list[list[float]]
    tokens: list[list[float]]
    changed_experts: list[float]

    def notable_rows(self) -> list[tuple[str, int, list[tuple[int, int, float]], float]]:
        """The row whose tokens the teacher likes least, one about which it is neutral, and the one it likes most.

        Returns:
            (kind, row, [(position, token id, A_opd), ... largest first], advantage of the reward).
        """
        known = [(line[0], i) for i, line in enumerate(self.tokens) if line[0] == line[0]]
        if not known:
            return []
        picks = {
            "most negative": min(known),
            "neutral": min(known, key=lambda pair: abs(pair[0])),
            "most positive": max(known),
        }
        notable = []
        for kind, (_, i) in picks.items():
            line = self.tokens[i]
            values, places, ids = (line[2 + k * TOP_TOKENS : 2 + (k + 1) * TOP_TOKENS] for k in range(3))
            found = [(int(p), int(t), v) for v, p, t in zip(values, places, ids, strict=True) if v == v]
            notable.append((kind, i, found, line[1]))
        return notable
