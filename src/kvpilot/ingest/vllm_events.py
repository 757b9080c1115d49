"""Subscriber to one vLLM engine's KV events (ZMQ).

Frames: topic, 8-byte big-endian sequence number, MessagePack ``[ts, [event, …], dp rank]``. Events of medium
GPU describe the device pool. Those of medium CPU come from LMCache (vLLM forwards what the LMCache server
tells its worker): chunks by 64 bits of their hash; on loss or restart it withdraws what it had announced.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from kvpilot.context.chunks import short_hash
from kvpilot.ingest.residency import Residency

log = logging.getLogger(__name__)

_END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
_REPLAY_TIMEOUT_S = 5.0
_RETRY_S = 1.0


class BlockStored(msgspec.Struct, tag=True, frozen=True):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None


class BlockRemoved(msgspec.Struct, tag=True, frozen=True):
    block_hashes: list[int | bytes]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, frozen=True):
    pass


class EventBatch(msgspec.Struct, array_like=True, frozen=True):
    ts: float
    events: list[msgspec.Raw]
    data_parallel_rank: int | None = None


_Event = BlockStored | BlockRemoved | AllBlocksCleared
_batches = msgspec.msgpack.Decoder(EventBatch)
_events = msgspec.msgpack.Decoder(_Event)


@dataclass(slots=True)
class SubscriberStats:
    """For metrics. ``gaps``: batches were missed; ``restarts``: the engine began anew; both clear the view."""

    batches: int = 0
    events: int = 0
    gaps: int = 0
    restarts: int = 0
    disconnects: int = 0
    replayed: int = 0
    malformed: int = 0
    ignored: int = 0
    connected: bool = False
    last_event_at: float | None = None


class KvEventSubscriber:
    """Feeds ``residency`` with one engine's events.

    ``endpoint``: where vLLM publishes (``tcp://host:port``). ``on_change`` is called after each batch that told
    something. ``model``: the engine's model as in :class:`~kvpilot.domain.Space` ("" = any). ``replay_endpoint``:
    vLLM's replay socket, asked for what was missed; without it a gap only clears the view, which fills again
    as requests reuse their blocks (vLLM reports those anew). ``host_hints``: also take LMCache's events as
    news of the host tier; leave it off when several LMCache nodes serve different engines.
    """

    def __init__(
        self,
        endpoint: str,
        residency: Residency,
        on_change: Callable[[], None] | None = None,
        *,
        model: str = "",
        engine: str = "",
        replay_endpoint: str = "",
        host_hints: bool = True,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.stats = SubscriberStats()
        self._endpoint = endpoint
        self._residency = residency
        self._on_change = on_change
        self._pool = residency.pool(engine or endpoint, model)
        self._replay_endpoint = replay_endpoint
        self._host_hints = host_hints
        self._clock = clock
        self._next_seq: int | None = None
        self._context: zmq.asyncio.Context | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        self._context = zmq.asyncio.Context()
        socket = self._context.socket(zmq.SUB)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, 100_000)
        socket.setsockopt(zmq.RECONNECT_IVL, 100)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        try:
            socket.connect(self._endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            self._context = None
            raise ValueError(f"engine.kv_events: {self._endpoint!r} is not an endpoint ({error})") from None
        self._tasks = [
            asyncio.create_task(self._receive(socket), name="kv-events"),
            asyncio.create_task(self._watch(monitor), name="kv-events-monitor"),
        ]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None

    # ---------------------------------------------------------------- batches

    def take(self, sequence: int, payload: bytes) -> bool:
        """Apply one batch in its turn; returns whether it told anything. A missing one clears the view."""
        expected = self._next_seq
        if expected is not None and sequence != expected:
            if sequence < expected:
                self.stats.restarts += 1
            else:
                self.stats.gaps += 1
            self._forget()
        self._next_seq = sequence + 1
        return self._apply(payload)

    def _apply(self, payload: bytes) -> bool:
        try:
            batch = _batches.decode(payload)
        except (msgspec.DecodeError, RecursionError):
            self.stats.malformed += 1
            return False
        self.stats.batches += 1
        self.stats.last_event_at = self._clock()
        told = False
        for raw in batch.events:
            try:
                event = _events.decode(raw)
            except (msgspec.DecodeError, RecursionError):
                self.stats.ignored += 1  # a kind of event this version does not know, or a broken one
                continue
            self.stats.events += 1
            told = self._apply_event(event) or told
        return told

    def _apply_event(self, event: _Event) -> bool:
        if isinstance(event, AllBlocksCleared):
            self._pool.clear()
            return True
        if event.group_idx:
            # Groups beyond the first belong to hybrid models; a prefix is judged by the first.
            self.stats.ignored += 1
            return False
        if event.medium in (None, "GPU"):
            if isinstance(event, BlockRemoved):
                self._pool.removed(event.block_hashes)
                return True
            return self._pool.stored(
                event.block_hashes,
                event.parent_block_hash,
                event.token_ids,
                event.block_size,
                adapter=event.lora_name or "",
                extra_keys=event.extra_keys,
            )
        if event.medium == "CPU":
            if self._host_hints:
                present, now = isinstance(event, BlockStored), self._clock()
                for block in event.block_hashes:
                    short = short_hash(block) if isinstance(block, bytes) else block & 0xFFFFFFFFFFFFFFFF
                    self._residency.host_event(short, present, now)
            return True
        self.stats.ignored += 1
        return False

    def _forget(self) -> None:
        self._pool.clear()
        self._residency.forget_host_events()

    # ---------------------------------------------------------------- sockets

    async def _receive(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            try:
                frames = await socket.recv_multipart()
                if len(frames) != 3 or len(frames[1]) != 8:
                    self.stats.malformed += 1
                    continue
                sequence = int.from_bytes(frames[1], "big")
                told = False
                if self._replay_endpoint and sequence != (self._next_seq or 0):
                    told = await self._catch_up(sequence)
                told = self.take(sequence, frames[2]) or told
                if told and self._on_change is not None:
                    self._on_change()
            except asyncio.CancelledError:
                raise
            except Exception:
                self.stats.malformed += 1
                log.exception("KV event of %s could not be applied", self._endpoint)
                await asyncio.sleep(_RETRY_S)

    async def _catch_up(self, until: int) -> bool:
        """Ask vLLM for the batches before ``until`` that were missed (all it has, after a restart of either)."""
        first = self._next_seq if self._next_seq is not None and self._next_seq <= until else 0
        if first == 0 and self._next_seq:
            self.stats.restarts += 1
            self._forget()
        self._next_seq = None if first == 0 else first
        assert self._context is not None
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        told = False
        try:
            socket.connect(self._replay_endpoint)
            await socket.send_multipart([b"", first.to_bytes(8, "big")])
            async with asyncio.timeout(_REPLAY_TIMEOUT_S):
                while True:
                    frames = await socket.recv_multipart()
                    if len(frames) != 4 or frames[2] == _END_OF_REPLAY:
                        break
                    sequence = int.from_bytes(frames[2], "big")
                    if sequence < until:
                        told = self.take(sequence, frames[3]) or told
                        self.stats.replayed += 1
        except (TimeoutError, zmq.ZMQError) as error:
            log.warning("replay of KV events from %s failed: %s", self._replay_endpoint, error or "no answer")
        finally:
            socket.close(linger=0)
        return told

    async def _watch(self, monitor: zmq.asyncio.Socket) -> None:
        """A broken connection: the engine is gone, or events were missed."""
        while True:
            message = await recv_monitor_message(monitor)
            if message["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.stats.connected = True
            elif message["event"] == zmq.EVENT_DISCONNECTED and self.stats.connected:
                self.stats.connected = False
                self.stats.disconnects += 1
                self._forget()
                self._next_seq = None
                if self._on_change is not None:
                    self._on_change()
