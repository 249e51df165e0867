"""Statistics over valid tokens that merge exactly over micro-batches and processes.

A mean of means is wrong as soon as two micro-batches hold different numbers of tokens. So a statistic is carried as
a numerator and a denominator (or an extremum and a count) until the moment it is read. Pure torch: no host
synchronization happens here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

_EMPTY = {"mean": 0.0, "min": float("inf"), "max": float("-inf")}


@dataclass(frozen=True)
class Statistic:
    """One number over a set of tokens, in mergeable form.

    Attributes:
        kind: how two parts merge: `"mean"` adds numerators and denominators, `"min"`/`"max"` take the extremum.
        value: 0-dim tensor: the numerator of a mean, or the extremum so far (+-inf while nothing was seen).
        count: 0-dim tensor: the denominator of a mean, or the number of cells seen.
    """

    kind: Literal["mean", "min", "max"]
    value: torch.Tensor
    count: torch.Tensor

    def merge(self, other: "Statistic") -> "Statistic":
        """The statistic of both sets of tokens together."""
        count = self.count + other.count
        if self.kind == "mean":
            return Statistic("mean", self.value + other.value, count)
        pick = torch.minimum if self.kind == "min" else torch.maximum
        return Statistic(self.kind, pick(self.value, other.value), count)

    def result(self) -> torch.Tensor:
        """0-dim tensor with the statistic; 0 where nothing was seen."""
        safe = torch.where(self.count > 0, self.count, 1.0)
        value = self.value / safe if self.kind == "mean" else self.value
        return torch.where(self.count > 0, value, 0.0)


@dataclass(frozen=True)
class Tokens:
    """The tokens that statistics are taken over, counted once for all of them.

    What is measured is (B, T), or (B, 1) where all tokens of a row share one value; it may hold anything in the cells
    that do not count. `zeroed` says that it comes from `zero_elsewhere` and is not negative, which saves a pass.

    Attributes:
        mask: (B, T) bool.
        per_row: (B, 1) int32: number of tokens in each row.
        count: 0-dim: number of tokens.
    """

    mask: torch.Tensor
    per_row: torch.Tensor
    count: torch.Tensor

    @classmethod
    def of(cls, mask: torch.Tensor) -> "Tokens":
        """The tokens where the bool `mask`, (B, T), is true."""
        per_row = mask.sum(-1, keepdim=True, dtype=torch.int32)
        return cls(mask, per_row, _total(per_row))

    def zero_elsewhere(self, x: torch.Tensor) -> torch.Tensor:
        """`x`, detached, with 0 where no token is."""
        return self._filled(x, 0)

    def mean(self, x: torch.Tensor, *, zeroed: bool = False) -> Statistic:
        """Mean of `x`; of a bool, the share of tokens."""
        x = x.detach() if zeroed else self.zero_elsewhere(x)
        if x.shape == self.per_row.shape:
            x = x * self.per_row
        return Statistic("mean", _total(x), self.count)

    def minimum(self, x: torch.Tensor) -> Statistic:
        """Smallest `x`."""
        return self._extremum("min", self._filled(x, _EMPTY["min"]))

    def maximum(self, x: torch.Tensor, *, zeroed: bool = False) -> Statistic:
        """Largest `x`."""
        return self._extremum("max", x.detach() if zeroed else self._filled(x, _EMPTY["max"]))

    def _filled(self, x: torch.Tensor, value: float) -> torch.Tensor:
        counts = self.per_row > 0 if x.shape == self.per_row.shape else self.mask
        if x.dtype == torch.bool and value == 0:
            return x & counts
        return torch.where(counts, x.detach(), value)

    def _extremum(self, kind: Literal["min", "max"], x: torch.Tensor) -> Statistic:
        if x.numel() == 0:
            value = x.new_tensor(_EMPTY[kind])
        else:
            value = x.amin() if kind == "min" else x.amax()
        return Statistic(kind, value.to(_wide(value)), self.count)


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.float32 if x.device.type == "mps" else torch.float64  # MPS has no float64


def _total(x: torch.Tensor) -> torch.Tensor:
    # A row is never dealt to two micro-batches, so its sum may be taken in float32, which is several times faster;
    # the sum over rows in float64 makes the result independent of how they were dealt.
    if x.dim() > 0:
        # int32 holds any row, and the CPU copies what it sums in another type: a copy in int64 is 8 times a mask
        exact = torch.float64 if x.dtype == torch.float64 else torch.float32
        x = x.sum(-1, dtype=exact if x.is_floating_point() else torch.int32)
    return x.sum(dtype=_wide(x))


def mean(x: torch.Tensor, mask: torch.Tensor) -> Statistic:
    """Mean of `x` over the cells where `mask` is true; both (B, T). `x` may hold anything elsewhere."""
    return Tokens.of(mask).mean(x)


def ratio(numerator: torch.Tensor, denominator: torch.Tensor) -> Statistic:
    """Sum of `numerator` over sum of `denominator`; any shapes."""
    return Statistic("mean", _total(numerator.detach()), _total(denominator.detach()))


def minimum(x: torch.Tensor, mask: torch.Tensor) -> Statistic:
    """Smallest `x` over the cells where `mask` is true; both (B, T)."""
    return Tokens.of(mask).minimum(x)


def maximum(x: torch.Tensor, mask: torch.Tensor) -> Statistic:
    """Largest `x` over the cells where `mask` is true; both (B, T)."""
    return Tokens.of(mask).maximum(x)


def merge(into: dict[str, Statistic], new: Mapping[str, Statistic]) -> None:
    """Merge the statistics `new` into the collection `into`, name by name."""
    for name, statistic in new.items():
        into[name] = into[name].merge(statistic) if name in into else statistic


def pack(statistics: Mapping[str, Statistic]) -> torch.Tensor:
    """One (1, 2K) tensor of values and counts, so that one collective reduces all K statistics."""
    return torch.stack([part for s in statistics.values() for part in (s.value, s.count)]).unsqueeze(0)


def unpack(packed: torch.Tensor, like: Mapping[str, Statistic]) -> dict[str, Statistic]:
    """Statistics over all processes from the (P, 2K) rows that `pack` made on each, named and typed as `like`."""
    values, counts = packed.view(packed.shape[0], -1, 2).unbind(-1)
    counts = counts.sum(0)
    merged = {"mean": values.sum(0), "min": values.amin(0), "max": values.amax(0)}
    return {name: Statistic(s.kind, merged[s.kind][i], counts[i]) for i, (name, s) in enumerate(like.items())}


def results(statistics: Mapping[str, Statistic]) -> dict[str, torch.Tensor]:
    """The finished numbers, each a detached 0-dim tensor."""
    return {name: statistic.result() for name, statistic in statistics.items()}


def to_floats(statistics: Sequence[Mapping[str, Statistic]]) -> list[dict[str, float]]:
    """Python floats of several collections, with one transfer from the device; statistics of nothing are left out."""
    flat = [(i, name, s) for i, collection in enumerate(statistics) for name, s in collection.items()]
    out: list[dict[str, float]] = [{} for _ in statistics]
    if flat:
        values = torch.stack([torch.stack([s.result(), s.count]) for _, _, s in flat]).tolist()
        for (i, name, _), (value, count) in zip(flat, values, strict=True):
            if count > 0:
                out[i][name] = value
    return out


def histogram(x: torch.Tensor, mask: torch.Tensor, edges: Sequence[float]) -> torch.Tensor:
    """Number of cells with `mask` in each bin, (K,), for K + 1 ascending edges.

    A bin holds its lower edge and not its upper one; the last one holds both, and NaN. What lies outside the edges
    counts in the first or last bin.
    """
    inner = torch.tensor(edges[1:-1], dtype=x.dtype, device=x.device)
    place = torch.bucketize(x.detach().contiguous(), inner, right=True)
    counts = torch.zeros(len(edges) - 1, dtype=torch.long, device=x.device)
    return counts.scatter_add_(0, place.flatten(), mask.flatten().long())


def percentile(counts: Sequence[float], edges: Sequence[float], share: float) -> float:
    """The value below which `share` of the counted cells lie, linear within its bin; NaN where nothing was counted."""
    rest = share * sum(counts)
    if rest == 0:
        return float("nan")
    for count, low, high in zip(counts, edges, edges[1:], strict=False):
        if rest <= count:
            return low + (high - low) * rest / count
        rest -= count
    return edges[-1]
