"""What beginnings that conversations share are worth."""

from __future__ import annotations

import numpy as np
import pytest

from kvpilot.forecast.arrivals import Arrivals

SYSTEM, OWN, RARE = 3, 70, 71


def rates(arrivals: Arrivals, now: float) -> list[float]:
    return arrivals.rates(np.array([SYSTEM, OWN, RARE, 999]), now).tolist()


def test_what_conversations_begin_with_is_worth_their_rate() -> None:
    arrivals = Arrivals()
    arrivals.see([SYSTEM, OWN, RARE], 0.0)
    assert rates(arrivals, 10.0) == [0.0] * 4
    for n in range(1, 101):
        arrivals.begin([SYSTEM], 10.0 * n)
    arrivals.begin([RARE], 500.0)
    system, own, rare, unknown = rates(arrivals, 1000.0)
    assert system == pytest.approx(0.1, rel=0.1)
    assert own == unknown == 0.0
    assert 0.0 < rare < 0.01 * 1.1
    assert [arrivals.rate(run, 1000.0) for run in (SYSTEM, OWN, RARE, 999)] == rates(arrivals, 1000.0)


def test_a_rate_fades_when_nobody_begins_any_more() -> None:
    arrivals = Arrivals()
    arrivals.see([SYSTEM], 0.0)
    for n in range(1, 101):
        arrivals.begin([SYSTEM], 10.0 * n)
    assert rates(arrivals, 1000.0 + 3600.0)[0] < 0.001


def test_a_system_prompt_is_expected_to_be_shared() -> None:
    arrivals = Arrivals()
    arrivals.see([SYSTEM], 0.0, head=True)
    arrivals.see([OWN], 0.0)
    assert rates(arrivals, 100.0)[0] > 0.0
    assert not arrivals.knows(RARE) and arrivals.knows(OWN)
