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


def _wide(x: torch.Tensor) -> torch.Tensor:
    # float64 sums make the result independent of how the tokens were dealt to micro-batches; MPS has no float64
    return x.float() if x.device.type == "mps" else x.double()


def mean(x: torch.Tensor, mask: torch.Tensor) -> Statistic:
    """Mean of `x` over the cells where `mask` is true; both (B, T). `x` may hold anything elsewhere."""
    return ratio(torch.where(mask, x.detach(), 0), mask)


def ratio(numerator: torch.Tensor, denominator: torch.Tensor) -> Statistic:
    """Sum of `numerator` over sum of `denominator`; any shapes."""
    return Statistic("mean", _wide(numerator.detach()).sum(), _wide(denominator.detach()).sum())


def minimum(x: torch.Tensor, mask: torch.Tensor) -> Statistic:
    """Smallest `x` over the cells where `mask` is true; both (B, T)."""
    return _extremum("min", x, mask)


def maximum(x: torch.Tensor, mask: torch.Tensor) -> Statistic:
    """Largest `x` over the cells where `mask` is true; both (B, T)."""
    return _extremum("max", x, mask)


def _extremum(kind: Literal["min", "max"], x: torch.Tensor, mask: torch.Tensor) -> Statistic:
    filled = _wide(torch.where(mask, x.detach(), _EMPTY[kind]))
    if filled.numel() == 0:
        value = filled.new_tensor(_EMPTY[kind])
    else:
        value = filled.amin() if kind == "min" else filled.amax()
    return Statistic(kind, value, _wide(mask).sum())


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
