"""What is learned about waits, and what they are worth."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from kvpilot.forecast import prior
from kvpilot.forecast.bins import BINS, EDGES, WIDTHS, bin_of, bins_of
from kvpilot.forecast.curve import Curve, Forecast, curve, worth_in
from kvpilot.forecast.features import Pause, ToolFacts, pause_features
from kvpilot.forecast.hazard import HazardModel
from kvpilot.forecast.waits import Waits

hazards = arrays.arrays(np.float64, BINS, elements=st.floats(0.001, 0.999))


def learned(seconds: list[float], features: tuple[str, ...] = ("any", "tool:x")) -> HazardModel:
    model = HazardModel()
    for wait in seconds:
        last = bin_of(wait)
        model.learn(features, 0, last, ended=True)
    return model


@given(st.floats(0, 1e6))
def test_a_duration_lies_in_its_bin(seconds: float) -> None:
    at = bin_of(seconds)
    assert EDGES[at] <= seconds + 1e-9
    assert at == BINS - 1 or seconds <= EDGES[at + 1] + 1e-9
    assert abs(int(bins_of(np.array([seconds]))[0]) - at) <= 1  # an edge itself may fall to either side


def test_learns_how_long_a_tool_takes() -> None:
    rng = random.Random(1)
    model = learned([rng.lognormvariate(3.0, 0.5) for _ in range(400)])
    found = curve(model.hazards(("any", "tool:x")))
    assert 15.0 < found.quantile(0.0, 0.5) < 27.0
    assert found.within(0.0, 1.0) < 0.1
    assert found.within(0.0, 120.0) > 0.9


def test_a_session_that_is_faster_than_others_is_told_apart() -> None:
    model = HazardModel()
    for _ in range(60):
        model.learn(("any", "tool:x", "session:slow"), 0, bin_of(60.0), ended=True)
        model.learn(("any", "tool:x", "session:fast"), 0, bin_of(0.5), ended=True)
    fast, slow = (
        curve(model.hazards(("any", "tool:x", f"session:{who}"))).quantile(0.0, 0.5)
        for who in ("fast", "slow")
    )
    assert fast < 2.0 < 20.0 < slow


def test_follows_a_change() -> None:
    model = learned([0.5] * 300 + [40.0] * 100)
    assert curve(model.hazards(("any", "tool:x"))).quantile(0.0, 0.5) > 20.0


def test_those_who_never_come_back_are_learned_from() -> None:
    waits = Waits(HazardModel())
    for owner in range(200):
        waits.begin(owner, ("any",), 0.0)
    for owner in range(100):
        waits.end(owner, 1.0)
    waits.tick(4 * 3600.0)
    found = curve(waits.model.hazards(("any",)))
    assert 0.3 < found.within(0.0, 3600.0) < 0.7
    assert found.within(60.0, 3600.0) < 0.2


def test_what_was_learned_survives_a_dump() -> None:
    model, copy = learned([1.0, 30.0, 500.0] * 20), HazardModel()
    copy.load(model.dump())
    both = [m.hazards(("any", "tool:x")) for m in (model, copy)]
    assert np.allclose(*both, atol=1e-3)
    with pytest.raises(ValueError, match="expected"):
        copy.load({"features": ["a"], "weights": [[1.0]], "squares": [[1.0]]})
    assert np.allclose(copy.hazards(("any", "tool:x")), both[1])


def test_memory_is_bounded_and_the_oldest_feature_goes() -> None:
    model = HazardModel(max_features=10)
    for n in range(40):
        model.learn(("any", f"session:{n}"), 0, 3, ended=True)
    kept = model.dump()["features"]
    assert len(kept) == 10
    assert {"any", "session:39"} <= set(kept)


@given(hazards)
@settings(max_examples=50)
def test_worth_is_the_best_rate_over_all_times_to_give_up(values: np.ndarray) -> None:
    found = curve(values)
    survival = 1.0 - found.cdf
    for b in (0, 7, BINS - 1):
        best = 0.0
        for e in range(b + 1, BINS + 1):
            held = sum(0.5 * (survival[i] + survival[i + 1]) * WIDTHS[i] for i in range(b, e))
            best = max(best, (survival[b] - survival[e]) / max(held, 1e-12))
        assert found.worth[b] == pytest.approx(best, rel=1e-6, abs=1e-9)


@given(hazards)
@settings(max_examples=50)
def test_a_nearer_horizon_never_makes_worth_more_and_the_nearest_is_the_rate_of_the_bin(
    values: np.ndarray,
) -> None:
    survival = np.broadcast_to(1.0 - curve(values).cdf, (BINS, BINS + 1))
    bins = np.arange(BINS)
    none, second, hour, ever = (worth_in(survival, bins, horizon) for horizon in (0.0, 1.0, 3600.0, np.inf))
    assert (none <= second).all() and (second <= hour).all() and (hour <= ever).all()
    before, after = survival[0, :-1], survival[0, 1:]
    held = np.maximum(0.5 * (before + after) * WIDTHS, 1e-12)
    np.testing.assert_allclose(none, (before - after) / held, rtol=1e-6, atol=1e-9)


@given(hazards, st.floats(0, 1000), st.floats(0.05, 0.95))
def test_quantiles_are_times_and_grow(values: np.ndarray, elapsed: float, q: float) -> None:
    found = curve(values)
    assert 0.0 <= found.quantile(elapsed, q) <= found.quantile(elapsed, min(0.99, q + 0.04)) + 1e-6
    assert 0.0 <= found.within(elapsed, 10.0) <= 1.0 + 1e-9


def test_worths_of_all_owners_at_once_are_those_of_their_curves() -> None:
    waits = Waits(learned([2.0, 3.0, 100.0] * 10))
    waits.begin(3, ("any", "tool:x"), 10.0)
    waits.begin(100, ("any",), 12.0)
    now = 15.5
    values = waits.worths(now)
    for owner in (3, 100):
        open_wait = waits.get(owner)
        assert open_wait is not None
        assert values[owner] == open_wait.curve.worth_at(now - open_wait.since)
    assert values[0] == 0.0
    waits.drop(3)
    assert waits.worths(now)[3] == 0.0
    assert waits.end(3, now) is None


def test_what_agents_have_in_common_is_known_from_the_start() -> None:
    def wait(*tools: ToolFacts) -> Curve:
        return curve(prior.pauses().hazards(pause_features(Pause(session="new", tools=tools))))

    edit, person = wait(ToolFacts("Read")), wait()
    assert edit.within(0.0, 5.0) > 0.8
    assert person.within(0.0, 5.0) < 0.2
    assert not [name for name in prior.pauses().dump()["features"] if "session" in name or "line" in name]


def test_sessions_come_and_go_without_pushing_out_what_they_have_in_common() -> None:
    model = HazardModel(max_features=40)
    model.learn(("any", "tool:rare"), 0, 3, ended=True)
    for n in range(500):
        model.learn(("any", f"session:{n}", f"session:{n}:x"), 0, 3, ended=True)
    kept = model.dump()["features"]
    assert {"tool:rare", "session:499"} <= set(kept)
    assert len(kept) == 40


def test_what_all_waits_are_worth_is_what_each_is_worth() -> None:
    waits = Waits(HazardModel())
    rng = np.random.default_rng(2)
    for owner in range(20):
        waits.begin(owner, ["any"], float(rng.uniform(-50, 50)))
    now = 0.0
    for step in range(40):
        now += float(rng.exponential(5.0))
        if step % 3 == 0:
            waits.drop(step % 20)
        if step % 4 == 0:
            waits.begin(step % 20, ["any"], now + 3.0 * (step % 8 == 0))
        for owner, worth in enumerate(waits.worths(now)[:20].tolist()):
            wait = waits.get(owner)
            expected = 0.0 if wait is None else Forecast(wait.curve, now - wait.since).worth
            assert worth == pytest.approx(expected)
