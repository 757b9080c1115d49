"""What kvpilot relies on in the real LMCache behind a real vLLM.

``KVPILOT_TEST_LAYER`` (JSON with engine, lmcache, coordinator, kv_events: URLs) points the tests at a stack
that is up already instead of starting one.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
import numpy as np
import pytest
from blake3 import blake3

from kvpilot.backends.base import NotReady
from kvpilot.backends.lmcache import LMCacheBackend
from kvpilot.domain import Space, Tier, TokenArray
from kvpilot.ingest.directory import DirectoryPoller
from kvpilot.ingest.residency import Residency
from kvpilot.ingest.vllm_events import KvEventSubscriber

pytestmark = pytest.mark.engine

BOTH, DISK, NONE = frozenset({Tier.HOST, Tier.DISK}), frozenset({Tier.DISK}), frozenset[Tier]()
ALL_TIERS = {Tier.HOST, Tier.DISK}
_DIRECTORY_WITHIN_S = 20.0
"""Bound for "the directory shows it"; it takes 1 to 2 s on a machine that is not busy."""


@dataclass(frozen=True)
class Layer:
    engine: str
    lmcache: tuple[str, ...]
    coordinator: str
    kv_events: str


@dataclass(frozen=True)
class Context:
    """A prompt the engine has seen and LMCache was given to store."""

    space: Space
    tokens: TokenArray
    chunks: list[bytes]
    prompt: str


@pytest.fixture(scope="module")
def layer(request: pytest.FixtureRequest) -> Layer:
    given = os.environ.get("KVPILOT_TEST_LAYER")
    if given:
        urls = json.loads(given)
        return Layer(urls["engine"], (urls["lmcache"],), urls["coordinator"], urls["kv_events"])
    stack = request.getfixturevalue("stack")
    return Layer(stack.engine_url, stack.lmcache_urls, stack.lmcache_coordinator_url, stack.kv_events)


@pytest.fixture
async def backend(layer: Layer) -> AsyncIterator[LMCacheBackend]:
    made = LMCacheBackend(layer.lmcache, layer.coordinator)
    yield made
    await made.close()


def chunk_chain(tokens: TokenArray, size: int = 256) -> list[bytes]:
    """LMCache's chunk hashes, written down a second time: blake3(previous || big-endian tokens)."""
    previous = blake3(bytes(8) + bytes(4)).digest()
    chain = []
    for start in range(0, len(tokens) - size + 1, size):
        previous = blake3(previous + tokens[start : start + size].astype(">u4").tobytes()).digest()
        chain.append(previous)
    return chain


async def post(layer: Layer, body: dict[str, Any]) -> dict[str, Any]:
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session,
        session.post(f"{layer.engine}/v1/completions", json=body) as response,
    ):
        answer: dict[str, Any] = await response.json()
        assert response.status == 200, answer
        return answer


async def model_of(layer: Layer) -> dict[str, Any]:
    async with aiohttp.ClientSession() as session, session.get(f"{layer.engine}/v1/models") as response:
        model: dict[str, Any] = (await response.json())["data"][0]
        return model


async def serve(layer: Layer, prompt: str, salt: str = "") -> tuple[Context, int]:
    """Have the engine serve ``prompt``; returns its context and the cached tokens."""
    model = await model_of(layer)
    body = {"model": model["id"], "prompt": prompt, "max_tokens": 1, "return_token_ids": True}
    answer = await post(layer, body | ({"cache_salt": salt} if salt else {}))
    tokens = np.asarray(answer["choices"][0]["prompt_token_ids"], dtype=np.uint32)
    details = answer["usage"].get("prompt_tokens_details") or {}
    return Context(Space(model["root"], salt), tokens, chunk_chain(tokens), prompt), details.get(
        "cached_tokens"
    ) or 0


def new_prompt(words: int = 300) -> str:
    return f"{uuid.uuid4()} " + " ".join(f"w{random.randrange(10**4)}" for _ in range(words))


async def stored(layer: Layer, backend: LMCacheBackend, salt: str = "") -> Context:
    """A new context, once LMCache's directory shows all of it in both tiers."""
    context, _ = await serve(layer, new_prompt(), salt)
    assert len(context.chunks) >= 3
    await shown(backend, context, lambda tiers: all(t == BOTH for t in tiers))
    return context


