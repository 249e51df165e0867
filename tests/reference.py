"""The mathematics of the package once more, as plain loops over Python floats (float64).

Nothing here is vectorised or differentiated automatically: every value and every derivative is written out, so that a
mistake in the tensor code cannot be repeated here by accident. Rows are nested lists, (B, T); advantages are (B,) or
(B, T); masks hold 0/1 or booleans. Masked cells of a result are 0.

Sources: GRPO arXiv 2402.03300, GSPO arXiv 2507.18071 (eq. 7 and 14), SAPO arXiv 2511.20347 (eq. 5-6),
SAF-OPD arXiv 2607.29209 (section 3, appendix C).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

Rows = list[list[float]]

LOG_RATIO_BOUND = 20.0


def zeros(mask: Sequence[Sequence[Any]]) -> Rows:
    return [[0.0 for _ in row] for row in mask]


def advantage_at(advantages: Sequence[Any], b: int, t: int) -> float:
    """The advantage of token (b, t), whether given per row or per token."""
    entry = advantages[b]
    return float(entry[t]) if isinstance(entry, list | tuple) else float(entry)


def sigmoid(x: float) -> float:
    if x >= 0:
        return 1.0 / (1.0 + math.exp(-x))
    return math.exp(x) / (1.0 + math.exp(x))


def bounded_exp(x: float) -> tuple[float, float]:
    """exp of x bounded to [-20, 20], and its derivative: 0 outside the bound, where the value is constant."""
    if x > LOG_RATIO_BOUND:
        return math.exp(LOG_RATIO_BOUND), 0.0
    if x < -LOG_RATIO_BOUND:
        return math.exp(-LOG_RATIO_BOUND), 0.0
    return math.exp(x), math.exp(x)


@dataclass
class Objective:
    """One objective on one batch.

    `jacobian[b][t][u]` is d loss[b][t] / d lp[b][u]; rows never depend on each other.
    """

    loss: Rows
    ratio: Rows
    jacobian: list[list[list[float]]]
    metrics: dict[str, float]

    def gradient(self, weights: Rows) -> Rows:
        """d (sum over (b, t) of weights * loss) / d lp."""
        out = zeros(self.loss)
        for b, row in enumerate(self.jacobian):
            for t, derivatives in enumerate(row):
                for u, derivative in enumerate(derivatives):
                    out[b][u] += weights[b][t] * derivative
        return out


def token_log_ratios(lp: Rows, old: Rows, mask: Sequence[Sequence[Any]]) -> Rows:
    """lp - old, before the bound; 0 at masked cells."""
    return [[lp[b][t] - old[b][t] if m else 0.0 for t, m in enumerate(row)] for b, row in enumerate(mask)]


def sequence_log_ratios(lp: Rows, old: Rows, mask: Sequence[Sequence[Any]]) -> list[float]:
    """Mean of lp - old over the valid tokens of each row, before the bound; 0 for a row without any."""
    out = []
    for b, row in enumerate(mask):
        differences = [lp[b][t] - old[b][t] for t, m in enumerate(row) if m]
        if any(math.isinf(d) for d in differences):
            out.append(sum(differences))
        else:
            out.append(math.fsum(differences) / len(differences) if differences else 0.0)
    return out


def clipped_loss(
    ratio: float, advantage: float, epsilon_low: float, epsilon_high: float, delta: float | None
) -> tuple[float, float]:
    """-min(min(ratio, delta) * A, clip(ratio) * A) and its derivative with respect to the ratio.

    A clip passes the derivative inside its band, ends included; a minimum of two equal branches takes the mean of
    their derivatives, which inside the band is the derivative of either.
    """
    low, high = 1.0 - epsilon_low, 1.0 + epsilon_high
    free, free_slope = ratio, 1.0
    if delta is not None and ratio > delta:
        free, free_slope = delta, 0.0
    clipped, clipped_slope = ratio, 1.0
    if ratio < low:
        clipped, clipped_slope = low, 0.0
    elif ratio > high:
        clipped, clipped_slope = high, 0.0
    if free * advantage < clipped * advantage:
        return -free * advantage, -advantage * free_slope
    if free * advantage > clipped * advantage:
        return -clipped * advantage, -advantage * clipped_slope
    return -free * advantage, -advantage * (free_slope + clipped_slope) / 2


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


def ratio_metrics(ratios: Sequence[float]) -> dict[str, float]:
    return {
        "ratio/min": min(ratios, default=0.0),
        "ratio/mean": mean(ratios),
        "ratio/max": max(ratios, default=0.0),
    }


def clip_metrics(cells: Sequence[tuple[float, float]], epsilon_low: float, epsilon_high: float) -> dict[str, float]:
    """`cells`: (ratio, advantage) of every valid token."""
    low = [1.0 if r < 1.0 - epsilon_low and a < 0 else 0.0 for r, a in cells]
    high = [1.0 if r > 1.0 + epsilon_high and a > 0 else 0.0 for r, a in cells]
    return {
        "clip_ratio/low_mean": mean(low),
        "clip_ratio/high_mean": mean(high),
        "clip_ratio/region_mean": mean([max(x, y) for x, y in zip(low, high, strict=True)]),
    }


def grpo(
    lp: Rows,
    old: Rows,
    advantages: Sequence[Any],
    mask: Sequence[Sequence[Any]],
    *,
    epsilon_low: float,
    epsilon_high: float,
    delta: float | None = None,
) -> Objective:
    """Token ratio r = exp(lp - old), clipped; d r / d lp = r."""
    loss, ratio = zeros(mask), zeros(mask)
    jacobian = [[[0.0] * len(row) for _ in row] for row in mask]
    cells = []
    logs = token_log_ratios(lp, old, mask)
    for b, row in enumerate(mask):
        for t, m in enumerate(row):
            if not m:
                continue
            a = advantage_at(advantages, b, t)
            r, slope = bounded_exp(logs[b][t])
            loss[b][t], d_ratio = clipped_loss(r, a, epsilon_low, epsilon_high, delta)
            ratio[b][t] = r
            jacobian[b][t][t] = d_ratio * slope
            cells.append((r, a))
    metrics = ratio_metrics([r for r, _ in cells]) | clip_metrics(cells, epsilon_low, epsilon_high)
    return Objective(loss, ratio, jacobian, metrics)


def gspo(
    lp: Rows,
    old: Rows,
    advantages: Sequence[Any],
    mask: Sequence[Sequence[Any]],
    *,
    epsilon_low: float,
    epsilon_high: float,
    level: str,
    delta: float | None = None,
) -> Objective:
    """Sequence ratio s = exp(mean(lp - old)), clipped.

    level "sequence" (eq. 7): d s / d lp_u = s / n for each of the n valid tokens u of the row.
    level "token" (eq. 14): the ratio of token t has value s and derivative s with respect to lp_t alone.
    """
    loss, ratio = zeros(mask), zeros(mask)
    jacobian = [[[0.0] * len(row) for _ in row] for row in mask]
    cells = []
    logs = sequence_log_ratios(lp, old, mask)
    for b, row in enumerate(mask):
        valid = [t for t, m in enumerate(row) if m]
        s, slope = bounded_exp(logs[b])
        for t in valid:
            a = advantage_at(advantages, b, t)
            loss[b][t], d_ratio = clipped_loss(s, a, epsilon_low, epsilon_high, delta)
            ratio[b][t] = s
            if level == "token":
                jacobian[b][t][t] = d_ratio * slope
            else:
                for u in valid:
                    jacobian[b][t][u] = d_ratio * slope / len(valid)
            cells.append((s, a))
    metrics = ratio_metrics([r for r, _ in cells]) | clip_metrics(cells, epsilon_low, epsilon_high)
    return Objective(loss, ratio, jacobian, metrics)


def soft_gate(ratio: float, tau: float, kernel: str = "sigmoid") -> float:
    x = tau * (ratio - 1.0)
    if kernel == "gaussian":
        return (2.0 + math.sqrt(math.pi) * math.erf(x / 2.0)) / tau
    if kernel == "exponential":
        return (2.0 + math.copysign(2.0 * (1.0 - math.exp(-abs(x) / 2.0)), x)) / tau
    if kernel == "student_t":
        return (2.0 + 0.5 * x / (1.0 + x * x / 8.0) + math.sqrt(2.0) * math.atan(x / math.sqrt(8.0))) / tau
    return 4.0 / tau * sigmoid(x)


def soft_gate_weight(ratio: float, tau: float, kernel: str = "sigmoid") -> float:
    """4 p (1 - p); 1 - p is taken as sigmoid(-x), which does not cancel."""
    x = tau * (ratio - 1.0)
    if kernel == "gaussian":
        return math.exp(-x * x / 4.0)
    if kernel == "exponential":
        return math.exp(-abs(x) / 2.0)
    if kernel == "student_t":
        return 1.0 / (1.0 + x * x / 8.0) ** 2
    return 4.0 * sigmoid(x) * sigmoid(-x)


def sapo(
    lp: Rows,
    old: Rows,
    advantages: Sequence[Any],
    mask: Sequence[Sequence[Any]],
    *,
    tau_pos: float,
    tau_neg: float,
    kernel: str = "sigmoid",
    hard_stop: float | None = None,
) -> Objective:
    """Soft gate on the token ratio: d loss / d lp = -A * w * r with w the gate's weight."""
    loss, ratio = zeros(mask), zeros(mask)
    jacobian = [[[0.0] * len(row) for _ in row] for row in mask]
    ratios: list[float] = []
    weights_pos: list[float] = []
    weights_neg: list[float] = []
    logs = token_log_ratios(lp, old, mask)
    for b, row in enumerate(mask):
        for t, m in enumerate(row):
            if not m:
                continue
            a = advantage_at(advantages, b, t)
            tau = tau_pos if a > 0 else tau_neg
            r, slope = bounded_exp(logs[b][t])
            inside = r if hard_stop is None else min(max(r, 1.0 / hard_stop), hard_stop)
            weight = soft_gate_weight(r, tau, kernel) if inside == r else 0.0
            loss[b][t] = -a * soft_gate(inside, tau, kernel)
            ratio[b][t] = r
            jacobian[b][t][t] = -a * weight * slope
            ratios.append(r)
            if a > 0:
                weights_pos.append(weight)
            elif a < 0:
                weights_neg.append(weight)
    metrics = ratio_metrics(ratios) | {"gate/weight_pos": mean(weights_pos), "gate/weight_neg": mean(weights_neg)}
    if hard_stop is not None:
        metrics["gate/stopped_share"] = mean([float(not 1.0 / hard_stop <= r <= hard_stop) for r in ratios])
    return Objective(loss, ratio, jacobian, metrics)


