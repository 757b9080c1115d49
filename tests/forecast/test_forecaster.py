"""The one class that the coordinator and the simulator tell what agents do."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from kvpilot.domain import SignalKind, ToolFacts
from kvpilot.forecast import Forecaster
from kvpilot.forecast.calibration import Intervals
from kvpilot.forecast.forecaster import StoredRhythm
from kvpilot.forecast.memory import pack, unpack

PYTEST = ToolFacts("Bash", program="pytest")


def begin(forecaster: Forecaster, now: float, owner: int = 0) -> None:
    forecaster.request(owner, now, session="t/s", conversation="c", child=False, added_tokens=100)


def turn(forecaster: Forecaster, now: float, owner: int = 0, *tools: ToolFacts) -> None:
    """A request of two seconds."""
    begin(forecaster, now, owner)
    forecaster.reply(owner, now + 2.0, tools, 50)


def median_of(forecaster: Forecaster, now: float, owner: int = 0) -> float:
    found = forecaster.forecast(owner, now)
    assert found is not None
    return found.quantile(0.5)


def test_what_a_session_does_again_and_again_is_expected_of_it() -> None:
    forecaster, now = Forecaster(), 1e9
    for _ in range(25):
        turn(forecaster, now, 0, PYTEST)
        now += 2.0 + 40.0
    turn(forecaster, now, 0, PYTEST)
    assert 25.0 < median_of(forecaster, now + 2.0) < 60.0
    turn(forecaster, now, 1, ToolFacts("Read"))
    assert median_of(forecaster, now + 2.0, 1) < 5.0


def test_a_person_is_waited_for_longer_than_a_tool() -> None:
    forecaster = Forecaster()
    turn(forecaster, 0.0, 0, ToolFacts("Read"))
    turn(forecaster, 0.0, 1)
    worths = forecaster.worths(2.5)
    assert worths[0] > worths[1] > 0.0
    assert worths[1] == forecaster.worth(1, 2.5)


def test_while_a_request_runs_no_next_one_is_foreseen_but_its_room_is_worth_something() -> None:
    forecaster = Forecaster()
    begin(forecaster, 0.0)
    assert forecaster.forecast(0, 1.0) is None
    assert forecaster.worth(0, 1.0) == forecaster.worths(1.0)[0] > 0.0


def test_a_finished_tool_makes_the_next_request_due() -> None:
    forecaster = Forecaster()
    turn(forecaster, 0.0, 0, ToolFacts("Task", agent=True))
    assert median_of(forecaster, 3.0) > 10.0
    before = forecaster.worth(0, 3.0)
    forecaster.signal(0, 3.0, SignalKind.TOOL_FINISHED)
    assert median_of(forecaster, 3.0) < 2.0
    assert forecaster.worth(0, 3.0) > 10 * before


def test_an_announced_moment_is_believed() -> None:
    forecaster = Forecaster()
    turn(forecaster, 0.0)
    forecaster.signal(0, 2.0, SignalKind.EXPECTED, eta_s=600.0)
    found = forecaster.forecast(0, 2.0)
    assert found is not None
    assert 600.0 <= found.quantile(0.5) < 610.0
    assert found.within(500.0) == 0.0 < found.within(660.0)
    far, near, due = (forecaster.worth(0, now) for now in (2.0, 550.0, 602.0))
    assert far < near < due
    assert far == pytest.approx(1 / 600, rel=0.1), "one return for holding it until then"


def test_who_is_suspended_or_over_is_not_waited_for() -> None:
    for kind in (SignalKind.SUSPEND, SignalKind.END):
        forecaster = Forecaster()
        turn(forecaster, 0.0, 0, PYTEST)
        forecaster.signal(0, 3.0, kind)
        assert forecaster.forecast(0, 3.0) is None
        assert forecaster.worths(3.0)[0] == 0.0
    forecaster.signal(0, 4.0, SignalKind.RESUME)
    assert median_of(forecaster, 4.0) < 2.0


def test_a_person_asked_on_behalf_of_a_tool_is_waited_for_as_a_person() -> None:
    forecaster = Forecaster()
    turn(forecaster, 0.0, 0, ToolFacts("Read"))
    quick = median_of(forecaster, 3.0)
    forecaster.signal(0, 3.0, SignalKind.WAITING_HUMAN)
    assert median_of(forecaster, 3.0) > 5 * quick


def test_a_forgotten_number_starts_anew() -> None:
    forecaster = Forecaster()
    turn(forecaster, 0.0, 7, PYTEST)
    forecaster.forget(7)
    assert forecaster.forecast(7, 3.0) is None
    assert forecaster.worths(3.0)[7] == 0.0
    turn(forecaster, 9.0, 7)
    assert forecaster.stored(7) is not None and forecaster.stored(7).rhythm.turns == 1  # type: ignore[union-attr]


def test_waits_go_on_through_a_restart() -> None:
    before, now = Forecaster(), 1e9
    for step in range(5):
        turn(before, now + 30.0 * step, 0, PYTEST)
    now += 120.0
    raw = msgspec.msgpack.encode(before.stored(0))
    after = Forecaster()
    unpack(after, msgspec.msgpack.decode(msgspec.msgpack.encode(pack(before))))
    after.restore(4, msgspec.msgpack.decode(raw, type=StoredRhythm))
    for at in (now + 5.0, now + 50.0):
        assert median_of(after, at, 4) == pytest.approx(median_of(before, at), rel=0.02)
    begin(before, now + 20.0)
    begin(after, now + 20.0, 4)
    known, again = before.stored(0), after.stored(4)
    assert known is not None and again is not None
    assert known.rhythm == again.rhythm
    assert known.cycle is not None and again.cycle is not None
    assert known.cycle.features == again.cycle.features


def test_a_request_that_ran_at_a_restart_is_expected_to_come_again() -> None:
    before, after = Forecaster(), Forecaster()
    begin(before, 100.0)
    known = before.stored(0)
    assert known is not None
    after.restore(0, known)
    assert after.forecast(0, 101.0) is not None
    assert after.worth(0, 101.0) > 0.0


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: raw | {"version": 99},
        lambda raw: raw | {"columns": 3},
        lambda raw: raw | {"pauses": raw["pauses"] | {"weights": b"123"}},
        lambda raw: raw | {"cycles": raw["cycles"] | {"weights": raw["cycles"]["weights"][:-118]}},
        lambda raw: raw | {"cycles": raw["cycles"] | {"weights": b"\xff" * len(raw["cycles"]["weights"])}},
        lambda raw: raw | {"asked": [["tool", 0.5, float("nan")]]},
        lambda raw: {},
        lambda raw: [1, 2],
        lambda raw: None,
    ],
)
def test_a_damaged_memory_changes_nothing(damage: object) -> None:
    forecaster = Forecaster(intervals=Intervals())
    turn(forecaster, 0.0, 0, PYTEST)
    before = forecaster.pauses.model.hazards(["any", "tool"])
    with pytest.raises(ValueError):
        unpack(forecaster, damage(pack(forecaster)))  # type: ignore[operator]
    assert np.array_equal(forecaster.pauses.model.hazards(["any", "tool"]), before)


def test_what_was_stated_of_pauses_is_counted_by_what_they_waited_for() -> None:
    intervals = Intervals()
    forecaster, now = Forecaster(intervals=intervals), 0.0
    for step in range(400):
        turn(forecaster, now, 0, *([PYTEST] if step % 2 else []))
        now += 2.0 + (3.0 if step % 2 else 100.0) * (1 + (step % 7) / 7)
    for kind in ("tool", "person"):
        held = intervals.held[kind, 0.8]
        assert held.ended in (199, 200)
        assert abs(held.inside / held.ended - 0.8) < 0.1
        assert 1.0 < intervals.held[kind, 0.5].width <= held.width
