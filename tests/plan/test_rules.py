from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from kvpilot.domain import ActionKind, SessionState, ToolFacts
from kvpilot.forecast import Forecast, prior
from kvpilot.forecast.curve import curve
from kvpilot.forecast.features import Pause, pause_features
from kvpilot.plan import PlanSettings, Snapshot, ThreadView, plan

SETTINGS = PlanSettings()


def forecast(*tools: str, elapsed_s: float = 0.0) -> Forecast:
    """Of a wait for these tools, or for a person."""
    pause = Pause(session="any", tools=[ToolFacts(name) for name in tools])
    return Forecast(curve(prior.pauses().hazards(pause_features(pause))), elapsed_s)


def view(owner: str, **changes: object) -> ThreadView:
    base = ThreadView(
        owner=owner,
        session=owner,
        tenant="t",
        state=SessionState.WAITING_TOOL,
        in_flight=0,
        chunks=10,
        host=10,
        loadable=0,
        exclusive_host=10,
        forecast=forecast("Bash"),
        expected_at=None,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def snap(*threads: ThreadView, used: int, capacity: int = 100, orphans: int = 0) -> Snapshot:
    return Snapshot(1000.0, threads, used, capacity, 1, orphans)


def test_nothing_to_do_while_there_is_room_and_everything_is_in_place() -> None:
    assert plan(snap(view("a"), view("b"), used=20), SETTINGS) == []


def test_an_announced_return_is_prefetched_now() -> None:
    away = view("a", state=SessionState.SUSPENDED, host=0, loadable=10, exclusive_host=0, expected_at=1000.0)
    (decision,) = plan(snap(away, used=20), SETTINGS)
    assert (decision.kind, decision.owner, decision.chunks) == (ActionKind.PREFETCH, "a", 10)
    assert decision.at <= 1000.0


def test_a_tool_wait_is_kept_in_memory_a_person_is_not_waited_for() -> None:
    tool = view("tool", host=0, loadable=10)
    person = view(
        "person",
        state=SessionState.WAITING_HUMAN,
        host=0,
        loadable=10,
        forecast=forecast(elapsed_s=600.0),
    )
    assert [d.owner for d in plan(snap(tool, person, used=20), SETTINGS)] == ["tool"]


def test_pressure_demotes_the_unreferenced_first_then_who_returns_last() -> None:
    person = view("person", state=SessionState.WAITING_HUMAN, forecast=forecast(elapsed_s=600.0))
    gone = view("gone", state=SessionState.SUSPENDED, forecast=None)
    soon = view("soon", expected_at=1000.0)
    decisions = plan(snap(person, gone, soon, used=90, orphans=5), SETTINGS)
    assert [(d.owner, d.chunks) for d in decisions] == [(None, 5), ("gone", 10), ("person", 10)]
    assert all(d.kind is ActionKind.DEMOTE for d in decisions)


def test_a_running_session_is_never_demoted() -> None:
    busy = view("busy", in_flight=1, state=SessionState.RUNNING, forecast=None)
    assert plan(snap(busy, used=95), SETTINGS) == []


views = st.builds(
    view,
    st.integers(0, 50).map(str),
    in_flight=st.integers(0, 1),
    state=st.sampled_from(SessionState),
    chunks=st.integers(0, 60),
    host=st.integers(0, 60),
    loadable=st.integers(0, 60),
    exclusive_host=st.integers(0, 60),
    expected_at=st.none() | st.floats(900, 2000),
    forecast=st.none() | st.builds(lambda s: forecast("Bash", elapsed_s=s), st.floats(0, 1e4)),
)


@given(st.lists(views, max_size=12, unique_by=lambda v: v.owner), st.integers(0, 120), st.integers(0, 40))
def test_plans_are_bounded_and_never_touch_running_sessions(
    threads: list[ThreadView], used: int, orphans: int
) -> None:
    decisions = plan(snap(*threads, used=used, orphans=orphans), SETTINGS)
    by_owner = {v.owner: v for v in threads}
    loaded = 0
    for decision in decisions:
        assert decision.chunks > 0
        if decision.owner is None:
            assert decision.chunks <= orphans
            continue
        target = by_owner[decision.owner]
        assert not target.in_flight
        if decision.kind is ActionKind.DEMOTE:
            assert decision.chunks <= target.exclusive_host
        else:
            assert decision.chunks <= target.loadable
            loaded += decision.chunks
    assert loaded <= SETTINGS.prefetch_up_to * 100


def demoted(*threads: ThreadView) -> list[str | None]:
    return [d.owner for d in plan(snap(*threads, used=90), SETTINGS) if d.kind is ActionKind.DEMOTE]


def resting(owner: str, **changes: object) -> ThreadView:
    return view(owner, state=SessionState.SUSPENDED, **changes)


def test_what_a_client_wants_kept_goes_last_but_goes() -> None:
    kept = resting("a", kept=True)
    others = [resting(name) for name in "bcde"]
    assert demoted(kept, *others)[:3] == ["b", "c", "d"]
    assert "a" not in demoted(kept, *others)
    assert demoted(kept) == ["a"]


def test_priority_decides_between_equal_prospects() -> None:
    assert demoted(resting("a", priority=5), resting("b", priority=-100), resting("c"))[0] == "b"


def test_a_tenants_priorities_do_not_crowd_others_out() -> None:
    loud = [resting(f"a{n}", tenant="x", priority=100) for n in range(6)]
    quiet = [resting(f"z{n}", tenant="y") for n in range(2)]
    # Half of 100 chunks is five contexts: the sixth counts like anybody's.
    assert demoted(*loud, *quiet)[:3] == ["a5", "z0", "z1"]


def test_wishes_are_heard_up_to_a_tenants_part() -> None:
    greedy = [resting(f"a{n}", tenant="x", kept=True, priority=n) for n in range(5)]
    modest = resting("z", tenant="y", kept=True)
    # Half of 100 chunks, for two tenants: 25 each, so two contexts of 10 for x, the ones of highest priority.
    assert demoted(*greedy, modest)[:3] == ["a0", "a1", "a2"]
