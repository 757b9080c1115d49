"""Requests whose API tells no tokens: what the engine says when it is asked, and when it is believed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from kvpilot.context.engine_render import EngineRefusedError, EngineRenderError
from kvpilot.coordinator import asking
from kvpilot.domain import (
    ActionKind,
    ActionRecord,
    Command,
    OutcomeStatus,
    PromptKnown,
    RequestFinished,
    SessionRef,
    SessionState,
    SignalKind,
    Space,
    Tier,
    TokenArray,
)
from kvpilot.gateway.edits import PLACEHOLDER
from kvpilot.sessions.book import MAX_THREADS
from tests.coordinator.world import Message, World, assistant, text_tokens, user, words

SYSTEM = words("rule", 12)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "ASK_AFTER_S", 0.0)


class Engine:
    """Renders a chat as the world's toy template does."""

    def __init__(self) -> None:
        self.free = asyncio.Event()
        self.free.set()
        self.broken = False
        self.asked = 0

    async def __call__(self, body: Any) -> TokenArray:
        self.asked += 1
        await self.free.wait()
        if self.broken:
            raise EngineRenderError("away")
        return self.tokens(body["messages"])

    @staticmethod
    def tokens(messages: list[Message]) -> TokenArray:
        return text_tokens([{"role": m["role"], "content": m.get("content") or "-"} for m in messages])


class Agent:
    """A client of Anthropic's API under one session id."""

    def __init__(self, world: World, session: str = "A") -> None:
        self.world = world
        self.session = session

    def start(self, messages: list[Message]) -> str:
        body = {"system": SYSTEM}
        return self.world.start(messages, self.session, path="/v1/messages", body=body)

    def finish(self, request_id: str, count: int, **more: Any) -> None:
        reply = more.pop("reply", {"role": "assistant", "content": "ok"})
        self.world.service.handle(
            RequestFinished(
                request_id,
                self.world.now,
                more.pop("status", 200),
                message=json.dumps(reply).encode(),
                prompt_token_count=count,
                **more,
            )
        )

    def context(self, messages: list[Message]) -> list[Message]:
        return [{"role": "system", "content": SYSTEM}, *messages]

    def count(self, messages: list[Message]) -> int:
        return len(text_tokens(self.context(messages)))

    def stored(self, messages: list[Message]) -> None:
        self.world.layer.store(Space("m"), text_tokens(self.context(messages)))

    def held(self) -> list[int]:
        """Tokens of each of the session's contexts."""
        session = self.world.service.book.get("default", self.session)
        assert session is not None
        references = self.world.service.references
        return [len(references.tokens(t.owner)) for t in session.threads.values() if t.owner in references]

    async def turn(self, messages: list[Message]) -> None:
        self.stored(messages)
        self.finish(self.start(messages), self.count(messages))
        await settled()


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0)
    raise TimeoutError


async def test_a_request_is_mapped_by_what_the_engine_renders() -> None:
    world = World(render=Engine())
    agent = Agent(world)
    messages = [user(words("a", 20))]
    await agent.turn(messages)
    assert agent.held() == [agent.count(messages)]
    assert world.service.mapper.stats.mapped == 1
    longer = [*messages, {"role": "assistant", "content": "ok"}, user("more")]
    await agent.turn(longer)
    assert agent.held() == [agent.count(longer)]


async def test_system_messages_in_the_middle_are_put_first_where_the_template_wants_that() -> None:
    class Strict(Engine):
        async def __call__(self, body: Any) -> TokenArray:
            if any(message["role"] == "system" for message in body["messages"][1:]):
                raise EngineRefusedError("400: the system message comes first")
            return await super().__call__(body)

    world = World(render=Strict())
    agent = Agent(world)
    messages = [user("hi"), {"role": "system", "content": " be brief"}, user("more")]
    first = [{"role": "system", "content": f"{SYSTEM} be brief"}, user("hi"), user("more")]
    agent.finish(agent.start(messages), len(text_tokens(first)))
    await settled()
    assert agent.held() == [len(text_tokens(first))]


async def test_what_has_another_length_than_the_engine_counted_is_not_believed() -> None:
    world = World(render=Engine())
    agent = Agent(world)
    messages = [user("hi")]
    agent.finish(agent.start(messages), agent.count(messages) + 1)
    await settled()
    assert (agent.held(), world.service.awaited.asker.outcomes) == ([], {"other length": 1})  # type: ignore[union-attr]
    assert not world.service.mapper.unmapped(Space("m"))


