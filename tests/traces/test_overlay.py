"""Laying sessions over one another."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpilot.traces import TraceAgent, TraceCall, TraceError, TraceMessage, TraceSession, overlay
from kvpilot.traces.overlay import LONGEST_GAP_S


def made(id: str, gaps: list[float]) -> TraceSession:
    reply = TraceMessage(id="r", role="assistant", tok=1)
    calls, now = [], 5.0
    for gap in gaps:
        calls.append(TraceCall(agent="main", t_request=now, t_end=now + 2, keep=0, add=(), reply=reply))
        now += 2 + gap
    return TraceSession(source="made", id=id, agents=(TraceAgent(id="main"),), calls=tuple(calls))


gap_lists = st.lists(st.floats(0, 20_000), min_size=1, max_size=8)


@given(st.lists(gap_lists, min_size=1, max_size=8), st.integers(0, 5), st.data())
def test_overlay_draws_without_replacement_and_keeps_order(
    gaps: list[list[float]], seed: int, data: st.DataObject
) -> None:
    sessions = [made(str(i), g) for i, g in enumerate(gaps)]
    n = data.draw(st.integers(1, len(sessions)))
    first, again = overlay(sessions, n, seed), overlay(iter(sessions), n, seed)
    assert first == again
    ids = [p.session.id for p in first.placed]
    assert len(set(ids)) == n
    assert all(0 <= p.start <= first.window_s for p in first.placed)
    times = [at for at, _, _ in first.calls()]
    assert times == sorted(times) and len(times) == sum(len(p.session.calls) for p in first.placed)
    for placed in first.placed:
        calls = placed.session.calls
        assert calls[0].t_request == pytest.approx(0)
        for a, b in itertools.pairwise(calls):
            assert b.t_request - a.t_end <= LONGEST_GAP_S + 1e-6


def test_window_is_busy_time_over_twenty_and_cut_gaps_are_counted() -> None:
    sessions = [made("a", [100, 7200, 10]), made("b", [700, 5])]
    result = overlay(sessions, 2, 0)
    # a: three calls of 2 s and one gap below ten minutes; b: two calls, its gap is too long to count.
    assert result.window_s == pytest.approx((6 + 100 + 4) / 20)
    assert result.gaps_cut == 1


def test_too_few_sessions_is_said() -> None:
    with pytest.raises(TraceError, match="has 1 sessions, 3 were asked for"):
        overlay([made("a", [1])], 3, 0)
