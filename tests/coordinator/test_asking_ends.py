"""Sessions that end, are suspended or forgotten while their tokens are still asked for."""

from __future__ import annotations

import pytest

from kvpilot.coordinator import asking
from kvpilot.domain import (
    ActionKind,
    ActionRecord,
    Command,
    OutcomeStatus,
    SessionRef,
    SessionState,
    SignalKind,
    Space,
    Tier,
)
from kvpilot.sessions.book import MAX_THREADS
from tests.coordinator.messages_api import Agent, Engine, settled, until
from tests.coordinator.world import Message, World, assistant, text_tokens, user, words


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "ASK_AFTER_S", 0.0)


async def say(world: World, how: str) -> list[ActionRecord]:
    match how:
        case "evict":
            return await world.service.command(Command(ActionKind.EVICT, "default", "", SessionRef("A")))
        case "demote":
            return await world.service.command(Command(ActionKind.DEMOTE, "default", "", SessionRef("A")))
    return world.signal("A", SignalKind(how))


async def in_turn(world: World, turns: int) -> tuple[Agent, list[Message]]:
    """An agent whose first or second request is next, with the messages of it; their KV is stored."""
    agent = Agent(world)
    messages: list[Message] = [user(words("a", 20))]
    if turns == 2:
        await agent.turn(messages)
        messages = [*messages, assistant("ok"), user(words("b", 20))]
    agent.stored(messages)
    return agent, messages


@pytest.mark.parametrize("turns", [1, 2])
@pytest.mark.parametrize("rendered", [False, True])
@pytest.mark.parametrize("how", ["end", "evict"])
async def test_a_session_that_ends_while_its_tokens_are_asked_for_keeps_nothing(
    how: str, rendered: bool, turns: int
) -> None:
    engine = Engine()
    world = World(render=engine)
    agent, messages = await in_turn(world, turns)
    if not rendered:
        engine.free.clear()
    request = agent.start(messages)
    await settled()
    agent.finish(request, agent.count(messages))
    (record,) = await say(world, how)
    assert record.status is OutcomeStatus.DEFERRED
    engine.free.set()
    (record,) = await world.settle([record])
    assert (record.status, agent.held()) == (OutcomeStatus.DONE, [])
    assert not any(world.held(agent.context(messages)))


async def test_a_session_that_ends_in_its_first_request_keeps_nothing() -> None:
    world = World()
    messages = [user(words("a", 20))]
    request = world.start(messages, "A")
    (record,) = world.signal("A", SignalKind.END)
    world.finish(request, messages)
    await world.settle([record])
    assert not any(world.held(messages))
    assert world.service.references.owners() == []


async def test_a_session_that_ends_while_its_reply_is_asked_for_keeps_nothing_of_it() -> None:
    engine = Engine()
    world = World(render=engine)
    agent = Agent(world)
    messages, reply = [user("hi")], assistant(words("said", 30))
    agent.stored([*messages, reply])
    request = agent.start(messages)
    agent.finish(request, agent.count(messages), reply=reply, completion_token_count=30)
    await until(lambda: engine.asked == 2)
    await world.settle(world.signal("A", SignalKind.END))
    await settled()
    # The toy template writes the reply's role before its first token: of what is held its chunks are all but the last.
    assert sum(world.held(agent.context([*messages, reply]))) <= 1
    assert agent.held() == []


async def test_what_ends_in_passive_mode_while_its_tokens_are_asked_for_holds_nothing() -> None:
    engine = Engine()
    world = World(mode="passive", render=engine)
    agent = Agent(world)
    messages = [user(words("a", 20))]
    engine.free.clear()
    agent.finish(agent.start(messages), agent.count(messages))
    world.signal("A", SignalKind.END)
    engine.free.set()
    await settled()
    assert world.service.mapper.stats.mapped == 1
    assert agent.held() == []


@pytest.mark.parametrize("turns", [1, 2])
@pytest.mark.parametrize("how", ["suspend", "demote"])
async def test_a_session_suspended_while_its_tokens_are_asked_for_is_demoted_as_it_is_then(
    how: str, turns: int
) -> None:
    engine = Engine()
    world = World(render=engine)
    agent, messages = await in_turn(world, turns)
    engine.free.clear()
    agent.finish(agent.start(messages), agent.count(messages))
    (record,) = await say(world, how)
    assert record.status is OutcomeStatus.DEFERRED
    engine.free.set()
    (record,) = await world.settle([record])
    chunks = world.chunks(agent.context(messages))
    assert (record.status, record.planned, record.confirmed) == (
        OutcomeStatus.DONE,
        len(chunks),
        len(chunks),
    )
    assert all(world.layer.tiers(Space("m"), chunk) == {Tier.DISK} for chunk in chunks)
    session = world.service.book.get("default", "A")
    assert session is not None and session.state is SessionState.SUSPENDED


@pytest.mark.parametrize("resumed", [False, True])
async def test_a_session_that_goes_on_is_not_demoted_by_an_older_signal(resumed: bool) -> None:
    world = World()
    messages = [user(words("a", 20))]
    request = world.start(messages, "A")
    (record,) = world.signal("A", SignalKind.SUSPEND)
    if resumed:
        world.signal("A", SignalKind.RESUME)
        world.finish(request, messages)
    else:
        again = world.start(messages, "A")
        world.finish(request, messages)
        world.finish(again, messages)
    (record,) = await world.settle([record])
    assert record.status is OutcomeStatus.REJECTED
    assert all(world.layer.tiers(Space("m"), c) == {Tier.HOST, Tier.DISK} for c in world.chunks(messages))


async def test_conversations_beyond_the_bound_hold_nothing_when_their_tokens_come_late() -> None:
    engine = Engine()
    world = World(render=engine)
    agent = Agent(world)
    engine.free.clear()
    for number in range(MAX_THREADS + 10):
        world.now += 1
        messages = [user(words(f"q{number}x", 8))]
        system = words(f"s{number}x", 6)
        request = world.start(messages, "A", path="/v1/messages", body={"system": system})
        agent.finish(request, len(text_tokens([{"role": "system", "content": system}, *messages])))
    engine.free.set()
    await until(lambda: world.service.mapper.stats.mapped == MAX_THREADS + 10)
    await settled()
    assert len(world.service.references.owners()) == MAX_THREADS + 10, (
        "nothing is forgotten before it is known"
    )
    await agent.turn([user("one more")])
    references, session = world.service.references, world.service.book.get("default", "A")
    assert session is not None
    assert set(references.owners()) == set(session.threads)
    assert len(session.threads) == MAX_THREADS
    world.service.forget(session)
    assert references.owners() == []


async def test_a_session_forgotten_while_its_tokens_are_asked_for_stays_forgotten() -> None:
    engine = Engine()
    world = World(render=engine)
    agent = Agent(world)
    messages = [user(words("a", 20))]
    agent.stored(messages)
    engine.free.clear()
    agent.finish(agent.start(messages), agent.count(messages))
    session = world.service.book.get("default", "A")
    assert session is not None
    world.service.forget(session)
    told: list[str] = []
    world.service.on_session = lambda session: told.append(session.id)
    world.start([user("something else")], "A", path="/v1/messages")
    told.clear()
    engine.free.set()
    await settled()
    await world.settle(list(world.service.actions.newest()))
    assert (world.service.references.owners(), told) == ([], [])
    assert not any(world.held(agent.context(messages)))