@pytest.mark.parametrize("broken", [True, False])
async def test_without_an_answer_or_a_reply_the_session_is_known_all_the_same(broken: bool) -> None:
    engine = Engine()
    engine.broken = broken
    world = World(render=engine)
    agent = Agent(world)
    request = agent.start([user("hi")])
    assert world.service.mapper.unmapped(Space("m"))
    agent.finish(request, 9 if broken else 0, status=200 if broken else 500)
    await settled()
    session = world.service.book.get("default", "A")
    assert session is not None
    assert (session.state, agent.held()) == (SessionState.WAITING_HUMAN, [])
    assert not world.service.mapper.unmapped(Space("m"))


async def test_an_answer_that_comes_late_does_not_undo_a_later_request() -> None:
    engine = Engine()
    world = World(render=engine)
    agent = Agent(world)
    first, second = [user("one")], [user("one"), {"role": "assistant", "content": "ok"}, user("two and more")]
    engine.free.clear()
    agent.finish(agent.start(first), agent.count(first))
    session = world.service.book.get("default", "A")
    assert session is not None and session.state is SessionState.WAITING_HUMAN
    request = agent.start(second)
    tokens = json.dumps(Engine.tokens(agent.context(second)).tolist()).encode()
    agent.finish(request, agent.count(second), prompt_ids=tokens)
    engine.free.set()
    await settled()
    assert agent.held() == [agent.count(second)]


@pytest.mark.parametrize("length", [1, 30])
async def test_a_reply_that_fills_chunks_is_held_too(length: int) -> None:
    engine = Engine()
    world = World(render=engine)
    agent = Agent(world)
    messages = [user("hi")]
    reply = {"role": "assistant", "content": words("said", length)}
    request = agent.start(messages)
    agent.finish(request, agent.count(messages), reply=reply, completion_token_count=length)
    await settled()
    await settled()
    # Of the reply all tokens but the last were computed; the toy template writes its role before it.
    whole = agent.count(messages) + (length - 1 if length > 1 else 0)
    assert agent.held() == [whole]
    longer = [*messages, reply, user("more")]
    await agent.turn(longer)
    assert agent.held() == [agent.count(longer)]


async def test_a_reply_that_renders_otherwise_is_not_held() -> None:
    class Stripping(Engine):
        async def __call__(self, body: Any) -> TokenArray:
            tokens = await super().__call__(body)
            return tokens if body.get("add_generation_prompt", True) else tokens[1:]

    world = World(render=Stripping())
    agent = Agent(world)
    messages = [user("hi")]
    reply = {"role": "assistant", "content": words("said", 30)}
    agent.finish(agent.start(messages), agent.count(messages), reply=reply, completion_token_count=30)
    await settled()
    await settled()
    assert agent.held() == [agent.count(messages)]


async def test_a_long_reply_is_mapped_while_it_runs() -> None:
    world = World(render=Engine())
    agent = Agent(world)
    messages = [user("hi")]
    request = agent.start(messages)
    await settled()
    assert agent.held() == []
    world.service.handle(PromptKnown(request, world.now, prompt_token_count=agent.count(messages)))
    await settled()
    assert agent.held() == [agent.count(messages)]


async def test_chat_completions_are_asked_for_only_when_the_engine_did_not_tell() -> None:
    engine = Engine()
    world = World(render=engine)
    agent = Agent(world)
    messages = [user("hi")]
    world.turn(messages, "A")
    await settled()
    assert engine.asked == 0
    longer = [*messages, {"role": "assistant", "content": "ok"}, user("more")]
    agent.finish(world.start(longer, "A"), len(text_tokens(longer)))
    await settled()
    assert (engine.asked, agent.held()) == (1, [len(text_tokens(longer))])