async def shown(
    backend: LMCacheBackend, context: Context, condition: Callable[[list[frozenset[Tier]]], bool]
) -> list[frozenset[Tier]]:
    deadline = time.monotonic() + _DIRECTORY_WITHIN_S
    while True:
        tiers = await backend.locate(context.space, context.chunks)
        if condition(tiers):
            return tiers
        assert time.monotonic() < deadline, tiers
        await asyncio.sleep(0.1)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(_DIRECTORY_WITHIN_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_what_a_request_stored_is_located_under_our_hashes(
    layer: Layer, backend: LMCacheBackend
) -> None:
    capabilities = await backend.capabilities()
    assert capabilities.prefetch and capabilities.directory and capabilities.drop_tiers == ALL_TIERS
    context = await stored(layer, backend)
    listed = [row async for page in backend.list_keys() for row in page]
    assert {row.chunk for row in listed if row.space == context.space} >= set(context.chunks)
    strangers = [os.urandom(32) for _ in context.chunks]
    assert await backend.locate(context.space, strangers) == [NONE] * len(strangers)


async def test_a_salted_context_is_another_space(layer: Layer, backend: LMCacheBackend) -> None:
    context = await stored(layer, backend, salt="tenant-x")
    plain = Space(context.space.model)
    assert await backend.locate(plain, context.chunks) == [NONE] * len(context.chunks)


async def test_dropped_from_host_it_is_on_disk_and_a_prefetch_brings_it_back(
    layer: Layer, backend: LMCacheBackend
) -> None:
    context = await stored(layer, backend)
    result = await backend.drop(context.space, context.chunks, {Tier.HOST})
    assert (result.deleted, result.skipped, result.errors) == (len(context.chunks), 0, ())
    await shown(backend, context, lambda tiers: all(t == DISK for t in tiers))
    assert (await backend.drop(context.space, context.chunks, {Tier.HOST})).deleted == 0
    loaded = await backend.prefetch(context.space, context.tokens, timeout_s=10)
    assert loaded.complete and loaded.total == len(context.chunks)
    await shown(backend, context, lambda tiers: all(t == BOTH for t in tiers))
    again = await backend.prefetch(context.space, context.tokens, timeout_s=10)
    assert again.complete, "chunks that are there already count as found"


async def test_a_missing_chunk_is_a_hole_to_a_prefetch_not_its_end(
    layer: Layer, backend: LMCacheBackend
) -> None:
    context = await stored(layer, backend)
    await backend.drop(context.space, context.chunks[1:2], ALL_TIERS)
    await backend.drop(context.space, context.chunks, {Tier.HOST})
    loaded = await backend.prefetch(context.space, context.tokens, timeout_s=10)
    assert (loaded.found, loaded.total) == (len(context.chunks) - 1, len(context.chunks))
    await shown(backend, context, lambda tiers: tiers == [BOTH, NONE] + [BOTH] * (len(tiers) - 2))


async def test_dropped_from_everywhere_it_is_gone_and_stays_gone(
    layer: Layer, backend: LMCacheBackend
) -> None:
    context, other = await stored(layer, backend), await stored(layer, backend)
    await backend.drop(context.space, context.chunks, ALL_TIERS)
    await shown(backend, context, lambda tiers: all(t == NONE for t in tiers))
    await asyncio.sleep(3)
    assert await backend.locate(context.space, context.chunks) == [NONE] * len(context.chunks)
    assert (await backend.prefetch(context.space, context.tokens, timeout_s=10)).found == 0
    assert await backend.locate(other.space, other.chunks) == [BOTH] * len(other.chunks)


async def test_a_store_under_way_may_bring_chunks_back_and_a_second_drop_ends_that(
    layer: Layer, backend: LMCacheBackend
) -> None:
    context, _ = await serve(layer, new_prompt())
    deadline = time.monotonic() + 15
    quiet_since = time.monotonic()
    while time.monotonic() - quiet_since < 4:
        assert time.monotonic() < deadline + 15
        result = await backend.drop(context.space, context.chunks, ALL_TIERS)
        left = await backend.locate(context.space, context.chunks)
        if result.skipped or any(left):
            quiet_since = time.monotonic()
        await asyncio.sleep(0.5)
    assert (await backend.prefetch(context.space, context.tokens, timeout_s=10)).found == 0


async def test_usage_and_the_directorys_account_agree(layer: Layer, backend: LMCacheBackend) -> None:
    """As differences: other tests may have restarted parts of the stack, after which totals differ for good."""

    async def held_and_listed() -> dict[Tier, tuple[int, int]]:
        usage = await backend.usage()
        assert all(entry.used_bytes <= entry.capacity_bytes for entry in usage)
        listed = (await backend.directory_stats()).bytes
        return {entry.tier: (entry.used_bytes, listed[entry.tier]) for entry in usage}

    await asyncio.sleep(2)
    before = await held_and_listed()
    await stored(layer, backend)

    async def agree() -> bool:
        after = await held_and_listed()
        grown = {tier: (after[tier][0] - before[tier][0], after[tier][1] - before[tier][1]) for tier in after}
        return set(grown) == ALL_TIERS and all(held == listed > 0 for held, listed in grown.values())

    async with asyncio.timeout(_DIRECTORY_WITHIN_S):
        while not await agree():  # noqa: ASYNC110
            await asyncio.sleep(0.3)


async def test_an_unknown_model_is_not_ready(backend: LMCacheBackend) -> None:
    with pytest.raises(NotReady, match="layout"):
        await backend.prefetch(Space("/no/such/model"), np.zeros(512, np.uint32), timeout_s=5)


async def test_events_and_directory_tell_the_same(layer: Layer, backend: LMCacheBackend) -> None:
    view, by_events = Residency(), Residency()
    poller = DirectoryPoller(backend, view, 0.2)
    subscriber = KvEventSubscriber(layer.kv_events, by_events)
    await poller.start()
    await subscriber.start()
    try:
        await until(lambda: subscriber.stats.connected)
        await asyncio.sleep(0.2)
        context = await stored(layer, backend)
        by_events.learn(context.space, context.chunks)
        again, cached = await serve(layer, context.prompt)
        assert by_events.device_prefix(context.space, context.tokens) >= len(context.tokens) - 128
        assert cached > 0 and again.chunks == context.chunks
        assert by_events.device_prefix(Space(context.space.model, "other"), context.tokens) == 0

        poller.nudge()
        count = len(context.chunks)
        await until(lambda: view.count(context.space, context.chunks) == dict.fromkeys(ALL_TIERS, count))
        await backend.drop(context.space, context.chunks, {Tier.HOST})
        poller.nudge()
        await until(lambda: view.count(context.space, context.chunks) == {Tier.DISK: count})
        await backend.prefetch(context.space, context.tokens, timeout_s=10)
        # The engine forwards LMCache's news with its next step, so a request has to come by.
        async with asyncio.timeout(_DIRECTORY_WITHIN_S):
            while by_events.count(context.space, context.chunks) != {Tier.HOST: count}:
                await serve(layer, "one more")
                await asyncio.sleep(0.3)
        assert (subscriber.stats.malformed, subscriber.stats.gaps) == (0, 0)
    finally:
        await subscriber.close()
        await poller.close()
