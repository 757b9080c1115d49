"""The gateway in front of the real vLLM: same replies, real ids, cancelled for real."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import openai
import pytest

from kvpilot.stack.launch import Endpoints

pytestmark = pytest.mark.engine

VARIANTS: list[dict[str, Any]] = [
    {},
    {"stream": True},
    {"stream": True, "stream_options": {"include_usage": True}},
    {"stream": True, "stream_options": {"continuous_usage_stats": True}},
    {"return_token_ids": True},
    {"return_token_ids": True, "stream": True},
    {"n": 2},
    {"echo": True},
    {"echo": True, "stream": True},
    {"max_tokens": -1},
    {"model": "nobody"},
    {"max_tokens": 99_999_999},
]


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
        yield session


async def model_name(http: aiohttp.ClientSession, stack: Endpoints) -> str:
    async with http.get(f"{stack.gateway_url}/v1/models") as reply:
        return str((await reply.json())["data"][0]["id"])


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("extra", VARIANTS, ids=str)
async def test_replies_are_those_of_the_engine(
    stack: Endpoints, http: aiohttp.ClientSession, path: str, extra: dict[str, Any]
) -> None:
    text = "The gateway relays what the engine says."
    body: dict[str, Any] = {
        "model": await model_name(http, stack),
        "max_tokens": 5,
        "temperature": 0,
        "seed": 1,
    }
    body |= {"messages": [{"role": "user", "content": text}]} if "chat" in path else {"prompt": text}
    replies = []
    for base in (stack.engine_url, stack.gateway_url):
        async with http.post(base + path, json=body | extra) as reply:
            replies.append((reply.status, reply.content_type, without_names(await reply.text())))
    assert replies[0] == replies[1]


def without_names(text: str) -> str:
    """Without what differs from one request to the next: id, time, what is cached by now."""
    text = re.sub(r"(chatcmpl|cmpl)-[0-9a-f]+", "ID", text)
    return re.sub(r'"(created|cached_tokens|created_cache_tokens)":(\d+|null)', r'"\1":0', text)


async def test_the_openai_client(stack: Endpoints, http: aiohttp.ClientSession) -> None:
    name = await model_name(http, stack)
    async with openai.AsyncOpenAI(base_url=f"{stack.gateway_url}/v1", api_key="k", max_retries=0) as client:
        messages: Any = [{"role": "user", "content": f"Hello {uuid.uuid4()}"}]
        whole = await client.chat.completions.create(
            model=name, messages=messages, max_tokens=4, temperature=0
        )
        stream = await client.chat.completions.create(
            model=name, messages=messages, max_tokens=4, temperature=0, stream=True
        )
        streamed = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert streamed == whole.choices[0].message.content
        with pytest.raises(openai.NotFoundError, match="nobody"):
            await client.chat.completions.create(model="nobody", messages=messages)


async def test_chunk_hashes_are_lmcaches_own(stack: Endpoints, http: aiohttp.ClientSession) -> None:
    """The hashes a client gets are keys LMCache's directory knows."""
    body = {
        "model": await model_name(http, stack),
        "messages": [{"role": "user", "content": f"{uuid.uuid4()} " * 40}],
        "max_tokens": 2,
        "kv_transfer_params": {"chunk_hashes": True},
    }
    async with http.post(f"{stack.gateway_url}/v1/chat/completions", json=body) as reply:
        hashes = (await reply.json())["kv_transfer_params"]["chunk_hashes"]
    assert len(hashes) >= 2
    known: set[str] = set()
    async with asyncio.timeout(20):
        while not set(hashes) <= known:
            await asyncio.sleep(0.5)
            async with http.get(f"{stack.config.lmcache.coordinator}/directory/keys") as reply:
                known = set(re.findall(r"[0-9a-f]{64}", await reply.text()))


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_stops_the_engine(
    stack: Endpoints, http: aiohttp.ClientSession, stream: bool
) -> None:
    body = {
        "model": await model_name(http, stack),
        "messages": [{"role": "user", "content": f"Count {uuid.uuid4()}"}],
        "max_tokens": 4000,
        "ignore_eos": True,
        "stream": stream,
    }

    async def ask() -> None:
        async with http.post(f"{stack.gateway_url}/v1/chat/completions", json=body) as reply:
            await reply.read()

    before = await running(http, stack)
    request = asyncio.create_task(ask())
    async with asyncio.timeout(30):
        while await running(http, stack) <= before:  # noqa: ASYNC110 (it happens in another process)
            await asyncio.sleep(0.05)
    request.cancel()
    await asyncio.sleep(1)
    assert await running(http, stack) == before


async def running(http: aiohttp.ClientSession, stack: Endpoints) -> int:
    async with http.get(f"{stack.engine_url}/metrics") as reply:
        found = re.search(r"^vllm:num_requests_running\{[^}]*\} (\S+)", await reply.text(), re.M)
    assert found
    return int(float(found[1]))


async def test_a_management_request_never_reaches_the_engine(
    stack: Endpoints, http: aiohttp.ClientSession
) -> None:
    name = await model_name(http, stack)
    before = await finished(http, stack)
    async with openai.AsyncOpenAI(base_url=f"{stack.gateway_url}/v1", api_key="k", max_retries=0) as client:
        edits = [{"type": "offload", "target": "session"}]
        hint = {
            "session_id": f"s-{uuid.uuid4()}",
            "parent_session_id": "root",
            "context_management": {"manage_request": True, "edits": edits},
        }
        reply = await client.chat.completions.create(model=name, messages=[], extra_body={"agent_hint": hint})
    assert reply.choices[0].message.content == ""
    assert reply.model_extra
    assert len(reply.model_extra["kvpilot"]["actions"]) == 1
    assert await finished(http, stack) == before


async def finished(http: aiohttp.ClientSession, stack: Endpoints) -> float:
    async with http.get(f"{stack.engine_url}/metrics") as reply:
        return sum(
            map(float, re.findall(r"^vllm:request_success_total\{[^}]*\} (\S+)", await reply.text(), re.M))
        )
