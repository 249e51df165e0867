"""SAPO's temperatures chosen from how far the policy has moved, as a plain state machine."""

import math
from collections.abc import Sequence
from typing import Any

from ..diagnostics.statistics import percentile
from ..validation import require_number
from .gates import ratio_distance

# Of |log-ratio|, 16 to the decade, of which the first is 0 to 1e-6.
SPREAD_EDGES = [0.0, *(10 ** (-6 + i / 16) for i in range(117)), 20.0]
_KEPT = 0.9


class AdaptiveTemperature:
    """Chooses tau so that a share of the tokens keeps at least a given gate weight.

    Let z be the `quantile` of |log pi_theta - log pi_old| over the tokens of the last optimizer steps, each of which
    counts 0.9 times as much as the one after it. A ratio of e^z then weighs `weight`: tau = x / (e^z - 1), where x is
    the kernel's distance at that weight, bounded to [`minimum`, `maximum`]. It is the temperature of positive
    advantages; that of the others keeps its proportion. Before the first token, both are the given ones.

    tau falls where the spread grows: `minimum` is what protects a run that is drifting away.

    Args:
        tau_pos, tau_neg: temperatures to begin with; > 0.
        quantile: share of the tokens, in (0, 1).
        weight: the weight that they keep at least, in (0, 1).
        minimum, maximum: bounds of tau, > 0.
        kernel: that of the gate.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        tau_pos: float,
        tau_neg: float,
        *,
        quantile: float,
        weight: float,
        minimum: float,
        maximum: float,
        kernel: str = "sigmoid",
    ) -> None:
        require_number("quantile", quantile, above=0, below=1)
        require_number("weight", weight, above=0, below=1)
        require_number("minimum", minimum, above=0)
        require_number("maximum", maximum, minimum=minimum)
        self._initial = (tau_pos, tau_neg)
        self._quantile = quantile
        self._distance = ratio_distance(weight, kernel)
        self._bounds = (minimum, maximum)
        self._counts = [0.0] * (len(SPREAD_EDGES) - 1)

    @property
    def spread(self) -> float:
        """z, the quantile of |log-ratio|; NaN before the first token."""
        return percentile(self._counts, SPREAD_EDGES, self._quantile)

    @property
    def temperatures(self) -> tuple[float, float]:
        """(tau_pos, tau_neg) of the next step."""
        tau_pos, tau_neg = self._initial
        spread = self.spread
        if math.isnan(spread):
            return self._initial
        move = math.expm1(spread)
        low, high = self._bounds
        tau = high if move * high <= self._distance else max(self._distance / move, low)
        return tau, tau * (tau_neg / tau_pos)

    def observe(self, counts: Sequence[int]) -> None:
        """Take in the histogram over `SPREAD_EDGES` of one optimizer step, of all processes."""
        self._counts = [_KEPT * old + new for old, new in zip(self._counts, counts, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        """What was observed so far, JSON types only."""
        return {"counts": self._counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        self._counts = list(state["counts"])
