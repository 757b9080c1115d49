"""The gateway's end of the wire to the coordinator: events that never wait, commands that wait briefly."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from itertools import count

import msgspec
import zmq
import zmq.asyncio

from kvpilot import link as wire
from kvpilot.config import Config
from kvpilot.domain import Command, CommandBatch, CommandReply, Event

log = logging.getLogger(__name__)

_IN_ZMQ = 64
"""Messages handed to ZMQ at most; the rest waits here, where it is counted in bytes too."""
_MAX_BYTES = 64 * 1024 * 1024
_RETRY_S = 0.01
_CONNECT_S = 0.4
"""How long a command waits for a coordinator that is just (re)starting."""
_RECONNECT_MS, _RECONNECT_MAX_MS = 100, 300


class GatewayLink:
    """Bounded, non-blocking, and content without a coordinator: it connects again by itself."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._limit = config.gateway.event_queue
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._retry: asyncio.TimerHandle | None = None
        self._replies: dict[bytes, asyncio.Future[CommandReply]] = {}
        self._numbers = count(1)
        self._reader: asyncio.Task[None] | None = None
        self.sent = 0
        self.shed = 0

    @property
    def queued(self) -> int:
        return len(self._waiting)

    async def start(self) -> None:
        """Open the sockets. Must run in the loop that uses them."""
        # Two contexts: one shared by a plain and an asyncio socket cannot be collected in any order.
        self._event_context = zmq.Context()
        self._events = self._event_context.socket(zmq.PUSH)
        self._command_context = zmq.asyncio.Context()
        self._commands = self._command_context.socket(zmq.DEALER)
        for socket, endpoint, limit in (
            (self._events, wire.event_endpoint(self._config), _IN_ZMQ),
            (self._commands, wire.command_endpoint(self._config), 1000),
        ):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, limit)
            # Nothing is queued for a coordinator that is away: commands fail at once, events wait here.
            socket.setsockopt(zmq.IMMEDIATE, 1)
            socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
            socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
            socket.connect(endpoint)
        self._reader = asyncio.create_task(self._read_replies())

    async def stop(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
            self._reader = None
            self._event_context.destroy(linger=0)
            self._command_context.destroy(linger=0)

    def emit(self, event: Event) -> None:
        """Send an event, or keep it until the coordinator takes it, or shed and count it. Never waits."""
        frame = wire.event_encoder.encode(event)
        if not self._waiting and self._send(frame):
            return
        if len(self._waiting) >= self._limit or self._waiting_bytes + len(frame) > _MAX_BYTES:
            self.shed += 1
            return
        self._waiting.append(frame)
        self._waiting_bytes += len(frame)
        if self._retry is None:
            self._retry = asyncio.get_running_loop().call_later(_RETRY_S, self._flush)

    def _flush(self) -> None:
        self._retry = None
        while self._waiting and self._send(self._waiting[0]):
            self._waiting_bytes -= len(self._waiting.popleft())
        if self._waiting:
            self._retry = asyncio.get_running_loop().call_later(_RETRY_S, self._flush)

    def _send(self, frame: bytes) -> bool:
        try:
            self._events.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        self.sent += 1
        return True

    async def ask(self, commands: tuple[Command, ...], timeout_s: float) -> CommandReply | None:
        """The coordinator's answer to commands; None when it is away or does not answer in time."""
        number = next(self._numbers).to_bytes(8, "big")
        future: asyncio.Future[CommandReply] = asyncio.get_running_loop().create_future()
        self._replies[number] = future
        try:
            async with asyncio.timeout(min(timeout_s, _CONNECT_S)):
                await self._commands.send_multipart(
                    [number, wire.event_encoder.encode(CommandBatch(commands))]
                )
            async with asyncio.timeout(timeout_s):
                return await future
        except (zmq.ZMQError, TimeoutError):
            return None
        finally:
            del self._replies[number]

    async def alive(self, timeout_s: float = 0.3) -> bool:
        """Whether the coordinator answers (an empty batch gets an empty reply)."""
        return await self.ask((), timeout_s) is not None

    async def _read_replies(self) -> None:
        while True:
            frames = await self._commands.recv_multipart()
            try:
                number, body = frames
                reply = wire.reply_decoder.decode(body)
            except (ValueError, msgspec.MsgspecError) as error:
                log.warning("the coordinator answered nonsense: %s", error)
                continue
            future = self._replies.get(number)
            if future is not None and not future.done():
                future.set_result(reply)
