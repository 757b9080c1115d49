"""A cache layer that hangs, fails or talks nonsense costs bounded time and a typed error, never more."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import numpy as np
import pytest

from kvpilot.backends.base import (
    Backend,
    BackendError,
    BadAnswer,
    NotReady,
    Refused,
    TimedOut,
    Unreachable,
)
from kvpilot.backends.lmcache import LMCacheBackend
from kvpilot.domain import Space, Tier
from tests.backends.misbehaving import Misbehaving, misbehaving

SPACE, CHUNKS = Space("m"), [bytes([i]) * 32 for i in range(3)]
TOKENS = np.arange(768, dtype=np.uint32)
TIMEOUT_S = 0.4

STATUS = {
    "chunk_size": 256,
    "hash_algorithm": "blake3",
    "storage_manager": {"l1_usage": [10, 100], "l2_eviction_controller": {"adapters": [
        {"total_bytes_used": 5, "total_capacity_bytes": 50}]}},
    "kv_events": {"incarnation": 1_700_000_000_000_000_000},
}  # fmt: skip


def listed(chunk: bytes, *tiers: str, incarnation: int = 1_700_000_000, rank: int = 0x1000100) -> dict:
    return {
        "key": {"chunk_hash_hex": chunk.hex(), "model_name": "m", "kv_rank": rank, "cache_salt": ""},
        "placements": [
            {"instance_id": "a", "incarnation": incarnation, "tier": tier, "backend": "x", "size_bytes": 1}
            for tier in tiers
        ],
    }


def well_behaved(server: Misbehaving) -> None:
    rows = [listed(chunk, "l1", "l2") for chunk in CHUNKS]
    server.answers = {
        "/status": STATUS,
        "/config": {"mp": {"instance_id": "a"}, "storage_manager": {"l2_adapter_config": {"adapters": [{}]}}},
        "/config/adapters": {"adapters": [{"type_name": "fs"}]},
        "/directory/lookup": {"chunks": 3, "results": rows},
        "/directory/keys": {"total": 3, "keys": rows},
        "/directory/stats": dict.fromkeys(
            ("num_keys", "num_placements", "l1_count", "l1_size_bytes", "l2_count", "l2_size_bytes"), 3
        ),
        "/cache/objects": {"deleted": 3, "skipped": 0, "ok": True},
        "/cache/prefetches": {"request_id": "r", "chunks": 3, "status": "submitted"},
        "/cache/prefetches/r": {"status": "completed", "found_keys": 3, "total_keys": 3},
    }


@pytest.fixture
async def server() -> AsyncIterator[Misbehaving]:
    async with misbehaving() as made:
        well_behaved(made)
        yield made


@pytest.fixture
async def backend(server: Misbehaving) -> AsyncIterator[LMCacheBackend]:
    made = LMCacheBackend([server.url], server.url, timeout_s=TIMEOUT_S)
    await made.start()
    yield made
    await made.close()


async def everything(backend: Backend) -> None:
    async for _ in backend.list_keys():
        pass


CALLS: dict[str, Callable[[Backend], Awaitable[object]]] = {
    "usage": lambda b: b.usage(),
    "capabilities": lambda b: b.capabilities(),
    "stats": lambda b: b.directory_stats(),
    "list": everything,
    "locate": lambda b: b.locate(SPACE, CHUNKS),
    "drop": lambda b: b.drop(SPACE, CHUNKS, {Tier.HOST, Tier.DISK}),
    "prefetch": lambda b: b.prefetch(SPACE, TOKENS, timeout_s=1.0),
}
ERRORS = {
    "hang": TimedOut,
    "slow": TimedOut,
    "500": Refused,
    "redirect": Refused,
    "html": BadAnswer,
    "garbage": BadAnswer,
    "wrong": BadAnswer,
    "huge": (BadAnswer, TimedOut),
    "truncated": Unreachable,
    "reset": Unreachable,
}


@pytest.mark.parametrize("call", CALLS)
async def test_all_is_well_with_a_layer_that_behaves(backend: LMCacheBackend, call: str) -> None:
    await CALLS[call](backend)


@pytest.mark.parametrize("fault", ERRORS)
@pytest.mark.parametrize("call", CALLS)
async def test_every_fault_is_a_typed_error_in_bounded_time(
    server: Misbehaving, backend: LMCacheBackend, call: str, fault: str
) -> None:
    server.fault = fault
    started = time.monotonic()
    with pytest.raises(BackendError) as caught:
        await CALLS[call](backend)
    assert time.monotonic() - started < 2.0
    assert isinstance(caught.value, ERRORS[fault]), caught.value
    assert "\n" not in str(caught.value)


async def test_nobody_there_is_unreachable() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    backend = LMCacheBackend([url], "", timeout_s=TIMEOUT_S)
    with pytest.raises(Unreachable):
        await backend.usage()
    with pytest.raises(Unreachable, match="coordinator"):
        await backend.locate(SPACE, CHUNKS)
    await backend.close()


async def test_a_hanging_layer_is_left_alone_and_found_again(
    server: Misbehaving, backend: LMCacheBackend
) -> None:
    server.fault = "hang"
    for _ in range(3):
        with pytest.raises(TimedOut):
            await backend.usage()
    asked = len(server.requests)
    started = time.monotonic()
    for _ in range(100):
        with pytest.raises(Unreachable):
            await backend.usage()
    assert time.monotonic() - started < 0.5
    assert len(server.requests) == asked, "the breaker keeps callers away"
    server.fault = ""
    await asyncio.sleep(1.1)
    await backend.usage()


async def test_a_flood_of_callers_stays_a_few_connections(
    server: Misbehaving, backend: LMCacheBackend
) -> None:
    server.fault = "hang"
    started = time.monotonic()
    results = await asyncio.gather(*(backend.usage() for _ in range(500)), return_exceptions=True)
    assert time.monotonic() - started < 3.0
    assert all(isinstance(result, BackendError) for result in results)
    # At most 8 at once from here; the server notices closed ones a little later.
    assert server.most_open <= 16


async def test_a_cancelled_probe_does_not_keep_the_breaker_shut(
    server: Misbehaving, backend: LMCacheBackend
) -> None:
    server.fault = "hang"
    for _ in range(3):
        with pytest.raises(TimedOut):
            await backend.usage()
    await asyncio.sleep(1.1)
    probe = asyncio.create_task(backend.usage())
    await asyncio.sleep(0.05)
    probe.cancel()
    await asyncio.gather(probe, return_exceptions=True)
    server.fault = ""
    await backend.usage()


async def test_a_restarted_layer_is_used_again_without_a_failed_call(
    server: Misbehaving, backend: LMCacheBackend
) -> None:
    await backend.usage()
    port = int(server.url.rsplit(":", 1)[1])
    await server.stop()
    again = Misbehaving()
    await again.start(port)
    well_behaved(again)
    try:
        result = await backend.drop(SPACE, CHUNKS, {Tier.HOST})
        assert (result.deleted, result.errors) == (3, ())
    finally:
        await again.stop()


async def test_drops_go_out_last_chunk_first_for_every_rank(server: Misbehaving) -> None:
    backend = LMCacheBackend([server.url], server.url, world_size=2, timeout_s=TIMEOUT_S)
    await backend.drop(SPACE, CHUNKS, {Tier.HOST}, force=True)
    (body,) = [body for method, _, body in server.requests if method == "DELETE"]
    assert [(key["chunk_hash_hex"][:2], key["kv_rank"]) for key in body["keys"]] == [
        (f"0{chunk}", rank) for chunk in (2, 1, 0) for rank in (0x2000200, 0x2010201)
    ]
    assert (body["tier"], body["force"]) == ("l1", True)
    await backend.close()


async def test_a_chunk_is_where_all_its_ranks_are(server: Misbehaving) -> None:
    first, second = 0x2000200, 0x2010201
    server.answers["/directory/lookup"] = {"chunks": 4, "results": [
        listed(CHUNKS[0], "l1", "l2", rank=first), listed(CHUNKS[0], "l2", rank=second),
        listed(CHUNKS[1], "l1", rank=first), listed(CHUNKS[1], "l1", rank=second),
    ]}  # fmt: skip
    server.answers["/directory/keys"] = {"total": 3, "keys": [
        listed(CHUNKS[0], "l1", rank=first), listed(CHUNKS[1], "l1", rank=first),
        listed(CHUNKS[0], "l1", rank=second), listed(CHUNKS[2], "l1"),
    ]}  # fmt: skip
    backend = LMCacheBackend([server.url], server.url, world_size=2, timeout_s=TIMEOUT_S)
    assert await backend.locate(SPACE, CHUNKS[:2]) == [{Tier.DISK}, {Tier.HOST}]
    pages = [page async for page in backend.list_keys()]
    assert [(p.chunk, p.tiers) for page in pages for p in page] == [(CHUNKS[0], {Tier.HOST})]
    await backend.close()


async def test_what_a_restarted_node_deleted_silently_is_not_shown_again(
    server: Misbehaving, backend: LMCacheBackend
) -> None:
    """The directory keeps listing disk copies of an earlier life of the node after they were deleted."""
    old = [listed(chunk, "l2", incarnation=1_600_000_000) for chunk in CHUNKS]
    server.answers["/directory/lookup"] = {"chunks": 3, "results": old}
    assert await backend.locate(SPACE, CHUNKS) == [{Tier.DISK}] * 3
    await backend.drop(SPACE, CHUNKS, {Tier.DISK})
    assert await backend.locate(SPACE, CHUNKS) == [frozenset()] * 3
    old[1] = listed(CHUNKS[1], "l2")  # stored again by the node's present life
    assert await backend.locate(SPACE, CHUNKS) == [frozenset(), {Tier.DISK}, frozenset()]


async def test_the_outcome_of_a_prefetch_is_waited_for(server: Misbehaving, backend: LMCacheBackend) -> None:
    states = [{"status": "pending"}] * 5 + [{"status": "completed", "found_keys": 2, "total_keys": 3}]
    server.answers["/cache/prefetches/r"] = lambda: states.pop(0) if len(states) > 1 else states[0]
    result = await backend.prefetch(SPACE, TOKENS, timeout_s=5.0)
    assert (result.found, result.total, result.complete) == (2, 3, False)
    server.answers["/cache/prefetches/r"] = {"status": "pending"}
    with pytest.raises(TimedOut, match="still running"):
        await backend.prefetch(SPACE, TOKENS, timeout_s=0.2)
    del server.answers["/cache/prefetches/r"]
    with pytest.raises(BadAnswer, match="lost"):
        await backend.prefetch(SPACE, TOKENS, timeout_s=1.0)
    assert (await backend.prefetch(SPACE, TOKENS[:100], timeout_s=1.0)).total == 0


async def test_one_of_two_nodes_failing_is_told_in_the_result(server: Misbehaving) -> None:
    async with misbehaving() as broken:
        broken.fault = "html"
        backend = LMCacheBackend([broken.url, server.url], server.url, timeout_s=TIMEOUT_S)
        result = await backend.drop(SPACE, CHUNKS, {Tier.HOST, Tier.DISK})
        assert result.deleted == 6 and len(result.errors) == 1
        await backend.close()


async def test_an_engine_that_has_not_registered_is_not_a_failing_layer() -> None:
    async with misbehaving() as server:
        well_behaved(server)
        backend = LMCacheBackend([server.url], server.url, timeout_s=TIMEOUT_S)
        server.status = 503
        for _ in range(5):
            with pytest.raises(NotReady):
                await backend.prefetch(SPACE, TOKENS, timeout_s=1.0)
        server.status = 200
        await backend.usage()
        await backend.close()


async def test_another_chunking_than_configured_is_refused(server: Misbehaving) -> None:
    backend = LMCacheBackend([server.url], server.url, chunk_size=16, timeout_s=TIMEOUT_S)
    with pytest.raises(BadAnswer, match=r"lmcache\.chunk_size"):
        await backend.capabilities()
    await backend.close()
