"""The sockets of the coordinator: events and commands from gateways."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from kvpilot.domain import ActionRecord, Command, CommandBatch, CommandReply, Event
from kvpilot.link import batch_decoder, event_decoder, event_encoder

log = logging.getLogger(__name__)

EVENT_BACKLOG = 1000
"""Frames; one carries a whole request (200 KB for a long context). Gateways keep what does not fit, bounded too."""
BURST = 64
"""Events taken in before other tasks get a turn."""


class LinkServer:
    """Binds the two sockets. A malformed frame is counted and dropped; it never stops the loop."""

    def __init__(
        self,
        event_endpoint: str,
        command_endpoint: str,
        on_event: Callable[[Event], None],
        on_command: Callable[[Command], Awaitable[list[ActionRecord]]],
    ) -> None:
        self._event_endpoint = event_endpoint
        self._command_endpoint = command_endpoint
        self._on_event = on_event
        self._on_command = on_command
        self._context = zmq.asyncio.Context()
        self.malformed = 0

    async def run(self) -> None:
        """Serves until cancelled."""
        events = self._bind(zmq.PULL, self._event_endpoint)
        commands = self._bind(zmq.ROUTER, self._command_endpoint)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._events(events))
                group.create_task(self._commands(commands))
        finally:
            events.close(linger=0)
            commands.close(linger=200)
            self._context.term()

    def _bind(self, kind: int, endpoint: str) -> zmq.asyncio.Socket:
        path = Path(endpoint.removeprefix("ipc://"))
        path.unlink(missing_ok=True)  # left by a process that was killed
        socket = self._context.socket(kind)
        socket.set_hwm(EVENT_BACKLOG)
        socket.bind(endpoint)
        return socket

    async def _events(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            frame = await socket.recv()
            for _ in range(BURST):
                self._take_in(frame)
                try:
                    frame = await socket.recv(zmq.NOBLOCK)
                except zmq.Again:
                    break
            else:
                self._take_in(frame)
            await asyncio.sleep(0)

    def _take_in(self, frame: bytes) -> None:
        try:
            event = event_decoder.decode(frame)
        except msgspec.DecodeError:
            self.malformed += 1
            return
        try:
            self._on_event(event)
        except Exception:
            log.exception("event %s was not understood and is skipped", type(event).__name__)

    async def _commands(self, socket: zmq.asyncio.Socket) -> None:
        async with asyncio.TaskGroup() as group:
            while True:
                frames = await socket.recv_multipart()
                group.create_task(self._answer(socket, frames))

    async def _answer(self, socket: zmq.asyncio.Socket, frames: list[bytes]) -> None:
        try:
            client, correlation, raw = frames
            batch: CommandBatch = batch_decoder.decode(raw)
        except (ValueError, msgspec.DecodeError):
            self.malformed += 1
            return
        records: list[ActionRecord] = []
        for command in batch.commands:
            try:
                records.extend(await self._on_command(command))
            except Exception:
                log.exception("a %s command failed", command.kind.value)
        reply = CommandReply(actions=tuple(records))
        await socket.send_multipart([client, correlation, event_encoder.encode(reply)])