def k3(lp: Rows, teacher: Rows, mask: Sequence[Sequence[Any]]) -> Rows:
    """clamp(e^x - x - 1, -10, 10), x = clamp(teacher - lp, -20, 20); 0 without a finite teacher value."""
    out = zeros(mask)
    for b, row in enumerate(mask):
        for t, m in enumerate(row):
            if m and math.isfinite(teacher[b][t]):
                x = min(max(teacher[b][t] - lp[b][t], -20.0), 20.0)
                # expm1 keeps the digits that e^x - 1 loses near 0.
                out[b][t] = min(max(math.expm1(x) - x, -10.0), 10.0)
    return out


def reduction_weights(mask: Sequence[Sequence[Any]], aggregation: str, denominator: float | None = None) -> Rows:
    """d reduced / d loss[b][t]."""
    out = zeros(mask)
    rows, tokens = len(mask), sum(1 for row in mask for m in row if m)
    for b, row in enumerate(mask):
        count = sum(1 for m in row if m)
        for t, m in enumerate(row):
            if not m:
                continue
            if aggregation == "seq_mean_token_mean":
                out[b][t] = 1.0 / count / max(1.0, rows if denominator is None else denominator)
            elif aggregation == "token_mean":
                out[b][t] = 1.0 / max(1.0, tokens if denominator is None else denominator)
            else:
                raise ValueError(aggregation)
    return out


