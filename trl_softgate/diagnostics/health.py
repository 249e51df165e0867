"""Whether a run is healthy, by what it records step by step: a plain state machine, no torch and no trainer.

The limits are set from runs of the embedded task, healthy ones and ones driven to collapse: docs/diagnostics.md.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ..validation import require_number, require_whole

State = Literal["healthy", "warning", "collapsed"]


@dataclass(frozen=True)
class HealthLimits:
    """When a signal is bad. None switches one off.

    Args:
        reward_drop: share by which the smoothed reward may fall below its running peak, in (0, 1). The one signal
            that says "collapsed"; without effect while the peak is not positive.
        entropy_floor: nats per token, >= 0.
        entropy_rise: entropy over that of the first observations, > 1.
        kl: to the reference model or the teacher, nats per token, > 0.
        ratio: largest importance ratio, > 1.
        clipped_share: share of clipped tokens, in (0, 1].
        gate_weight: mean weight of SAPO's gate for either sign, in [0, 1).
        grad_norm: times its running median, > 1.
        truncated_share: share of completions that reach the length limit, in (0, 1], if it began below half of that.
        window: observations over which the reward is smoothed and from which the first entropy is taken, >= 1.
        warn_after: bad observations in a row until a warning, >= 1.
        collapse_after: bad observations of the reward in a row until "collapsed", >= `warn_after`.
        recover_after: good observations in a row, of every signal, until "healthy", >= 1.

    Raises:
        ValueError: a limit is out of its range.
    """

    reward_drop: float | None = 0.2
    entropy_floor: float | None = 0.005
    entropy_rise: float | None = 3.0
    kl: float | None = 1.0
    ratio: float | None = 1000.0
    clipped_share: float | None = 0.95
    gate_weight: float | None = 0.5
    grad_norm: float | None = 20.0
    truncated_share: float | None = 0.5
    window: int = 10
    warn_after: int = 5
    collapse_after: int = 10
    recover_after: int = 10

    def __post_init__(self) -> None:
        ranges: dict[str, dict[str, float]] = {
            "reward_drop": dict(above=0, below=1),
            "entropy_floor": dict(minimum=0),
            "entropy_rise": dict(above=1),
            "kl": dict(above=0),
            "ratio": dict(above=1),
            "clipped_share": dict(above=0, maximum=1),
            "gate_weight": dict(minimum=0, below=1),
            "grad_norm": dict(above=1),
            "truncated_share": dict(above=0, maximum=1),
        }
        for name, allowed in ranges.items():
            if getattr(self, name) is not None:
                require_number(name, getattr(self, name), **allowed)
        for name in ("window", "warn_after", "recover_after"):
            require_whole(name, getattr(self, name), minimum=1)
        require_whole("collapse_after", self.collapse_after, minimum=self.warn_after)

    def describe(self) -> str:
        """One line with every limit."""
        return ", ".join(f"{name} {value if value is not None else 'off'}" for name, value in asdict(self).items())


@dataclass(frozen=True)
class Transition:
    """A change of state, with the observation that caused it in one sentence."""

    step: int
    state: State
    evidence: str


class HealthMonitor:
    """Told of each optimizer step, says when the state of the run changes."""

    def __init__(self, limits: HealthLimits) -> None:
        self.limits = limits
        self.state: State = "healthy"
        # bad observations in a row by signal, and good steps in a row
        self._bad: dict[str, int] = {}
        self._good = 0
        self._reward: float | None = None
        self._rewards = 0
        self._peak: tuple[float, int] | None = None
        self._entropies: list[float] = []
        self._norms: list[float] = []
        self._first_truncated: float | None = None

    def observe(self, step: int, scalars: Mapping[str, float]) -> Transition | None:
        """Take in the scalars of one optimizer step, by TRL's names; a missing one says nothing.

        Returns:
            The change of state, or None.
        """
        unfinite = [name for name, value in scalars.items() if not math.isfinite(value)]
        if unfinite:
            return self._change(step, "collapsed", f"{unfinite[0]} is {scalars[unfinite[0]]} at step {step}")
        found: dict[str, str] = {}
        for signal, check in self._checks().items():
            if getattr(self.limits, signal) is None:
                continue
            verdict = check(step, scalars)
            if verdict is None:
                continue  # not observed in this step
            self._bad[signal] = self._bad.get(signal, 0) + 1 if verdict else 0
            if verdict:
                found[signal] = f"{verdict}, {self._bad[signal]} times in a row at step {step}"
        for signal, sentence in found.items():
            if signal == "reward_drop" and self._bad[signal] >= self.limits.collapse_after:
                return self._change(step, "collapsed", sentence)
        # a reward is observed once per rollout: between two of them the last verdict stands
        self._good = 0 if any(self._bad.values()) else self._good + 1
        if self.state == "healthy":
            for signal, sentence in found.items():
                if self._bad[signal] >= self.limits.warn_after:
                    return self._change(step, "warning", sentence)
        elif self._good >= self.limits.recover_after:
            return self._change(step, "healthy", f"every signal was good {self._good} times in a row at step {step}")
        return None

    @property
    def sound(self) -> bool:
        """Whether the run is healthy and no signal was bad when it was last observed."""
        return self.state == "healthy" and not any(self._bad.values())

    def _change(self, step: int, state: State, evidence: str) -> Transition | None:
        if state == self.state:
            return None
        self.state, self._good = state, 0
        return Transition(step, state, evidence)

    def _checks(self) -> dict[str, Callable[[int, Mapping[str, float]], str | None]]:
        """By the name of the limit: None where nothing was observed, "" where it is kept, else what was seen."""
        limits = self.limits

        def above(*names: str, limit: float | None) -> Callable[[int, Mapping[str, float]], str | None]:
            return lambda step, scalars: _compare(scalars, names, limit, 1)

        return {
            "reward_drop": self._check_reward,
            "entropy_floor": lambda step, scalars: _compare(scalars, ("entropy",), limits.entropy_floor, -1),
            "entropy_rise": self._check_entropy,
            "kl": above("kl", "distill/kl", limit=limits.kl),
            "ratio": above("ratio/max", limit=limits.ratio),
            "clipped_share": above("clip_ratio/region_mean", limit=limits.clipped_share),
            "gate_weight": lambda step, scalars: _compare(
                scalars, ("gate/weight_pos", "gate/weight_neg"), limits.gate_weight, -1
            ),
            "grad_norm": self._check_norm,
            "truncated_share": self._check_length,
        }

    def _check_reward(self, step: int, scalars: Mapping[str, float]) -> str | None:
        if "reward" not in scalars:
            return None
        window, value = self.limits.window, scalars["reward"]
        self._rewards += 1
        # the plain mean until the window is full
        share = 1 / min(self._rewards, window)
        self._reward = value if self._reward is None else (1 - share) * self._reward + share * value
        if self._rewards < window:
            return ""
        if self._peak is None or self._reward > self._peak[0]:
            self._peak = (self._reward, step)
        peak, at = self._peak
        assert self.limits.reward_drop is not None
        kept = 1 - self.limits.reward_drop
        if peak <= 0 or self._reward >= kept * peak:
            return ""
        return f"reward {self._reward:.3g} is below {kept:.0%} of its peak of {peak:.3g} at step {at}"

    def _check_entropy(self, step: int, scalars: Mapping[str, float]) -> str | None:
        if "entropy" not in scalars:
            return None
        if len(self._entropies) < self.limits.window:
            self._entropies.append(scalars["entropy"])
            return ""
        first = sum(self._entropies) / len(self._entropies)
        assert self.limits.entropy_rise is not None
        return _compare(scalars, ("entropy",), self.limits.entropy_rise * first, 1)

    def _check_norm(self, step: int, scalars: Mapping[str, float]) -> str | None:
        if "grad_norm" not in scalars:
            return None
        known = sorted(self._norms)
        self._norms = [*self._norms, scalars["grad_norm"]][-101:]
        if len(known) < self.limits.window or known[len(known) // 2] == 0:
            return ""
        assert self.limits.grad_norm is not None
        return _compare(scalars, ("grad_norm",), self.limits.grad_norm * known[len(known) // 2], 1)

    def _check_length(self, step: int, scalars: Mapping[str, float]) -> str | None:
        value = scalars.get("completions/clipped_ratio")
        if value is None:
            return None
        if self._first_truncated is None:
            self._first_truncated = value
        limit = self.limits.truncated_share
        assert limit is not None
        if self._first_truncated >= limit / 2:
            return ""  # a limit that is short by choice
        return _compare(scalars, ("completions/clipped_ratio",), limit, 1)

    def state_dict(self) -> dict[str, Any]:
        """Everything that `observe` depends on beside the limits, JSON types."""
        return {name: value for name, value in vars(self).items() if name != "limits"}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        for name, value in state.items():
            setattr(self, name, value)
        if self._peak is not None:
            self._peak = (self._peak[0], self._peak[1])


def _compare(scalars: Mapping[str, float], names: tuple[str, ...], limit: float | None, sign: int) -> str | None:
    """What lies beyond the limit: above it for sign 1, below it for sign -1."""
    assert limit is not None
    seen = [(scalars[name], name) for name in names if name in scalars]
    if not seen:
        return None
    value, name = max(seen) if sign > 0 else min(seen)
    if sign * value <= sign * limit:
        return ""
    return f"{name} {value:.3g} is {'above' if sign > 0 else 'below'} {limit:.3g}"
