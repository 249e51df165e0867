"""Statistics of an evaluation: avg@k, pass@k and their bootstrap intervals. Functions of NumPy arrays.

Letters: P problems, N completions of each, c of them right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from typing import TYPE_CHECKING

import numpy as np

from .validation import require_number, require_whole

if TYPE_CHECKING:
    from rich.table import Table

# Resamples of the bootstrap that are drawn at a time, times P: bounds the memory.
_CHUNK = 4_000_000


@dataclass(frozen=True)
class Metric:
    """`value` in [0, 1], the mean over problems; `low` and `high` bound its bootstrap interval."""

    name: str
    value: float
    low: float
    high: float


def pass_at_k(correct: np.ndarray, samples: int, k: int) -> np.ndarray:
    """Unbiased estimate of the probability that at least one of `k` completions is right, for each problem.

    1 - C(N - c, k) / C(N, k): the share of all subsets of `k` of the N completions that hold a right one
    (arXiv 2107.03374, eq. 1), in exact integers.

    Args:
        correct: (P,), c of each problem, whole numbers in [0, N].
        samples: N.
        k: in [1, N].

    Returns:
        (P,) float64.

    Raises:
        ValueError: `k` or a count is out of range.
    """
    require_whole("samples", samples, minimum=1)
    require_whole("k", k, minimum=1)
    if k > samples:
        raise ValueError(f"`k` must be at most the {samples} completions of a problem, got {k}.")
    counts = np.asarray(correct)
    if counts.size and (counts.min() < 0 or counts.max() > samples or (counts != np.floor(counts)).any()):
        raise ValueError(f"`correct` must hold whole numbers from 0 to {samples}.")
    subsets = comb(samples, k)
    # comb(n, k) is 0 for n < k: with fewer than k wrong ones every subset holds a right one
    found, places = np.unique(counts.astype(int), return_inverse=True)
    by_count = np.array([(subsets - comb(samples - int(c), k)) / subsets for c in found], dtype=np.float64)
    return by_count[places]


def bootstrap_interval(
    values: np.ndarray, *, level: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> tuple[float, float]:
    """Percentile interval of the mean over problems, by drawing as many problems with replacement.

    The completions of a problem stay together: what is uncertain is which problems the set holds.

    Args:
        values: (P,), P >= 1.
        level: in (0, 1).
        resamples: >= 1.
        seed: of the draws.

    Returns:
        Lower and upper bound; of one problem alone, or equal values, both are the mean.
    """
    require_number("level", level, above=0, below=1)
    require_whole("resamples", resamples, minimum=1)
    values = np.asarray(values, dtype=np.float64)
    if values.ndim != 1 or values.size == 0:
        raise ValueError(f"`values` must hold one number for each of at least one problem, got shape {values.shape}.")
    generator = np.random.default_rng(seed)
    chunk = max(1, _CHUNK // values.size)
    means = [
        values[generator.integers(values.size, size=(min(chunk, resamples - start), values.size))].mean(axis=1)
        for start in range(0, resamples, chunk)
    ]
    low, high = np.quantile(np.concatenate(means), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def metrics(
    scores: np.ndarray, passes: Sequence[int] = (), *, level: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> list[Metric]:
    """avg@N, the mean score, and pass@k for each of `passes`; a completion is right if its score is at least 1.

    Args:
        scores: (P, N), in [0, 1] for nearly all tasks; P and N >= 1.
        passes: k of each pass@k, in [1, N].
        level, resamples, seed: see `bootstrap_interval`.
    """
    scores = np.asarray(scores, dtype=np.float64)
    if scores.ndim != 2 or scores.size == 0 or not np.isfinite(scores).all():
        raise ValueError(f"`scores` must hold finite numbers of shape (problems, completions), got {scores.shape}.")
    samples = scores.shape[1]
    correct = (scores >= 1).sum(axis=1)
    by_problem = {f"avg@{samples}": scores.mean(axis=1)}
    by_problem |= {f"pass@{k}": pass_at_k(correct, samples, k) for k in passes}
    return [
        Metric(name, float(values.mean()), *bootstrap_interval(values, level=level, resamples=resamples, seed=seed))
        for name, values in by_problem.items()
    ]


def metrics_table(found: Sequence[Metric], title: str, level: float = 0.95) -> Table:
    """A line for each metric, in per cent."""
    from rich.markup import escape
    from rich.table import Table

    table = Table("metric", "%", f"{level:.0%} interval", title=escape(title))
    for metric in found:
        table.add_row(metric.name, f"{100 * metric.value:.1f}", f"{100 * metric.low:.1f} to {100 * metric.high:.1f}")
    return table
