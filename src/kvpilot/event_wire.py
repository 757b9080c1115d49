"""Events on a Unix stream socket: the end that sends them and the end that takes them."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from pathlib import Path
from socket import SO_SNDBUF, SOL_SOCKET
from typing import cast

_LENGTH = struct.Struct(">I")
_SEND_BUFFER = 1024 * 1024
"""Bytes asked of the kernel, so that a whole long request fits; it may give less."""
_READ_BUFFER = 1024 * 1024
MAX_FRAME = 1024 * 1024 * 1024
"""Bytes. More is no frame: the stream is out of step, and its connection is closed."""


class EventSender(asyncio.Protocol):
    """One connection to the coordinator. ``on_ready`` is called when it can take frames again, ``on_lost`` when it ends
    with a frame that had not left the process whole. What the kernel had taken and the coordinator had not is lost
    with the connection and not told: nobody knows of it.
    """

    def __init__(self, on_ready: Callable[[], None], on_lost: Callable[[], None]) -> None:
        self._on_ready = on_ready
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._paused = False
        self._under_way = False
        """The transport has a frame, or a part of one, that the kernel has not."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        # A frame is handed over when the one before has left the process: what waits, waits where it is counted.
        self._transport.set_write_buffer_limits(high=0)
        transport.get_extra_info("socket").setsockopt(SOL_SOCKET, SO_SNDBUF, _SEND_BUFFER)

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = self._under_way = False
        self._on_ready()

    def connection_lost(self, exc: Exception | None) -> None:
        lost, self._paused, self._under_way = self._under_way, False, False
        self._transport = None
        if lost:
            self._on_lost()

    @property
    def ready(self) -> bool:
        """Whether :meth:`send` may be called now."""
        return self._transport is not None and not self._paused and not self._transport.is_closing()

    @property
    def connected(self) -> bool:
        return self._transport is not None

    def send(self, frame: bytes) -> None:
        assert self._transport is not None
        self._transport.writelines((_LENGTH.pack(len(frame)), frame))
        # A transport that is closing now was not before: it could not write.
        self._under_way = self._paused or self._transport.is_closing()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


class EventReceiver:
    """Listens at ``path`` and calls ``take`` with each frame of each sender, whose memory is used again after it."""

    def __init__(self, path: Path, take: Callable[[memoryview], None]) -> None:
        self._path = path
        self._take = take
        self._senders: set[asyncio.Transport] = set()

    async def start(self) -> None:
        # A socket file left by a process that was killed is replaced.
        self._path.unlink(missing_ok=True)
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(
            lambda: _FrameReader(self._take, self._senders), str(self._path)
        )

    def stop(self) -> None:
        self._server.close()
        for sender in list(self._senders):
            sender.abort()


class _FrameReader(asyncio.BufferedProtocol):
    """Reads into one buffer that is kept: memory that is new for every frame costs more than reading it."""

    def __init__(self, take: Callable[[memoryview], None], senders: set[asyncio.Transport]) -> None:
        self._take = take
        self._senders = senders
        self._buffer = bytearray(_READ_BUFFER)
        self._start = 0
        self._end = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._senders.add(self._transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._senders.discard(self._transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        return memoryview(self._buffer)[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        self._end += nbytes
        wanted = _LENGTH.size
        with memoryview(self._buffer) as buffer:
            while self._end - self._start >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(buffer, self._start)
                if not 0 < length <= MAX_FRAME:
                    self._transport.abort()
                    return
                wanted = _LENGTH.size + length
                if self._end - self._start < wanted:
                    break
                start = self._start + _LENGTH.size
                self._start += wanted
                with buffer[start : self._start] as frame:
                    self._take(frame)
        self._make_room(wanted)

    def _make_room(self, wanted: int) -> None:
        """The frame under way goes to the front where it would not fit behind itself; a long one gets a new buffer."""
        rest = self._end - self._start
        size = max(_READ_BUFFER, wanted) if rest else _READ_BUFFER
        if size != len(self._buffer):
            fresh = bytearray(size)
            fresh[:rest] = self._buffer[self._start : self._end]
            self._buffer = fresh
        elif rest and self._start + wanted > size:
            self._buffer[:rest] = self._buffer[self._start : self._end]
        elif rest:
            return
        self._start, self._end = 0, rest
