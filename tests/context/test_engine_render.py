"""Segments for models whose files are not at hand: asked from the engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from aiohttp import ClientSession, web

from kvpilot.context.chunks import ChunkHasher
from kvpilot.context.engine_render import EngineRefusedError, EngineRenderer, EngineRenderError
from kvpilot.context.segments import PreviousMap, Segmenter, spans_of_messages, spans_of_tools
from kvpilot.domain import TokenArray
from kvpilot.stack.launch import Endpoints

from .models import QWEN, SMOLLM, Model, model
from .test_segments import AGENT

CALL_TEXT = '<tool_call>\n{"name": "ls", "arguments": {"path": "."}}\n</tool_call>'
"""A call as the stack's template writes it (``tests/chat_template.jinja``)."""


class FakeEngine:
    """vLLM's ``/tokenize`` for one of the test models."""

    def __init__(self, chat: Model) -> None:
        self.chat = chat
        self.delay_s = 0.0
        self.asked = 0
        self.status = 200
        self.url = ""

    async def tokenize(self, request: web.Request) -> web.Response:
        self.asked += 1
        await asyncio.sleep(self.delay_s)
        body = await request.json()
        text = self.chat.text(body, generation=body["add_generation_prompt"])
        return web.json_response({"tokens": self.chat.encode(text).tolist()}, status=self.status)


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    fake = FakeEngine(model(QWEN))
    app = web.Application()
    app.router.add_post("/tokenize", fake.tokenize)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    fake.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield fake
    await runner.cleanup()


@pytest.fixture
async def renderer(engine: FakeEngine) -> AsyncIterator[EngineRenderer]:
    asking = EngineRenderer(engine.url, "m", budget_s=1.0)
    yield asking
    await asking.close()


async def test_the_engine_tells_where_messages_end(engine: FakeEngine, renderer: EngineRenderer) -> None:
    qwen = engine.chat
    tokens = qwen.prompt(AGENT)
    asked = await Segmenter(None, None, renderer).segment(AGENT, tokens)
    exact = await qwen.segmenter().segment(AGENT, tokens)
    assert asked.method == "engine"
    # A result that is not the last of its turn ends where the renderings part.
    assert asked.message_ends == exact.message_ends
    assert asked.tools_span == exact.tools_span
    kinds = [(s.kind.value, s.message, s.name) for s in asked.segments]
    assert kinds[:3] == [("system", 0, None), ("tools", -1, None), ("system", 0, None)]
    assert kinds[-2:] == [("tool_result", 4, "read_file"), ("template", -1, None)]


async def test_an_engine_with_a_template_of_its_own_is_asked_before_texts_are_searched(
    engine: FakeEngine, renderer: EngineRenderer
) -> None:
    qwen = engine.chat
    tokens = qwen.prompt(AGENT)
    other = Segmenter(model(SMOLLM).template, qwen.vocabulary, renderer)
    asked = await other.segment(AGENT, tokens)
    exact = await qwen.segmenter().segment(AGENT, tokens)
    assert (asked.method, asked.first_message) == ("engine", exact.first_message)
    kinds = [(s.kind.value, s.message) for s in asked.segments]
    assert kinds.count(("tool_call", 2)) == 2 and ("thinking", 2) in kinds
    for start, end in ((0, 1), (1, 2), (1, 3), (2, 5)):
        assert spans_of_messages(asked, start, end) == spans_of_messages(exact, start, end)
    assert asked.tools_span == exact.tools_span
    assert spans_of_tools(asked, 1, 2) == spans_of_tools(exact, 1, 2)
    blind = await Segmenter(None, None, renderer).segment(AGENT, tokens)
    assert (spans_of_tools(blind, 0, 1), spans_of_tools(blind, 1, 2)) == (exact.tools_span, None)
    longer = {**AGENT, "messages": [*AGENT["messages"], {"role": "user", "content": "Go on, please."}]}
    more = qwen.prompt(longer)
    kept = await other.segment(longer, more, previous=PreviousMap(asked, tokens, 5))
    # Now the old thought is gone, which only the engine's template knows: the text tells where this one begins.
    assert qwen.read(more, *spans_of_messages(kept, 5, 6)) == "Go on, please.<|im_end|>\n"  # type: ignore[misc]
    engine.status = 503
    assert (await other.segment(AGENT, tokens)).method == "search"


async def test_the_engine_tells_where_a_first_user_message_begins(
    engine: FakeEngine, renderer: EngineRenderer
) -> None:
    engine.chat = model(SMOLLM)
    body = {"messages": [{"role": "user", "content": "Hello."}]}
    tokens = engine.chat.prompt(body)
    asked = await Segmenter(None, None, renderer).segment(body, tokens)
    said = engine.chat.read(tokens, *spans_of_messages(asked, 0, 1))  # type: ignore[misc]
    assert said == "Hello.<|im_end|>\n"


async def test_only_new_messages_are_asked_for(engine: FakeEngine, renderer: EngineRenderer) -> None:
    segmenter = Segmenter(None, None, renderer)
    body = {"messages": [{"role": "user", "content": f"m{n}"} for n in range(6)]}
    tokens = engine.chat.prompt(body)
    first = await segmenter.segment(body, tokens)
    engine.asked = 0
    longer = {"messages": [*body["messages"], {"role": "user", "content": "more"}]}
    more = engine.chat.prompt(longer)
    second = await segmenter.segment(longer, more, previous=PreviousMap(first, tokens, 6))
    assert engine.asked == 2
    assert second.message_ends[:6] == first.message_ends


