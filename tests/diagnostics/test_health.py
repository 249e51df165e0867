"""The states of a run: what turns them, with which delay, and what does not."""

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_softgate.diagnostics.health import HealthLimits, HealthMonitor, Transition

QUICK: dict[str, Any] = dict(reward_drop=0.1, window=2, warn_after=2, collapse_after=4, recover_after=3)


def observe(limits: HealthLimits, rows: list[dict[str, float]]) -> list[Transition]:
    monitor = HealthMonitor(limits)
    return [t for step, row in enumerate(rows, 1) if (t := monitor.observe(step, row)) is not None]


def test_a_reward_that_falls_and_stays_there() -> None:
    rows = [{"reward": 1.0}] * 5 + [{"reward": 0.0}] * 10
    warning, collapsed = observe(HealthLimits(**QUICK), rows)
    # smoothed over 2: 0.5 at step 6
    assert (warning.step, warning.state) == (7, "warning")
    assert (collapsed.step, collapsed.state) == (9, "collapsed")
    assert collapsed.evidence.startswith("reward 0.0625 is below 90% of its peak of 1 at step 2, 4 times in a row")


def test_a_reward_that_falls_and_comes_back() -> None:
    rows = [{"reward": 1.0}] * 5 + [{"reward": 0.0}] + [{"reward": 1.0}] * 12
    states = [(t.step, t.state) for t in observe(HealthLimits(**QUICK), rows)]
    assert states == [(7, "warning"), (11, "healthy")]  # 0.9375 at step 9, and two more good ones


def test_between_two_rollouts_the_last_verdict_stands() -> None:
    rows = [{"reward": 1.0}] * 3 + [{"reward": 0.0}, {"entropy": 1.0}, {"entropy": 1.0}] * 5
    states = [(t.step, t.state) for t in observe(HealthLimits(**QUICK), rows)]
    assert states == [(7, "warning"), (13, "collapsed")]


@pytest.mark.parametrize(
    ("option", "name", "good", "bad"),
    [
        ("entropy_floor", "entropy", 0.4, 0.001),
        ("entropy_rise", "entropy", 0.4, 1.5),
        ("kl", "kl", 0.1, 2.0),
        ("kl", "distill/kl", 0.1, 2.0),
        ("ratio", "ratio/max", 3.0, 1e6),
        ("clipped_share", "clip_ratio/region_mean", 0.2, 0.97),
        ("gate_weight", "gate/weight_neg", 0.9, 0.1),
        ("gate_weight", "gate/weight_pos", 0.9, 0.1),
        ("grad_norm", "grad_norm", 0.2, 9.0),
        ("truncated_share", "completions/clipped_ratio", 0.1, 0.8),
    ],
)
def test_each_signal_warns_and_recovers(option: str, name: str, good: float, bad: float) -> None:
    rows = [{name: good}] * 12 + [{name: bad}] * 2 + [{name: good}] * 8
    warning, healthy = observe(HealthLimits(**QUICK), rows)
    assert (warning.step, warning.state) == (14, "warning")
    assert name in warning.evidence and "2 times in a row at step 14" in warning.evidence
    assert (healthy.step, healthy.state) == (17, "healthy")
    off: dict[str, Any] = {**QUICK, option: None}
    assert not observe(HealthLimits(**off), rows)
    assert not observe(HealthLimits(**QUICK), [{name: good}] * 20 + [{name: bad}] + [{name: good}] * 3)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_no_number_is_a_collapse_at_once(value: float) -> None:
    (collapsed,) = observe(HealthLimits(), [{"entropy": 1.0}, {"entropy": 1.0, "grad_norm": value}])
    assert (collapsed.step, collapsed.state) == (2, "collapsed")
    assert "grad_norm is" in collapsed.evidence


def test_a_length_limit_that_is_short_by_choice() -> None:
    assert not observe(HealthLimits(**QUICK), [{"completions/clipped_ratio": 1.0}] * 20)


def test_a_reward_that_is_never_positive_has_no_peak() -> None:
    assert not observe(HealthLimits(**QUICK), [{"reward": -1.0 - i} for i in range(20)])


@given(
    st.lists(
        st.dictionaries(
            st.sampled_from(["reward", "entropy", "grad_norm", "ratio/max", "kl"]),
            st.floats(-10, 2000) | st.just(math.nan),
        ),
        max_size=60,
    ),
    st.integers(0, 60),
)
def test_a_stop_between_any_two_steps_changes_nothing(rows: list[dict[str, float]], stop: int) -> None:
    limits = HealthLimits(**QUICK)
    whole = observe(limits, rows)
    monitor, seen = HealthMonitor(limits), []
    for step, row in enumerate(rows, 1):
        if step == stop:
            state = json.loads(json.dumps(monitor.state_dict()))
            monitor = HealthMonitor(limits)
            monitor.load_state_dict(state)
        if (transition := monitor.observe(step, row)) is not None:
            seen.append(transition)
    assert seen == whole
    states = ["healthy", *(t.state for t in whole)]
    assert all(a != b for a, b in zip(states, states[1:], strict=False))


@pytest.mark.parametrize(
    "option",
    [
        dict(reward_drop=1.5),
        dict(gate_weight=1.0),
        dict(ratio=0.5),
        dict(window=0),
        dict(warn_after=5, collapse_after=4),
        dict(kl=-1.0),
    ],
)
def test_limits_out_of_range_are_refused(option: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"`{list(option)[-1]}` must be"):
        HealthLimits(**option)


def test_the_limits_in_one_line() -> None:
    text = HealthLimits(kl=None).describe()
    assert "reward_drop 0.2" in text and "kl off" in text and "\n" not in text
