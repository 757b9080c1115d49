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
from kvpilot.event_wire import EventReceiver
from kvpilot.link import batch_decoder, event_decoder, event_encoder

log = logging.getLogger(__name__)


class LinkServer:
    """Serves the two sockets. A malformed frame is counted and dropped; it never stops the loop."""

    def __init__(
        self,
        event_socket: Path,
        command_endpoint: str,
        on_event: Callable[[Event], None],
        on_command: Callable[[Command], Awaitable[list[ActionRecord]]],
    ) -> None:
        self._events = EventReceiver(event_socket, self._take_in)
        self._command_endpoint = command_endpoint
        self._on_event = on_event
        self._on_command = on_command
        self._context = zmq.asyncio.Context()
        self.malformed = 0

    async def run(self) -> None:
        """Serves until cancelled."""
        await self._events.start()
        commands = self._bind_commands()
        try:
            await self._commands(commands)
        finally:
            self._events.stop()
            commands.close(linger=200)
            self._context.term()

    def _bind_commands(self) -> zmq.asyncio.Socket:
        path = Path(self._command_endpoint.removeprefix("ipc://"))
        path.unlink(missing_ok=True)  # left by a process that was killed
        socket = self._context.socket(zmq.ROUTER)
        socket.bind(self._command_endpoint)
        return socket

    def _take_in(self, frame: memoryview) -> None:
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
