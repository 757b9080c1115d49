"""Requests whose API tells no tokens: what the engine says when it is asked, and when it is believed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvpilot.context.engine_render import EngineRefusedError, EngineRenderError
from kvpilot.coordinator import asking
from kvpilot.domain import OutcomeStatus, PromptKnown, SessionState, SignalKind, Space, TokenArray
from kvpilot.gateway.edits import PLACEHOLDER
from tests.coordinator.messages_api import SYSTEM, Agent, Engine, settled
from tests.coordinator.world import Message, World, text_tokens, user, words


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "ASK_AFTER_S", 0.0)


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
