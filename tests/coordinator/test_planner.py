"""Planning on what was observed, and carrying it out."""

from __future__ import annotations

import pytest

from kvpilot.coordinator import executor
from kvpilot.coordinator.planner import ENDED_KEPT_S, Planner
from kvpilot.coordinator.view import Reader
from kvpilot.domain import ActionKind, OutcomeStatus, SignalKind, Space, Tier
from kvpilot.plan import PlanSettings
from tests.coordinator.world import World, text_tokens

SPACE = Space("m")
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "bash"}}]}


def context(tag: str, n: int = 40) -> list[dict[str, str]]:
    return [{"role": "user", "content": " ".join(f"{tag}{i}" for i in range(n))}]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "CONFIRM_STEP_S", 0.005)
    monkeypatch.setattr(executor, "CONFIRM_S", 0.1)


@pytest.fixture
def world() -> World:
    return World(recheck_s=())


@pytest.fixture
def planner(world: World) -> Planner:
    return Planner(world.service, Reader(world.service), PlanSettings())


def host_chunks(world: World, messages: list[dict[str, str]]) -> int:
    return sum(Tier.HOST in world.layer.tiers(SPACE, c) for c in world.chunks(messages))


async def push_out_of_host(world: World, messages: list[dict[str, str]]) -> None:
    await world.layer.drop(SPACE, world.chunks(messages), (Tier.HOST,))


async def test_a_context_that_fell_out_of_memory_is_back_before_its_tool_is(
    world: World, planner: Planner
) -> None:
    a = context("a")
    world.turn(a, "A", reply=CALL)
    await push_out_of_host(world, a)
    await world.observe()
    (record,) = await world.settle(planner.tick())
    assert (record.kind, record.source, record.status) == (ActionKind.PREFETCH, "plan", OutcomeStatus.DONE)
    assert host_chunks(world, a) == len(world.chunks(a))
    assert planner.tick() == [], "not again before the directory had time to show it"


async def test_nothing_is_planned_on_an_outdated_view(world: World, planner: Planner) -> None:
    a = context("a")
    world.turn(a, "A", reply=CALL)
    await push_out_of_host(world, a)
    await world.observe()
    world.now += 60.0
    assert planner.tick() == []


async def test_pressure_sends_down_who_returns_last_tail_first(world: World, planner: Planner) -> None:
    a, b, stray = context("a"), context("b"), context("stray", 20)
    world.turn(a, "A", reply=CALL)
    world.turn(b, "B")
    world.layer.store(SPACE, text_tokens(stray))
    chunks = len(world.chunks(a)) + len(world.chunks(b)) + len(world.chunks(stray))
    world.layer.capacity = int(chunks * 1000 / 0.92)
    world.now += 300.0
    world.signal("A", SignalKind.TOOL_FINISHED, eta_s=1.0)
    await world.observe()
    records = await world.settle(planner.tick())
    assert {r.kind for r in records} == {ActionKind.DEMOTE}
    assert host_chunks(world, stray) == 0
    assert host_chunks(world, a) == len(world.chunks(a))
    left = [Tier.HOST in world.layer.tiers(SPACE, c) for c in world.chunks(b)]
    assert left == sorted(left, reverse=True), "the tail goes first"
    assert 0 < sum(left) < len(left)
    assert all(Tier.DISK in world.layer.tiers(SPACE, c) for c in world.chunks(b))


async def test_passive_mode_plans_nothing(world: World, planner: Planner) -> None:
    world.service.mode = "passive"
    a = context("a")
    world.turn(a, "A", reply=CALL)
    await push_out_of_host(world, a)
    await world.observe()
    assert planner.tick() == []


async def test_ended_and_long_silent_sessions_are_forgotten(world: World, planner: Planner) -> None:
    world.turn(context("a"), "A")
    world.turn(context("b"), "B")
    await world.settle(world.signal("A", SignalKind.END))
    world.now += ENDED_KEPT_S + 1
    planner.tick()
    assert [s.id for s in world.service.book.sessions.values()] == ["B"]
    world.now += world.service.settings.session_idle_s + 1
    planner.tick()
    assert not world.service.book.sessions
    assert not world.service.references.owners()
    assert all(world.held(context("b"))), "forgetting is not evicting"
