"""``kvpilot eval forecast`` scores what was stated before it was known."""

from __future__ import annotations

import random

from kvpilot.eval.forecast import calibrate, report
from kvpilot.replay.plan import Hints
from kvpilot.traces import ToolUse, TraceAgent, TraceCall, TraceMessage, TraceSession


def session(number: int) -> TraceSession:
    """Forty calls, each followed by a tool of some seconds."""
    rng = random.Random(number)
    calls, at = [], 0.0
    for turn in range(40):
        name = f"{number}:{turn}"
        reply = TraceMessage(
            id=f"{name}:reply", role="assistant", tok=300, calls=(ToolUse(id=name, name="Bash"),)
        )
        add = (TraceMessage(id=f"{name}:add", role="user", tok=300),)
        calls.append(
            TraceCall(agent="main", t_request=at, t_end=at + 1.0, keep=2 * turn, add=add, reply=reply)
        )
        at += 1.0 + rng.lognormvariate(1.0, 1.0)
    return TraceSession(source="made", id=f"s{number}", agents=(TraceAgent(id="main"),), calls=tuple(calls))


def test_intervals_of_pauses_hold_what_they_state() -> None:
    found = calibrate([session(n) for n in range(30)], seed=1, hints=Hints.LIFECYCLE)
    assert found is not None
    assert found.pauses == int(30 * 39 * 0.8)
    assert all(interval.holds for interval in found.intervals)
    assert [interval.nominal for interval in found.intervals] == [0.5, 0.8, 0.95]
    assert report({"made": found, "empty": None}, 1, Hints.LIFECYCLE)["holds"]


def test_a_source_without_pauses_has_nothing_to_score() -> None:
    one = session(1)
    alone = TraceSession(source="made", id="s", agents=one.agents, calls=one.calls[:1])
    assert calibrate([alone], seed=1, hints=Hints.NONE) is None
