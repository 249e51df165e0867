"""The schedule of the distillation term: published traces, purity, state, and random KL sequences."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_softgate.fusion import FusionSchedule

DATA = Path(__file__).parents[1] / "data"
CASES: list[dict[str, Any]] = json.loads((DATA / "saf_schedule_traces.json").read_text())["cases"]
OPTIONS = ("max_steps", "warmup_steps", "kl_drop_threshold", "anneal", "anneal_min")
traces = pytest.mark.parametrize("case", CASES, ids=lambda c: c["name"])


def options_of(case: dict[str, Any]) -> dict[str, Any]:
    return {name: case[name] for name in OPTIONS}


@traces
def test_published_traces(case: dict[str, Any]) -> None:
    schedule = FusionSchedule(**options_of(case))
    for step, (kl, expected) in enumerate(
        zip(case["kl_measured_after_step"], case["multiplier_at_step"], strict=True), start=1
    ):
        assert schedule.multiplier(step) == pytest.approx(expected, abs=5.1e-7)
        assert schedule.multiplier(step) == schedule.scale(step) * schedule.coefficient(step)
        schedule.observe(step, kl)


@traces
def test_reference_reproduces_the_published_traces(case: dict[str, Any]) -> None:
    steps = reference.schedule(case["kl_measured_after_step"], **options_of(case))
    assert [s.multiplier for s in steps] == pytest.approx(case["multiplier_at_step"], abs=5.1e-7)


@traces
def test_the_past_stays_as_it_was(case: dict[str, Any]) -> None:
    schedule = FusionSchedule(**options_of(case))
    for step, kl in enumerate(case["kl_measured_after_step"], start=1):
        schedule.observe(step, kl)
    assert [schedule.multiplier(s) for s in range(1, 13)] == pytest.approx(case["multiplier_at_step"], abs=5.1e-7)


@traces
@pytest.mark.parametrize("seed", range(3))
def test_queries_change_nothing(case: dict[str, Any], seed: int) -> None:
    rng = random.Random(seed)
    quiet, asked = FusionSchedule(**options_of(case)), FusionSchedule(**options_of(case))
    for step, kl in enumerate(case["kl_measured_after_step"], start=1):
        for other in rng.sample(range(1, 30), 12):
            asked.multiplier(other)
            asked.scale(other)
            asked.coefficient(other)
        assert asked.multiplier(step) == quiet.multiplier(step) == asked.multiplier(step)
        quiet.observe(step, kl)
        asked.kl_relative_drop(kl)
        asked.observe(step, kl)
        assert asked.state_dict() == quiet.state_dict()


@traces
def test_state_survives_json_at_every_step(case: dict[str, Any]) -> None:
    kls = case["kl_measured_after_step"]
    whole = FusionSchedule(**options_of(case))
    for stop in range(len(kls) + 1):
        part = FusionSchedule(**options_of(case))
        for step in range(1, stop + 1):
            part.observe(step, kls[step - 1])
        text = json.dumps(part.state_dict(), allow_nan=False)
        resumed = FusionSchedule(**options_of(case))
        resumed.load_state_dict(json.loads(text))
        assert json.dumps(resumed.state_dict(), allow_nan=False) == text
        for step in range(stop + 1, len(kls) + 1):
            assert resumed.multiplier(step) == part.multiplier(step)
            resumed.observe(step, kls[step - 1])
            part.observe(step, kls[step - 1])
        if stop == 0:
            whole = part
        assert [resumed.multiplier(s) for s in range(1, 15)] == [whole.multiplier(s) for s in range(1, 15)]
        assert resumed.state_dict() == whole.state_dict()


@pytest.mark.parametrize("first", [0.0, -0.1, math.nan, math.inf, -math.inf])
def test_a_first_kl_without_meaning_never_triggers(first: float) -> None:
    schedule = FusionSchedule(20, warmup_steps=10, kl_drop_threshold=0.2)
    schedule.observe(1, first)
    for step, kl in zip(range(2, 11), [0.5, 0.1, 1e-9, 0.0, -1.0, -100.0, 3.0, math.nan, 0.1], strict=True):
        assert schedule.scale(step) == pytest.approx(step / 10)
        schedule.observe(step, kl)
    assert schedule.scale(10) == 1.0
    assert json.loads(json.dumps(schedule.state_dict(), allow_nan=False)) == schedule.state_dict()


@pytest.mark.parametrize("later", [math.nan, math.inf, -math.inf])
def test_a_later_kl_that_is_not_finite_does_not_trigger(later: float) -> None:
    schedule = FusionSchedule(20, warmup_steps=10, kl_drop_threshold=0.2)
    schedule.observe(1, 1.0)
    schedule.observe(2, later)
    assert schedule.scale(4) == pytest.approx(0.4)
    assert json.loads(json.dumps(schedule.state_dict(), allow_nan=False)) == schedule.state_dict()
    assert schedule.kl_relative_drop(later) is None
    # The reference is still the first KL.
    schedule.observe(3, 0.75)
    assert schedule.scale(4) == pytest.approx(0.4)
    assert schedule.scale(9) == pytest.approx(0.4)


def test_the_drop_counts_from_the_threshold_on() -> None:
    below, at = (FusionSchedule(20, warmup_steps=10, kl_drop_threshold=0.25) for _ in range(2))
    for schedule, kl in ((below, 0.7500001), (at, 0.75)):
        schedule.observe(1, 1.0)
        schedule.observe(2, kl)
    assert below.scale(8) == pytest.approx(0.8)
    assert at.scale(8) == pytest.approx(0.3)


def test_only_the_first_trigger_counts() -> None:
    schedule = FusionSchedule(20, warmup_steps=10, kl_drop_threshold=0.2)
    for step, kl in enumerate([1.0, 0.5, 1.0, 0.2, 0.1], start=1):
        schedule.observe(step, kl)
    assert [schedule.scale(s) for s in (1, 2, 3, 4, 9, 15)] == pytest.approx([0.1, 0.2, 0.3, 0.3, 0.3, 0.3])
    assert schedule.coefficient(2) == schedule.coefficient(3) == 1.0
    assert schedule.coefficient(4) == pytest.approx(1 - 1 / 17)


def test_relative_drop() -> None:
    schedule = FusionSchedule(20, warmup_steps=10, kl_drop_threshold=0.2)
    assert schedule.kl_relative_drop(0.5) is None
    schedule.observe(1, 0.8)
    assert schedule.kl_relative_drop(0.6) == pytest.approx(0.25)
    assert schedule.kl_relative_drop(1.0) == pytest.approx(-0.25)


@pytest.mark.parametrize("threshold", [0, 0.0, None])
def test_trigger_off(threshold: float | None) -> None:
    schedule = FusionSchedule(20, warmup_steps=10, kl_drop_threshold=threshold)
    for step in range(1, 10):
        schedule.observe(step, 1.0 / step)
    assert [schedule.scale(s) for s in range(1, 12)] == pytest.approx([*[s / 10 for s in range(1, 11)], 1.0])


def test_paper_defaults() -> None:
    schedule = FusionSchedule(300)
    assert schedule.scale(50) == 0.5
    assert schedule.scale(100) == schedule.multiplier(100) == 1.0
    assert schedule.coefficient(99) == 1.0
    assert schedule.multiplier(200) == pytest.approx(0.5)
    assert schedule.multiplier(300) == 0.0
    schedule.observe(1, 1.0)
    schedule.observe(2, 0.79)
    assert schedule.scale(250) == pytest.approx(0.03)
    assert schedule.coefficient(3) == 1.0
    assert schedule.multiplier(300) == 0.0


@pytest.mark.parametrize("anneal_min", [0.0, 0.3, 1.0])
def test_beyond_the_last_step_the_floor_holds(anneal_min: float) -> None:
    schedule = FusionSchedule(10, warmup_steps=2, kl_drop_threshold=0.2, anneal=True, anneal_min=anneal_min)
    assert [schedule.multiplier(s) for s in (10, 11, 500)] == pytest.approx([anneal_min] * 3)


kl_values = st.one_of(
    st.floats(0.0, 2.0),
    st.floats(0.5, 1.0),
    st.sampled_from([0.0, -0.3, math.nan, math.inf, -math.inf, 1.0, 0.75, 0.5]),
)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_random_kl_sequences_match_the_reference(data: st.DataObject) -> None:
    max_steps = data.draw(st.integers(1, 25))
    options: dict[str, Any] = {
        "max_steps": max_steps,
        "warmup_steps": data.draw(st.integers(0, 30)),
        "kl_drop_threshold": data.draw(st.sampled_from([None, 0.0, 0.1, 0.2, 0.25, 0.5])),
        "anneal": data.draw(st.booleans()),
        "anneal_min": data.draw(st.sampled_from([0.0, 0.1, 0.5, 1.0])),
    }
    kls = data.draw(st.lists(kl_values, min_size=max_steps, max_size=max_steps))
    stop = data.draw(st.integers(0, max_steps))
    schedule = FusionSchedule(**options)
    for step in range(1, max_steps + 1):
        # What is known while step `step` runs: the KL of the steps before it.
        known = reference.schedule(kls[: step - 1], steps=max_steps + 3, **options)
        for s in (step, *data.draw(st.lists(st.integers(1, max_steps + 3), max_size=3))):
            assert schedule.scale(s) == pytest.approx(known[s - 1].scale, rel=1e-12)
            assert schedule.coefficient(s) == pytest.approx(known[s - 1].coefficient, rel=1e-12, abs=1e-15)
            assert schedule.multiplier(s) == pytest.approx(known[s - 1].multiplier, rel=1e-12, abs=1e-15)
        schedule.observe(step, kls[step - 1])
        if step == stop:
            text = json.dumps(schedule.state_dict(), allow_nan=False)
            schedule = FusionSchedule(**options)
            schedule.load_state_dict(json.loads(text))


def test_observations_out_of_order_are_refused() -> None:
    schedule = FusionSchedule(10, warmup_steps=5)
    schedule.observe(1, 1.0)
    schedule.observe(2, 0.9)
    state = schedule.state_dict()
    for step in (2, 1, 0, -1):
        with pytest.raises((ValueError, RuntimeError), match="step"):
            schedule.observe(step, 0.5)
    assert schedule.state_dict() == state


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("max_steps", [0, -1]),
        ("warmup_steps", [-1]),
        ("kl_drop_threshold", [-0.1, math.nan]),
        ("anneal_min", [-0.1, 1.1, math.nan]),
    ],
)
def test_bad_arguments_are_named(name: str, values: list[float]) -> None:
    for value in values:
        with pytest.raises(ValueError, match=name):
            options: dict[str, Any] = {"max_steps": 10, "warmup_steps": 5, name: value}
            FusionSchedule(**options)


@pytest.mark.parametrize("step", [0, -3])
def test_steps_count_from_one(step: int) -> None:
    schedule = FusionSchedule(10, warmup_steps=5)
    with pytest.raises(ValueError, match="step"):
        schedule.multiplier(step)


def test_state_of_another_kind_is_refused() -> None:
    schedule = FusionSchedule(10, warmup_steps=5)
    schedule.observe(1, 1.0)
    state = schedule.state_dict()
    for wrong in ({}, state | {"surprise": 1}, {k: state[k] for k in list(state)[1:]}):
        with pytest.raises(ValueError):
            FusionSchedule(10, warmup_steps=5).load_state_dict(wrong)


def test_without_the_kl_of_step_1_nothing_triggers() -> None:
    schedule = FusionSchedule(20, warmup_steps=10, kl_drop_threshold=0.2)
    schedule.observe(2, 1.0)
    schedule.observe(3, 0.1)
    assert schedule.scale(9) == pytest.approx(0.9)
