"""Fewer points for a page, without losing what the eye looks for."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]
Values = NDArray[np.float64]


def keep_extremes(values: Values, limit: int) -> Indices:
    """Indices of at most `limit` of the values: both ends, and the smallest and largest of each of equal buckets.

    Args:
        values: (n,), finite.
        limit: at least 4.

    Returns:
        Ascending, without repeats; all of them if n <= `limit`.
    """
    if limit < 4:
        raise ValueError(f"`limit` must be at least 4, got {limit}.")
    if len(values) <= limit:
        return np.arange(len(values))
    edges = np.linspace(0, len(values), (limit - 2) // 2 + 1).astype(np.int64)
    kept = [0, len(values) - 1]
    for begin, end in zip(edges[:-1], edges[1:], strict=True):
        bucket = values[begin:end]
        kept += [begin + int(bucket.argmin()), begin + int(bucket.argmax())]
    return np.unique(np.asarray(kept, dtype=np.int64))


def spread(count: int, limit: int) -> Indices:
    """At most `limit` of the indices 0 ... `count` - 1, evenly, with both ends."""
    return np.unique(np.linspace(0, count - 1, min(count, limit)).round().astype(np.int64))


def trailing_means(values: Values, width: int, at: Indices) -> Values:
    """The mean of the last `width` values (fewer at the start) at each index of `at`."""
    # Sums over each window, not differences of one long sum: a single huge value would spoil all that follow it.
    return np.asarray([values[max(0, index + 1 - width) : index + 1].mean() for index in at], dtype=np.float64)