def reduce(loss: Rows, mask: Sequence[Sequence[Any]], aggregation: str, denominator: float | None = None) -> float:
    weights = reduction_weights(mask, aggregation, denominator)
    return math.fsum(weights[b][t] * loss[b][t] for b, row in enumerate(mask) for t, m in enumerate(row) if m)


def opd_advantage(lp: Rows, teacher: Rows, mask: Sequence[Sequence[Any]]) -> Rows:
    out = zeros(mask)
    for b, row in enumerate(mask):
        for t, m in enumerate(row):
            if m and math.isfinite(teacher[b][t]):
                out[b][t] = teacher[b][t] - lp[b][t]
    return out


def quantile(values: Sequence[float], q: Fraction) -> Fraction:
    """Linear-interpolated quantile, exact in rationals."""
    ordered = sorted(Fraction(v) for v in values)
    position = q * (len(ordered) - 1)
    below = position.numerator // position.denominator
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


def top_k_percent_filter(advantages: Rows, mask: Sequence[Sequence[Any]], k: float | None) -> Rows:
    """Per row, |A| >= the (1 - k/100) quantile of |A| over the valid tokens; 0 elsewhere."""
    out = zeros(mask)
    for b, row in enumerate(mask):
        valid = [t for t, m in enumerate(row) if m]
        if not valid:
            continue
        tau = Fraction(0)
        if k is not None and k != 100:
            tau = quantile([abs(advantages[b][t]) for t in valid], 1 - Fraction(k) / 100)
        for t in valid:
            if Fraction(abs(advantages[b][t])) >= tau:
                out[b][t] = advantages[b][t]
    return out


def tanh_compress(advantages: Rows, c: float | None) -> Rows:
    return [[x if c is None else c * math.tanh(x) for x in row] for row in advantages]


