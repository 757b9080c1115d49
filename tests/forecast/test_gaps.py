from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpilot.forecast import GapForecaster


def test_learns_a_tool_within_a_dozen_samples() -> None:
    forecaster = GapForecaster()
    for _ in range(12):
        forecaster.observe(["t:pytest", "tool"], 40.0)
    learned = forecaster.forecast(["t:pytest", "tool"], "tool", 0.0)
    assert 28.0 < learned.quantile(0.5) < 57.0
    assert forecaster.forecast(["t:ls"], "tool", 0.0).quantile(0.5) < 5.0


def test_a_wait_that_outlasts_its_kind_is_expected_to_last() -> None:
    forecaster = GapForecaster()
    for _ in range(30):
        forecaster.observe(["t:ls"], 0.3)
    assert forecaster.forecast(["t:ls"], "tool", 0.0).within(1.0) > 0.8
    assert forecaster.forecast(["t:ls"], "tool", 60.0).within(1.0) < 0.2


def test_follows_a_change() -> None:
    forecaster = GapForecaster()
    for _ in range(200):
        forecaster.observe(["t:x"], 0.1)
    for _ in range(80):
        forecaster.observe(["t:x"], 50.0)
    assert forecaster.forecast(["t:x"], "tool", 0.0).quantile(0.5) > 20.0


def test_what_was_learned_survives_a_dump() -> None:
    forecaster, copy = GapForecaster(), GapForecaster()
    for seconds in (0.5, 3.0, 700.0):
        forecaster.observe(["a", "b"], seconds)
    copy.load(forecaster.dump())
    assert copy.forecast(["a"], "human", 2.0).quantile(0.3) == pytest.approx(
        forecaster.forecast(["a"], "human", 2.0).quantile(0.3), rel=1e-2
    )


@given(
    st.lists(st.floats(0, 1e6), max_size=40),
    st.sampled_from(["tool", "human", "suspended"]),
    st.floats(0, 1e7),
)
def test_forecasts_are_distributions(samples: list[float], prior: str, elapsed: float) -> None:
    forecaster = GapForecaster()
    for seconds in samples:
        forecaster.observe(["k"], seconds)
    found = forecaster.forecast(["k"], prior, elapsed)
    quantiles = [found.quantile(q / 10) for q in range(11)]
    assert quantiles[0] >= 0.0
    assert quantiles == sorted(quantiles)
    chances = [found.within(s) for s in (0.0, 0.1, 1.0, 60.0, 1e4, 1e9)]
    assert chances == sorted(chances)
    assert chances[0] >= 0.0 and chances[-1] == pytest.approx(1.0)
