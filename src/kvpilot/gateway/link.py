"""The gateway's end of the wire to the coordinator: events that never wait, commands that wait briefly."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from contextlib import suppress
from itertools import count

import msgspec
import zmq
import zmq.asyncio

from kvpilot import link as wire
from kvpilot.config import Config
from kvpilot.domain import Command, CommandBatch, CommandReply, Event
from kvpilot.event_wire import EventSender

log = logging.getLogger(__name__)

_MAX_BYTES = 64 * 1024 * 1024
_CONNECT_S = 0.4
"""How long a command waits for a coordinator that is just (re)starting."""
_RECONNECT_MS, _RECONNECT_MAX_MS = 100, 300


class GatewayLink:
    """Bounded, non-blocking, and content without a coordinator: it connects again by itself."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._limit = config.gateway.event_queue
        self._waiting: deque[tuple[bytes, bytes]] = deque()
        self._waiting_bytes = 0
        self._sender = EventSender(self._flush, self._lost)
        self._replies: dict[bytes, asyncio.Future[CommandReply]] = {}
        self._numbers = count(1)
        self._tasks: list[asyncio.Task[None]] = []
        self.sent = 0
        self.shed = 0

    @property
    def queued(self) -> int:
        return len(self._waiting)

    async def start(self) -> None:
        """Open the sockets. Must run in the loop that uses them."""
        self._context = zmq.asyncio.Context()
        self._commands = self._context.socket(zmq.DEALER)
        self._commands.setsockopt(zmq.LINGER, 0)
        # Nothing is queued for a coordinator that is away: commands fail at once, events wait here.
        self._commands.setsockopt(zmq.IMMEDIATE, 1)
        self._commands.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        self._commands.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MAX_MS)
        self._commands.connect(wire.command_endpoint(self._config))
        self._tasks = [asyncio.create_task(self._read_replies()), asyncio.create_task(self._stay_connected())]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._tasks:
            self._sender.close()
            self._context.destroy(linger=0)
        self._tasks = []

    def emit(self, event: Event) -> None:
        """Send an event, or keep it until the coordinator takes it, or shed and count it. Never waits."""
        frame = wire.event_frame(event)
        size = len(frame[0]) + len(frame[1])
        if not self._waiting and self._sender.send(*frame):
            self.sent += 1
        elif len(self._waiting) >= self._limit or self._waiting_bytes + size > _MAX_BYTES:
            self.shed += 1
        else:
            self._waiting.append(frame)
            self._waiting_bytes += size

    def _flush(self) -> None:
        while self._waiting and self._sender.send(*self._waiting[0]):
            frame = self._waiting.popleft()
            self._waiting_bytes -= len(frame[0]) + len(frame[1])
            self.sent += 1

    def _lost(self, frames: int) -> None:
        """They were under way when the coordinator went."""
        self.sent -= frames
        self.shed += frames

    async def _stay_connected(self) -> None:
        path = wire.event_socket(self._config)
        while True:
            if not self._sender.connected:
                with suppress(OSError):
                    await self._sender.connect(path)
                    self._flush()
            await asyncio.sleep(_RECONNECT_MS / 1000)

    async def ask(self, commands: tuple[Command, ...], timeout_s: float) -> CommandReply | None:
        """The coordinator's answer to commands; None when it is away or does not answer in time."""
        # A command is about what was told before it.
        self._sender.flush()
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