@dataclass
class Fusion:
    advantages: Rows
    metrics: dict[str, float]


def fuse(
    advantages: Sequence[Any],
    opd: Rows,
    mask: Sequence[Sequence[Any]],
    available: Sequence[Sequence[Any]] | None = None,
    *,
    grpo_coef: float = 1.0,
    opd_coef: float = 1.0,
    multiplier: float = 1.0,
    top_k_percent: float | None = None,
    tanh_coef: float | None = None,
) -> Fusion:
    """A_total, 0 at masked cells; valid tokens without a teacher value get the GRPO term alone."""
    valid = [[bool(m) for m in row] for row in mask]
    known = [
        [m and (available is None or bool(available[b][t])) for t, m in enumerate(row)] for b, row in enumerate(valid)
    ]
    kept = top_k_percent_filter(opd, known, top_k_percent)
    staged = tanh_compress(kept, tanh_coef)
    out = zeros(mask)
    before: list[float] = []
    after: list[float] = []
    grpo_sizes: list[float] = []
    term_sizes: list[float] = []
    passed: list[float] = []
    missing: list[float] = []
    for b, row in enumerate(valid):
        sizes = [abs(opd[b][t]) for t, k in enumerate(known[b]) if k]
        tau = Fraction(0)
        if sizes and top_k_percent is not None and top_k_percent != 100:
            tau = quantile(sizes, 1 - Fraction(top_k_percent) / 100)
        for t, m in enumerate(row):
            if not m:
                continue
            parent = grpo_coef * advantage_at(advantages, b, t)
            term = 0.0
            if known[b][t]:
                term = opd_coef * multiplier * staged[b][t]
                before.append(abs(opd[b][t]))
                after.append(abs(term))
                passed.append(1.0 if Fraction(abs(opd[b][t])) >= tau else 0.0)
            missing.append(0.0 if known[b][t] else 1.0)
            grpo_sizes.append(abs(parent))
            term_sizes.append(abs(term))
            out[b][t] = parent + term
    parent_size = math.fsum(grpo_sizes)
    metrics = {
        "distill/opd_abs_mean": mean(before),
        "distill/opd_abs_max": max(before, default=0.0),
        "distill/opd_abs_mean_final": mean(after),
        "distill/opd_abs_max_final": max(after, default=0.0),
        "distill/kept_share": mean(passed),
        "distill/opd_to_grpo": math.fsum(term_sizes) / parent_size if parent_size else 0.0,
        "distill/missing_share": mean(missing),
    }
    return Fusion(out, metrics)


@dataclass
class ScheduleStep:
    scale: float
    coefficient: float

    @property
    def multiplier(self) -> float:
        return self.scale * self.coefficient


def frozen_step(kls: Sequence[float], warmup_steps: int, kl_drop_threshold: float | None) -> int:
    """s_w: the step at which the scale stops growing, given the KL measured after steps 1, 2, ..."""
    if warmup_steps == 0:
        return 0
    if kl_drop_threshold and kls and math.isfinite(kls[0]) and kls[0] > 0:
        for n, kl in enumerate(kls, start=1):
            if n >= warmup_steps:
                break
            if math.isfinite(kl) and (kls[0] - kl) / kls[0] >= kl_drop_threshold:
                return n + 1
    return warmup_steps


def schedule(
    kls: Sequence[float],
    *,
    max_steps: int,
    warmup_steps: int,
    kl_drop_threshold: float | None,
    anneal: bool,
    anneal_min: float,
    steps: int | None = None,
) -> list[ScheduleStep]:
    """Scale and coefficient of steps 1 .. `steps` (default max_steps), once all of `kls` is known."""
    s_w = frozen_step(kls, warmup_steps, kl_drop_threshold)
    out = []
    for s in range(1, (max_steps if steps is None else steps) + 1):
        if warmup_steps == 0:
            scale = 1.0
        else:
            scale = min(min(s, s_w) / warmup_steps, 1.0)
        coefficient = 1.0
        if anneal and s >= s_w:
            elapsed = s - max(s_w, 1)
            rest = max(1, max_steps - s_w)
            coefficient = anneal_min + (1.0 - anneal_min) * max(0.0, 1.0 - elapsed / rest)
        out.append(ScheduleStep(scale, coefficient))
    return out


def group_advantages(rewards: Sequence[float], eps: float = 1e-6) -> list[float]:
    """(r - mean) / (std + eps) within one group, std unbiased."""
    center = math.fsum(rewards) / len(rewards)
    variance = math.fsum((r - center) ** 2 for r in rewards) / (len(rewards) - 1)
    return [(r - center) / (math.sqrt(variance) + eps) for r in rewards]
