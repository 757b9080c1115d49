"""Planning on what was observed, and carrying it out."""

from __future__ import annotations

import pytest

from kvpilot.coordinator import executor
from kvpilot.coordinator.placing import PlannerSettings
from kvpilot.coordinator.planner import ENDED_KEPT_S, Planner
from kvpilot.domain import (
    ActionKind,
    ActionRecord,
    Command,
    OutcomeStatus,
    Retention,
    SessionRef,
    SignalKind,
    Space,
    TargetKind,
    Tier,
)
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
    return Planner(world.service)


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


async def test_a_tenant_beyond_its_budget_makes_way_though_there_is_room(world: World) -> None:
    planner = Planner(world.service, PlannerSettings(budgets={"team": 0.2}))
    for name in "ab":
        world.turn(context(name), name, tenant="team", reply=CALL)
        world.turn(context(name), name)
    size = len(world.chunks(context("a")))
    world.layer.capacity = 8 * size * 1000
    await world.observe()
    await world.settle(planner.tick())
    team = Space("m", "team")
    left = [
        sum(Tier.HOST in world.layer.tiers(team, chunk) for chunk in world.chunks(context(name)))
        for name in "ab"
    ]
    assert sum(left) == int(0.2 * 8 * size)
    assert all(held for name in "ab" for held in world.held(context(name), "team")), "it is on disk"
    assert [host_chunks(world, context(name)) for name in "ab"] == [size, size]
    await world.observe()
    world.now += 10.0
    await world.observe()
    assert planner.tick() == [], "what has made way is not brought back"


def shares(world: World, chunks: int, filled: float) -> None:
    """Host memory in which so many chunks take that share."""
    world.layer.capacity = int(chunks * 1000 / filled)


def of_session(records: list[ActionRecord]) -> list[tuple[str, str | None]]:
    return [(record.kind.value, record.session) for record in records]


async def test_what_a_client_wants_kept_goes_after_its_equals_until_its_time_is_over(
    world: World, planner: Planner
) -> None:
    for name in "abcd":
        wish = Retention(ttl_s=1000.0) if name == "a" else None
        world.turn(context(name), name.upper(), retention=wish)
    world.now += 600.0
    shares(world, 4 * len(world.chunks(context("a"))), 0.8)
    await world.observe()
    assert ("demote", "A") not in of_session(planner.tick())
    world.now += 600.0
    for name in "bcd":
        world.turn(context(name), name.upper())
    world.layer.store(SPACE, text_tokens(context("a")))
    await world.observe()
    assert of_session(planner.tick())[0] == ("demote", "A")


async def test_what_a_client_sent_down_is_not_brought_back_before_its_next_request(
    world: World, planner: Planner
) -> None:
    a = context("a")
    world.turn(a, "A", reply=CALL)
    chunks = tuple(chunk.hex() for chunk in world.chunks(a)[3:])
    command = Command(ActionKind.DEMOTE, "default", "", SessionRef(), target=TargetKind.CHUNKS, chunks=chunks)
    await world.settle(await world.service.command(command))
    assert host_chunks(world, a) == 3
    world.now += 5.0
    await world.observe()
    assert planner.tick() == []
    b = [*a, {"role": "assistant", "content": "ok"}, {"role": "user", "content": "go on"}]
    world.turn(b, "A", reply=CALL, stored=False)
    world.now += 5.0
    await world.observe()
    assert of_session(planner.tick()) == [("prefetch", "A")]


async def test_what_many_share_goes_after_what_is_theirs_alone(world: World, planner: Planner) -> None:
    system = {"role": "system", "content": " ".join(f"rule{i}" for i in range(40))}
    contexts = {name: [system, *context(name)] for name in "abc"}
    for name, messages in contexts.items():
        world.turn(messages, name.upper())
    world.now += 3600.0
    shared = len(world.chunks([system])) - 1
    shares(world, shared + 3 * len(world.chunks(context("a"))), 1.0)
    await world.observe()
    await world.settle(planner.tick())
    for messages in contexts.values():
        assert all(Tier.HOST in world.layer.tiers(SPACE, c) for c in world.chunks(messages)[:shared])
    assert sum(host_chunks(world, messages) - shared for messages in contexts.values()) < 3 * len(
        world.chunks(context("a"))
    )


async def test_who_returns_sooner_is_brought_back_when_there_is_room_for_one(
    world: World, planner: Planner
) -> None:
    tool, person = context("tool"), context("person")
    world.turn(person, "person")
    world.turn(tool, "tool", reply=CALL)
    for messages in (tool, person):
        await push_out_of_host(world, messages)
    world.layer.store(SPACE, text_tokens(context("other", 8)))
    shares(world, len(world.chunks(tool)) + 4, 0.7)
    world.now += 1.0
    await world.observe()
    await world.settle(planner.tick())
    assert host_chunks(world, tool) == len(world.chunks(tool))
    assert host_chunks(world, person) <= 4, "what room was left"


async def test_a_running_request_keeps_its_context_whatever_the_pressure(
    world: World, planner: Planner
) -> None:
    a = context("a")
    world.turn(a, "A")
    world.start([*a, {"role": "assistant", "content": "ok"}, {"role": "user", "content": "more"}], "A")
    shares(world, len(world.chunks(a)), 1.0)
    await world.observe()
    assert planner.tick() == []


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