async def test_a_slow_or_absent_engine_costs_exactness_only(
    engine: FakeEngine, renderer: EngineRenderer
) -> None:
    body = {"messages": [{"role": "user", "content": "x"}] * 8}
    tokens = engine.chat.prompt(body)
    engine.delay_s = 0.25
    late = await Segmenter(None, None, renderer).segment(body, tokens)
    assert late.method == "engine" and late.reason
    assert late.message_ends == sorted(late.message_ends) and len(late.message_ends) == 8
    assert (late.segments[0].start, late.segments[-1].end) == (0, len(tokens))
    engine.delay_s = 1.5
    silent = await Segmenter(None, None, renderer).segment(body, tokens)
    assert (silent.method, len(silent.segments)) == ("none", 1) and "no answer" in str(silent.reason)
    gone = EngineRenderer("http://127.0.0.1:9", "m")
    absent = await Segmenter(None, None, gone).segment(body, tokens)
    await gone.close()
    assert absent.method == "none" and absent.reason


async def test_a_prompt_the_engine_renders_otherwise_is_not_guessed_at(
    engine: FakeEngine, renderer: EngineRenderer
) -> None:
    body = {"messages": [{"role": "user", "content": "x"}]}
    other = await Segmenter(None, None, renderer).segment(body, engine.chat.encode("y"))
    assert (other.method, other.reason) == ("none", "the engine's /tokenize renders another prompt")


# ---------------------------------------------------------------- the real engine


async def complete(
    session: ClientSession, url: str, body: dict[str, Any]
) -> tuple[TokenArray, dict[str, Any]]:
    """The engine's prompt tokens and reply choice."""
    async with session.post(f"{url}/v1/chat/completions", json=body | {"return_token_ids": True}) as response:
        response.raise_for_status()
        answer = await response.json()
    return np.array(answer["prompt_token_ids"], dtype=np.uint32), answer["choices"][0]


def conversation(words: int) -> list[dict[str, Any]]:
    made = {"id": "c", "type": "function", "function": {"name": "ls", "arguments": '{"path": "."}'}}
    return [
        {"role": "user", "content": "Spans of real prompts, é 你好 🙂. " + "word by word " * words},
        {"role": "assistant", "content": "Looking.", "tool_calls": [made]},
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": t} for t in ("a", "b")]},
        {"role": "user", "content": "Go on."},
    ]


@pytest.mark.engine
async def test_spans_and_chunks_are_those_of_the_real_engine(stack: Endpoints) -> None:
    """Template, /tokenize and prompt agree token by token; LMCache's directory knows our chunk hashes."""
    folder = stack.config.engine.model
    served = stack.config.engine.served_model_name or folder.rsplit("/", 1)[-1]
    asking = EngineRenderer(stack.engine_url, served, budget_s=20)
    messages = conversation(words=200)
    async with ClientSession() as session:
        body = {"model": served, "messages": messages, "max_tokens": 3, "temperature": 0}
        tokens, choice = await complete(session, stack.engine_url, body)
        segmenter = Segmenter.for_model(folder)
        prompt = await segmenter.segment(body, tokens)
        assert (prompt.method, prompt.reason) == ("template", None)
        asked = await Segmenter(None, None, asking).segment(body, tokens)
        await asking.close()
        assert asked.message_ends == prompt.message_ends
        for number, role, text in (
            (1, "assistant", f"Looking.{CALL_TEXT}"),
            (2, "tool", "a\nb"),
            (3, "user", "Go on."),
        ):
            start, end = spans_of_messages(prompt, number, number + 1) or (0, 0)
            async with session.post(
                f"{stack.engine_url}/detokenize", json={"model": served, "tokens": tokens[start:end].tolist()}
            ) as response:
                said = (await response.json())["prompt"]
            assert said == f"<|im_start|>{role}\n{text}<|im_end|>\n"
        output = np.array(choice["token_ids"], dtype=np.uint32)
        reply = segmenter.reply(prompt, choice["message"], output)
        assert (reply[0].start, reply[-1].end) == (len(tokens), len(tokens) + len(output))

        chunks = [chunk.hex() for chunk in ChunkHasher().hashes(tokens)]
        assert len(chunks) >= 2
        key = {"model_name": folder, "world_size": 1, "token_ids": tokens.tolist()}
        for _ in range(40):  # stores and the directory are asynchronous
            async with session.post(
                f"{stack.lmcache_coordinator_url}/directory/lookup", json=key
            ) as response:
                results = (await response.json())["results"]
            if results and all(entry["placements"] for entry in results):
                break
            await asyncio.sleep(0.5)
        assert [entry["key"]["chunk_hash_hex"] for entry in results] == chunks
        assert all(entry["placements"] for entry in results)


async def test_the_engine_tells_a_chats_tokens(engine: FakeEngine, renderer: EngineRenderer) -> None:
    assert np.array_equal(await renderer.prompt(AGENT), engine.chat.prompt(AGENT))
    for gone in (EngineRenderer("http://127.0.0.1:9", "m"), EngineRenderer(f"{engine.url}/no", "m")):
        with pytest.raises(EngineRenderError):
            await gone.prompt(AGENT)
        await gone.close()


@pytest.mark.parametrize(("status", "error"), [(400, EngineRefusedError), (503, EngineRenderError)])
async def test_a_refusal_is_told_from_an_engine_that_is_away(
    engine: FakeEngine, renderer: EngineRenderer, status: int, error: type[EngineRenderError]
) -> None:
    engine.status = status
    with pytest.raises(EngineRenderError) as caught:
        await renderer.prompt(AGENT)
    assert caught.type is error
