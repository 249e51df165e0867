"""Stages 3 and 4 of SAF-OPD: the KL-triggered warm-up and the linear anneal, as a plain state machine."""

import math
from typing import Any

from ..validation import require_number


class FusionSchedule:
    """How strongly the teacher's term counts at each optimizer step (arXiv 2607.29209, section 3.2).

    Warm-up: scale(s) = min(s / warmup_steps, 1). KL_0 is the student-teacher KL of step 1; after step n, if
    (KL_0 - KL_n) / KL_0 >= `kl_drop_threshold`, warm-up ends and the next step's scale is frozen for good. It ends by
    itself at s = `warmup_steps`. Anneal: from the step s_w where the scale froze, the coefficient falls linearly from
    1 to `anneal_min` at `max_steps`.

    The schedule is a function of the optimizer step and of the reduced KL alone. Steps are 1-based: the running step
    is `state.global_step + 1`.

    Args:
        max_steps: optimizer steps of the run, S; an integer >= 1.
        warmup_steps: S_warmup, an integer >= 0; 0: no warm-up, scale 1.
        kl_drop_threshold: relative drop in [0, 1] that ends warm-up; 0 or None: only `warmup_steps` ends it.
        anneal: whether the coefficient is annealed.
        anneal_min: the coefficient's floor, in [0, 1].

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        max_steps: int,
        warmup_steps: int = 100,
        kl_drop_threshold: float | None = 0.2,
        anneal: bool = True,
        anneal_min: float = 0.0,
    ) -> None:
        _require_step("max_steps", max_steps, minimum=1)
        _require_step("warmup_steps", warmup_steps, minimum=0)
        if kl_drop_threshold is not None:
            require_number("kl_drop_threshold", kl_drop_threshold, minimum=0, maximum=1)
        require_number("anneal_min", anneal_min, minimum=0, maximum=1)
        self.max_steps = max_steps
        self.warmup_steps = warmup_steps
        self.kl_drop_threshold = kl_drop_threshold or 0.0
        self.anneal = anneal
        self.anneal_min = anneal_min
        self._initial_kl: float | None = None
        self._frozen_at: int | None = None  # the step whose scale was frozen by the KL trigger
        self._last_observed = 0

    @property
    def _warmup_end(self) -> int:
        return self.warmup_steps if self._frozen_at is None else self._frozen_at

    def scale(self, step: int) -> float:
        """Warm-up factor in (0, 1] at optimizer step `step` (1-based)."""
        _require_step("step", step, minimum=1)
        if self.warmup_steps == 0:
            return 1.0
        return min(step, self._warmup_end) / self.warmup_steps

    def coefficient(self, step: int) -> float:
        """Anneal factor in [`anneal_min`, 1] at optimizer step `step` (1-based)."""
        _require_step("step", step, minimum=1)
        if not self.anneal:
            return 1.0
        elapsed = max(step - max(self._warmup_end, 1), 0)
        remaining = max(1 - elapsed / max(1, self.max_steps - self._warmup_end), 0.0)
        return self.anneal_min + (1 - self.anneal_min) * remaining

    def multiplier(self, step: int) -> float:
        """scale * coefficient at optimizer step `step` (1-based), the factor on the teacher's term.

        Once it is 0 it stays 0: the scale is never 0, and the coefficient never rises.
        """
        return self.scale(step) * self.coefficient(step)

    def observe(self, step: int, kl: float) -> None:
        """Take in the student-teacher KL measured during `step`; it can act from `step + 1` on.

        Args:
            step: 1-based, larger than that of any call before.
            kl: token-weighted mean over all valid tokens of the step, on all processes. Not finite: no trigger.

        Raises:
            ValueError: `step` was observed before.
        """
        _require_step("step", step, minimum=1)
        if step <= self._last_observed:
            raise ValueError(f"`step` must grow: {step} comes after {self._last_observed}, which was observed before.")
        self._last_observed = step
        if step == 1 and math.isfinite(kl):
            self._initial_kl = kl
        drop = self.kl_relative_drop(kl)
        if drop is None or self.kl_drop_threshold == 0 or self._frozen_at is not None or step >= self.warmup_steps:
            return
        if drop >= self.kl_drop_threshold:
            self._frozen_at = step + 1

    def kl_relative_drop(self, kl: float) -> float | None:
        """(KL_0 - kl) / KL_0, or None while KL_0 is unknown or not positive, or where `kl` is not finite."""
        if self._initial_kl is None or self._initial_kl <= 0 or not math.isfinite(kl):
            return None
        return (self._initial_kl - kl) / self._initial_kl

    def settings(self) -> dict[str, Any]:
        """The constructor's arguments, JSON types only."""
        return {
            "max_steps": self.max_steps,
            "warmup_steps": self.warmup_steps,
            "kl_drop_threshold": self.kl_drop_threshold,
            "anneal": self.anneal,
            "anneal_min": self.anneal_min,
        }

    def state_dict(self) -> dict[str, Any]:
        """What was observed so far, JSON types only."""
        return {
            "initial_kl": self._initial_kl,
            "frozen_at": self._frozen_at,
            "last_observed": self._last_observed,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave.

        Raises:
            ValueError: keys are missing or unknown.
        """
        if set(state) != set(self.state_dict()):
            raise ValueError(f"`state` must have the keys {sorted(self.state_dict())}, got {sorted(state)}.")
        self._initial_kl = state["initial_kl"]
        self._frozen_at = state["frozen_at"]
        self._last_observed = state["last_observed"]


def _require_step(name: str, value: int, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ValueError(f"`{name}` must be an integer of at least {minimum}, got {value!r}.")
