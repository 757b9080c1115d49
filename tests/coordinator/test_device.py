"""Where vLLM runs the plug-in, the plan reaches the engine's own pool; where it does not, nothing is missing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import pytest

from kvpilot.backends.engine_plugin import Displaced
from kvpilot.control.metrics import metrics_text
from kvpilot.coordinator.explain import Explainer
from kvpilot.coordinator.planner import Planner
from kvpilot.domain import ActionKind, OutcomeStatus, Retention, SessionRef, Signal, SignalKind
from kvpilot.engine.commands import Kind
from tests.coordinator.engine import PluggedEngine
from tests.coordinator.world import World, text_tokens, user, words

CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "bash"}}]}


def context(tag: str, n: int = 40) -> list[dict[str, str]]:
    return [user(words(tag, n))]


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world = World(recheck_s=(), plugged=True)
    await world.service.device.look()
    orders = asyncio.create_task(world.service.device._work())
    yield world
    orders.cancel()


@pytest.fixture
def engine(world: World) -> PluggedEngine:
    assert world.engine is not None
    return world.engine


def turn(world: World, messages: list[dict[str, str]], session: str, **kw: object) -> None:
    world.turn(messages, session, **kw)
    assert world.engine is not None
    world.engine.holds(text_tokens(messages).tolist())


async def plan(world: World) -> list[str]:
    """One round of the plan; sessions brought into the pool."""
    await world.observe()
    records = await world.settle(Planner(world.service).tick())
    await asyncio.sleep(0)
    return [r.session or "" for r in records if r.kind is ActionKind.PREFETCH and "device" in r.tiers]


async def orders_done() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_session_that_waits_for_its_tool_is_back_in_the_pool_before_it(
    world: World, engine: PluggedEngine
) -> None:
    a = context("a")
    turn(world, a, "A", reply=CALL)
    assert await plan(world) == [], "it is there"
    engine.loses_all()
    assert await plan(world) == ["A"]
    [order] = engine.orders(Kind.PREFETCH)
    assert (order.session, list(order.tokens)) == ("A", text_tokens(a).tolist()[: len(order.tokens)])
    assert order.eta_s is not None and order.eta_s > 0
    [record] = [r for r in world.service.actions.newest() if "device" in r.tiers]
    assert (record.status, record.planned, record.confirmed) == (OutcomeStatus.DONE, 10, 10)
    assert await plan(world) == []


async def test_who_makes_way_is_told_to_the_engine(world: World, engine: PluggedEngine) -> None:
    engine.blocks = 14
    await world.service.device.look()
    a, b = context("a"), context("b")
    turn(world, a, "A", reply=CALL)
    engine.loses_all()
    turn(world, b, "B")
    world.now += 30.0
    world.turn(a, "A", reply=CALL)
    assert await plan(world) == ["A"]
    await orders_done()
    [demoted] = engine.orders(Kind.DEMOTE)
    assert demoted.session == "B" and list(demoted.tokens) == text_tokens(b).tolist()
    assert demoted.start is not None and demoted.start % 4 == 0


async def test_a_context_that_found_no_room_is_left_alone_for_longer_and_longer(
    world: World, engine: PluggedEngine
) -> None:
    turn(world, context("a"), "A", reply=CALL)
    engine.loses_all()
    engine.full = True
    tries = []
    for _ in range(40):
        await plan(world)
        tries.append(len(engine.orders(Kind.PREFETCH)))
        world.now += 0.5
    assert tries[0] == tries[3] == 1 and tries[5] == tries[11] == 2 and tries[14] == 3 and tries[-1] == 4


async def test_what_an_ended_session_held_alone_is_evicted_from_the_pool(
    world: World, engine: PluggedEngine
) -> None:
    shared = words("s", 20)
    a, b = [user(f"{shared} {words('a', 20)}")], [user(f"{shared} {words('b', 20)}")]
    turn(world, a, "A")
    turn(world, b, "B")
    await world.settle(world.signal("A", SignalKind.END))
    await orders_done()
    [evicted] = engine.orders(Kind.EVICT)
    assert (evicted.session, evicted.start) == ("A", 20), "of 21 shared tokens the last is in no shared block"
    assert list(evicted.tokens) == text_tokens(a).tolist()
    assert [order.session for order in engine.orders(Kind.DEMOTE)] == ["A"]


async def test_a_superseded_tail_is_evicted_from_the_pool(world: World, engine: PluggedEngine) -> None:
    head = [user(words("h", 12))]
    turn(world, [*head, {"role": "assistant", "content": "x"}, user(words("t", 20))], "A")
    turn(world, [*head, {"role": "assistant", "content": "x"}, user(words("n", 8))], "A")
    await orders_done()
    [evicted] = engine.orders(Kind.EVICT)
    assert evicted.session == "A" and evicted.start == 16
    turn(world, [*head, {"role": "assistant", "content": "x"}, user(words("n", 8)), user("more")], "A")
    await orders_done()
    assert len(engine.orders(Kind.EVICT)) == 1, "a context that grows gives nothing up"


async def test_suspended_sessions_and_wishes_are_told(world: World, engine: PluggedEngine) -> None:
    turn(world, context("a"), "A", retention=Retention(ttl_s=60.0))
    await orders_done()
    [kept] = engine.orders(Kind.RETAIN)
    assert (kept.session, kept.ttl_s) == ("A", 60.0)
    wish = Signal(world.now, "default", SessionRef("A"), SignalKind.RETAIN, None, Retention(ttl_s=90.0))
    world.service.handle(wish)
    await world.settle(world.signal("A", SignalKind.SUSPEND))
    await orders_done()
    assert engine.orders(Kind.RETAIN)[1].ttl_s == 90.0
    assert [order.session for order in engine.orders(Kind.DEMOTE)] == ["A"]


async def test_passive_mode_orders_nothing(world: World, engine: PluggedEngine) -> None:
    world.service.mode = "passive"
    turn(world, context("a"), "A", reply=CALL, retention=Retention(ttl_s=60.0))
    engine.loses_all()
    assert await plan(world) == []
    await world.settle(world.signal("A", SignalKind.END))
    await orders_done()
    assert engine.asked == []


async def test_a_plug_in_that_comes_and_goes_is_told_once_each_and_missed_by_nobody(
    world: World, engine: PluggedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    device = world.service.device
    engine.there = False
    for _ in range(3):
        await device.look()
    turn(world, context("a"), "A", reply=CALL)
    engine.loses_all()
    assert await plan(world) == []
    await world.settle(world.signal("A", SignalKind.END))
    await orders_done()
    assert engine.asked == []
    engine.there, engine.plugged = True, False
    await device.look()
    engine.plugged = True
    for _ in range(3):
        await device.look()
    said = [record.message for record in caplog.records if "plug-in" in record.message]
    assert len(said) == 2 and "going on without" in said[0] and "steered" in said[1]


async def test_what_others_took_from_a_session_is_told(world: World, engine: PluggedEngine) -> None:
    turn(world, context("a"), "A")
    explainer = Explainer(world.service, Planner(world.service))
    session = world.service.book.get("default", "A")
    assert session is not None
    [told] = explainer.session(session)["conversations"]
    assert told["in_device_pool"] == {"tokens": 40, "lost_to_others": 0}
    engine.displaced = (Displaced("", "A", 3), Displaced("other", "A", 5))
    await world.service.device.look()
    [told] = explainer.session(session)["conversations"]
    assert told["in_device_pool"]["lost_to_others"] == 12
    assert b"kvpilot_device_taken_blocks_total 8.0" in metrics_text(world.service)
    engine.plugged = False
    await world.service.device.look()
    [told] = explainer.session(session)["conversations"]
    assert told["in_device_pool"] is None


async def test_an_engine_that_is_too_busy_to_tell_its_state_still_has_the_plug_in(
    world: World, engine: PluggedEngine
) -> None:
    engine.busy = True
    await world.service.device.look()
    turn(world, context("a"), "A")
    await world.settle(world.signal("A", SignalKind.END))
    await orders_done()
    assert engine.orders(Kind.EVICT)


async def test_an_engine_that_fails_during_an_order_fails_that_action_alone(
    world: World, engine: PluggedEngine
) -> None:
    turn(world, context("a"), "A", reply=CALL)
    engine.loses_all()
    engine.there = False
    await world.observe()
    [record] = await world.settle(Planner(world.service).tick())
    assert (record.status, record.reason) == (OutcomeStatus.FAILED, "nobody listens")
    turn(world, context("b"), "B")
    assert world.service.device.outcomes["prefetch", "Unreachable"] == 1
