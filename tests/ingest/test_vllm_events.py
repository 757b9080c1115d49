"""The subscriber against a publisher that speaks vLLM's frames."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
import zmq.asyncio

from kvpilot.backends.base import Placement
from kvpilot.context.chunks import short_hash
from kvpilot.domain import Space, Tier
from kvpilot.ingest.residency import Residency
from kvpilot.ingest.vllm_events import KvEventSubscriber

BLOCK = 4
TOKENS = list(range(12))
SPACE = Space("m")


class Publisher:
    """PUB and, on request, replay ROUTER, as in ``vllm/distributed/kv_events.py``."""

    def __init__(self, endpoint: str = "tcp://127.0.0.1:*", *, replay: bool = False) -> None:
        self._context = zmq.asyncio.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._pub.bind(endpoint)
        self.endpoint = self._pub.getsockopt_string(zmq.LAST_ENDPOINT)
        self.sequence = 0
        self.sent: list[tuple[int, bytes]] = []
        self.replay_endpoint = ""
        self._task: asyncio.Task[None] | None = None
        if replay:
            router = self._context.socket(zmq.ROUTER)
            router.bind("tcp://127.0.0.1:*")
            self.replay_endpoint = router.getsockopt_string(zmq.LAST_ENDPOINT)
            self._task = asyncio.create_task(self._serve(router))

    async def _serve(self, router: zmq.asyncio.Socket) -> None:
        while True:
            client, _, start = await router.recv_multipart()
            for sequence, payload in self.sent:
                if sequence >= int.from_bytes(start, "big"):
                    await router.send_multipart([client, b"", b"kv", sequence.to_bytes(8, "big"), payload])
            await router.send_multipart([client, b"", b"", (-1).to_bytes(8, "big", signed=True), b""])

    async def publish(self, *events: dict[str, Any], lost: bool = False) -> None:
        await self.publish_raw(msgspec.msgpack.encode([time.time(), events, 0]), lost=lost)

    async def publish_raw(self, payload: bytes, *, lost: bool = False) -> None:
        self.sent.append((self.sequence, payload))
        if not lost:
            await self._pub.send_multipart([b"kv", self.sequence.to_bytes(8, "big"), payload])
        self.sequence += 1

    async def publish_frames(self, *frames: bytes) -> None:
        await self._pub.send_multipart(frames)

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
        self._context.destroy(linger=0)


def stored(first: int = 0, last: int = 3, **more: Any) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": [100 + i for i in range(first, last)],
        "parent_block_hash": 99 + first if first else None,
        "token_ids": TOKENS[first * BLOCK : last * BLOCK],
        "block_size": BLOCK,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "session_id": "s",
        **more,
    }


def resident(view: Residency) -> int:
    return view.device_prefix(SPACE, np.asarray(TOKENS, dtype=np.uint32))


async def until(condition: Callable[[], bool], within_s: float = 5.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def following(publisher: Publisher, view: Residency, **more: Any) -> AsyncIterator[KvEventSubscriber]:
    subscriber = KvEventSubscriber(publisher.endpoint, view, **more)
    await subscriber.start()
    try:
        await until(lambda: subscriber.stats.connected)
        await asyncio.sleep(0.05)  # PUB learns of the subscription after the handshake
        yield subscriber
    finally:
        await subscriber.close()


@pytest.fixture
async def publisher() -> AsyncIterator[Publisher]:
    made = Publisher()
    yield made
    made.close()


async def test_blocks_come_and_go(publisher: Publisher) -> None:
    view, changes = Residency(), []
    async with following(publisher, view, on_change=lambda: changes.append(1)):
        await publisher.publish(stored())
        await until(lambda: resident(view) == 12)
        await publisher.publish({"type": "BlockRemoved", "block_hashes": [101], "medium": "GPU"})
        await until(lambda: resident(view) == 4)
        await publisher.publish(stored(1, 2))
        await until(lambda: resident(view) == 12)
        await publisher.publish({"type": "AllBlocksCleared"})
        await until(lambda: resident(view) == 0)
        assert len(changes) == 4


async def test_a_gap_clears_the_view_and_is_counted(publisher: Publisher) -> None:
    view = Residency()
    async with following(publisher, view) as subscriber:
        await publisher.publish(stored())
        await until(lambda: resident(view) == 12)
        await publisher.publish({"type": "BlockRemoved", "block_hashes": [100], "medium": "GPU"}, lost=True)
        await publisher.publish({"type": "Unheard", "x": 1})
        await until(lambda: subscriber.stats.gaps == 1)
        assert resident(view) == 0
        assert subscriber.stats.ignored == 1
        await publisher.publish(stored())
        await until(lambda: resident(view) == 12)


async def test_a_sequence_that_starts_again_clears_the_view(publisher: Publisher) -> None:
    view = Residency()
    async with following(publisher, view) as subscriber:
        await publisher.publish(stored())
        await publisher.publish(stored())
        await until(lambda: resident(view) == 12)
        publisher.sequence = 0
        await publisher.publish(stored(0, 1))
        await until(lambda: resident(view) == 4)
        assert (subscriber.stats.restarts, subscriber.stats.gaps) == (1, 0)


async def test_what_was_missed_is_replayed() -> None:
    publisher = Publisher(replay=True)
    view = Residency()
    try:
        await publisher.publish(stored(0, 1), lost=True)
        async with following(publisher, view, replay_endpoint=publisher.replay_endpoint) as subscriber:
            await publisher.publish(stored(1, 2))
            await until(lambda: resident(view) == 8)
            await publisher.publish(stored(2, 3), lost=True)
            await publisher.publish({"type": "BlockRemoved", "block_hashes": [5], "medium": "GPU"})
            await until(lambda: resident(view) == 12)
            assert (subscriber.stats.replayed, subscriber.stats.gaps) == (2, 0)
    finally:
        publisher.close()


async def test_an_engine_that_dies_takes_its_blocks_with_it_and_is_followed_again() -> None:
    publisher, view = Publisher(), Residency()
    async with following(publisher, view) as subscriber:
        await publisher.publish(stored())
        await until(lambda: resident(view) == 12)
        publisher.close()
        await until(lambda: resident(view) == 0)
        again = Publisher(publisher.endpoint)
        try:
            await until(lambda: subscriber.stats.connected, 10)
            await asyncio.sleep(0.05)
            await again.publish(stored(0, 2))
            await until(lambda: resident(view) == 8)
        finally:
            again.close()


async def test_nonsense_is_counted_and_survived(publisher: Publisher) -> None:
    view = Residency()
    async with following(publisher, view) as subscriber:
        await publisher.publish_frames(b"kv", b"short", b"")
        await publisher.publish_frames(b"lonely")
        await publisher.publish_raw(b"\xc1 not msgpack")
        await publisher.publish_raw(msgspec.msgpack.encode([1.0, "no list", 0]))
        await publisher.publish(stored(token_ids=[1]), {"type": "BlockStored"}, stored())
        await until(lambda: resident(view) == 12)
        assert subscriber.stats.malformed == 4
        assert subscriber.stats.ignored == 1


async def test_host_events_correct_the_view_of_the_host_tier(publisher: Publisher) -> None:
    view, chunk = Residency(), bytes(range(32))
    refresh = view.begin_refresh(time.time())
    refresh.add([Placement(SPACE, chunk, frozenset({Tier.DISK}))])
    view.commit(refresh)
    async with following(publisher, view) as subscriber:
        await publisher.publish(stored(block_hashes=[short_hash(chunk)], medium="CPU", block_size=256))
        await until(lambda: view.tiers(SPACE, chunk) == {Tier.HOST, Tier.DISK})
        await publisher.publish(
            {"type": "BlockRemoved", "block_hashes": [short_hash(chunk)], "medium": "CPU"}
        )
        await until(lambda: view.tiers(SPACE, chunk) == {Tier.DISK})
        assert resident(view) == 0
        await publisher.publish({"type": "BlockRemoved", "block_hashes": [1], "medium": "STORAGE"})
        await until(lambda: subscriber.stats.ignored == 1)


async def test_an_endpoint_that_is_none_is_named() -> None:
    with pytest.raises(ValueError, match="nonsense"):
        await KvEventSubscriber("nonsense", Residency()).start()
