"""What the coordinator foresees of sessions, from the requests, replies and hints that pass through the gateway."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvpilot.control.store import Store
from kvpilot.coordinator.runtime import FORECAST_MEMORY
from kvpilot.domain import SignalKind
from kvpilot.forecast import Forecast
from tests.coordinator.world import SYSTEM, World, user


def calls(name: str, **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "function": function}]}


def foreseen(world: World, session: str) -> Forecast | None:
    found = world.service.book.get("default", session)
    assert found is not None
    return world.service.forecasts.soonest(found, world.now)


def median_of(world: World, session: str) -> float:
    found = foreseen(world, session)
    assert found is not None
    return found.quantile(0.5)


def agent(world: World, session: str, pauses_s: float, steps: int = 20) -> None:
    """Runs ``make test`` again and again, each time for so long."""
    messages: list[Any] = [SYSTEM, user(f"{session} start")]
    for step in range(steps):
        reply = calls("Bash", command="cd /repo && make test | tail -5")
        world.turn(messages, session, reply=reply)
        messages = [*messages, reply, {"role": "tool", "tool_call_id": "c", "content": f"{step}"}]
        world.now += pauses_s
    world.turn(messages, session, reply=reply)


def test_tools_are_told_apart_by_what_they_run() -> None:
    world = World()
    agent(world, "A", 60.0)
    world.turn([SYSTEM, user("other")], "B", reply=calls("Bash", command="make test | tail -5"))
    world.turn([SYSTEM, user("third")], "C", reply=calls("Bash", command="ls"))
    assert median_of(world, "A") > 30.0
    assert median_of(world, "B") > 3 * median_of(world, "C")


def test_a_running_request_is_not_waited_for_and_a_broken_one_is_soon_tried_again() -> None:
    world = World()
    request = world.start([SYSTEM, user("a")], "A")
    assert foreseen(world, "A") is None
    world.service.mapper.expire(world.now + 1.0)
    assert median_of(world, "A") < 30.0
    assert request not in world.service.mapper._pending


async def test_hints_sharpen_what_is_foreseen() -> None:
    world = World()
    world.turn([SYSTEM, user("a")], "A", reply=calls("Task", prompt="look around"))
    assert median_of(world, "A") > 10.0
    world.signal("A", SignalKind.TOOL_FINISHED)
    assert median_of(world, "A") < 2.0
    world.signal("A", SignalKind.EXPECTED, eta_s=900.0)
    assert 900.0 <= median_of(world, "A") < 910.0
    world.signal("A", SignalKind.SUSPEND)
    assert foreseen(world, "A") is None
    world.signal("A", SignalKind.RESUME)
    assert median_of(world, "A") < 2.0
    world.signal("A", SignalKind.END)
    assert foreseen(world, "A") is None


async def test_who_ended_while_a_request_ran_is_not_waited_for_afterwards() -> None:
    world = World()
    messages = [SYSTEM, user("a")]
    request = world.start(messages, "A")
    world.signal("A", SignalKind.END)
    world.finish(request, messages)
    assert foreseen(world, "A") is None


async def test_waits_and_what_was_learned_survive_a_restart(tmp_path: Path) -> None:
    world, store = World(), Store(tmp_path / "k.sqlite")
    world.service.on_session = store.session_changed
    agent(world, "A", 60.0)
    world.turn([SYSTEM, user("b")], "B")
    await store.flush(world.service.references, world.service.forecasts.stored)
    store.put_memory(FORECAST_MEMORY, world.service.forecasts.memory())
    store.close()

    again, store = World(), Store(tmp_path / "k.sqlite")
    again.now = world.now = world.now + 20.0
    again.service.forecasts.remember(store.load_memory(FORECAST_MEMORY))
    for session, threads in store.load_sessions():
        again.service.restore(session, threads)
    for session in ("A", "B"):
        assert median_of(again, session) == pytest.approx(median_of(world, session), rel=0.02)


def test_a_damaged_memory_is_ignored_with_a_word_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    for memory in ({"version": 0}, [], "gap", {"pauses": {"t:ls": [1.0] * 46}}):
        caplog.clear()
        world.service.forecasts.remember(memory)
        assert "begins anew" in caplog.text
    agent(world, "A", 5.0, steps=2)
    assert foreseen(world, "A") is not None


def test_forgotten_conversations_give_their_numbers_back() -> None:
    world = World()
    for n in range(50):
        world.turn([SYSTEM, user(f"n{n}")], f"s{n}")
        found = world.service.book.get("default", f"s{n}")
        assert found is not None
        world.service.forget(found)
    assert len(world.service.forecasts.forecaster.worths(world.now)) <= 64
    assert world.service.forecasts._numbers == {}