async def test_a_context_edit_releases_what_it_cleared_and_all_behind_it() -> None:
    """The gateway edits, the coordinator sees the edited conversation: the old suffix has no holder any more."""
    world = World(render=Engine())
    agent = Agent(world)

    def history(first: str) -> list[Message]:
        use = {"type": "tool_use", "id": "t0123456789abcdef", "name": "read", "input": {}}
        result = {"type": "tool_result", "tool_use_id": use["id"], "content": first}
        return [
            user("go"),
            {"role": "assistant", "content": [{"type": "text", "text": "look"}, use]},
            {"role": "user", "content": [result]},
            {"role": "assistant", "content": words("said", 12)},
            user("more"),
        ]

    def as_chat(messages: list[Message]) -> list[Message]:
        result = messages[2]["content"][0]["content"]
        said = {"role": "assistant", "content": "look"}
        return [messages[0], said, {"role": "tool", "content": result}, *messages[3:]]

    async def turn(messages: list[Message]) -> None:
        chat = as_chat(messages)
        agent.stored(chat)
        agent.finish(agent.start(messages), agent.count(chat))
        await settled()

    before, after = history(words("long", 40)), history(PLACEHOLDER)
    await turn(before)
    old = world.chunks(agent.context(as_chat(before)))
    await turn(after)
    (record,) = await world.settle(list(world.service.actions.newest()))
    new = world.chunks(agent.context(as_chat(after)))
    dead = [chunk for chunk in old if chunk not in new]
    assert len(dead) >= 10
    assert record.source == "supersession"
    assert not any(world.service.references.is_live(Space("m"), chunk) for chunk in dead)
    assert world.held(agent.context(as_chat(before))) == [chunk in new for chunk in old]
    assert all(world.held(agent.context(as_chat(after))))


async def say(world: World, how: str) -> list[ActionRecord]:
    match how:
        case "evict":
            return await world.service.command(Command(ActionKind.EVICT, "default", "", SessionRef("A")))
        case "demote":
            return await world.service.command(Command(ActionKind.DEMOTE, "default", "", SessionRef("A")))
    return world.signal("A", SignalKind(how))


@pytest.mark.parametrize("turns", [1, 2])
@pytest.mark.parametrize("rendered", [False, True])
@pytest.mark.parametrize("how", ["end", "evict"])
async def test_a_session_that_ends_while_its_tokens_are_asked_for_keeps_nothing(
    how: str, rendered: bool, turns: int
) -> None:
    engine = Engine()
    world = World(render=engine)
    agent = Agent(world)
    messages = [user(words("a", 20))]
    if turns == 2:
        await agent.turn(messages)
        messages = [*messages, assistant("ok"), user(words("b", 20))]
    agent.stored(messages)
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
    agent = Agent(world)
    messages = [user(words("a", 20))]
    if turns == 2:
        await agent.turn(messages)
        messages = [*messages, assistant("ok"), user(words("b", 20))]
    agent.stored(messages)
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


async def test_an_unforeseen_failure_to_render_is_no_answer() -> None:
    async def fail(body: Any) -> TokenArray:
        raise RecursionError("too deep")

    world = World(render=fail)
    agent = Agent(world)
    agent.finish(agent.start([user("hi")]), 9)
    await settled()
    assert not world.service.mapper.unmapped(Space("m"))
    (record,) = await world.settle(world.signal("A", SignalKind.END))
    assert record.status is OutcomeStatus.DONE


@pytest.mark.parametrize("refused", [False, True])
async def test_a_chat_is_never_taken_for_another_that_has_its_length(refused: bool) -> None:
    """Only vLLM's Messages API puts system messages first, and only where the template wants that."""
    asked: list[Any] = []

    async def fail(body: Any) -> TokenArray:
        asked.append(body)
        raise EngineRefusedError("400") if refused else EngineRenderError("no answer")

    world = World(render=fail)
    agent = Agent(world)
    messages = [user("hi"), {"role": "system", "content": "be brief"}, user("more")]
    agent.finish(world.start(messages, "A") if refused else agent.start(messages), 9)
    await settled()
    assert len(asked) == 1
    assert not world.service.mapper.unmapped(Space("m"))


async def test_nothing_is_asked_about_a_request_that_was_refused() -> None:
    engine = Engine()
    world = World(render=engine)
    agent = Agent(world)
    agent.finish(agent.start([user("hi")]), 0, status=400)
    await settled()
    assert engine.asked == 0
    engine.free.clear()
    agent.start([user("one")])
    agent.start([user("two")])
    refused = agent.start([user("three")])
    await settled()
    agent.finish(refused, 0, status=400)
    engine.free.set()
    await settled()
    assert engine.asked == asking.AT_ONCE
    assert world.service.awaited.asker is not None
    assert world.service.awaited.asker.outcomes["not counted"] == 2


async def test_what_was_answered_is_not_asked_again_at_the_end() -> None:
    engine = Engine()
    world = World(render=engine)
    agent = Agent(world)
    messages = [user("hi")]
    request, count = agent.start(messages), agent.count(messages) + 1
    world.service.handle(PromptKnown(request, world.now, prompt_token_count=count))
    await settled()
    agent.finish(request, count)
    await settled()
    assert engine.asked == 1
    assert not world.service.mapper.unmapped(Space("m"))
    (record,) = await world.settle(world.signal("A", SignalKind.END))
    assert record.status is OutcomeStatus.DONE
