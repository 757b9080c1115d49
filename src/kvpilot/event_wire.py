"""Events on a Unix stream socket: the end that sends them and the end that takes them.

A connection begins with memory that both ends share (``event_ring``). Long frames are put there, and a note of where
goes through the socket; frames that are short, or longer than the memory, go through the socket themselves. What comes
close together goes at once: every write wakes the other end. The receiver tells how many notes it is done with.

On the wire, all numbers of four bytes, big-endian: length and frame; or length with the highest bit set, and where
the frame lies in the memory. Back: how many frames in the memory were taken.
"""

from __future__ import annotations

import asyncio
import mmap
import struct
from collections.abc import Callable
from pathlib import Path
from socket import AF_UNIX, SO_SNDBUF, SOCK_STREAM, SOL_SOCKET, socket
from typing import cast

from kvpilot.event_ring import Room, receive, share

_NUMBER = struct.Struct(">I")
_NOTE = struct.Struct(">II")
_IN_MEMORY = 1 << 31
LONG = 16 * 1024
"""Bytes of a frame from which on it goes through the memory."""
_TOGETHER_S = 0.004
"""Seconds after a writing in which what comes waits, to travel together."""
_SEND_BUFFER = 1024 * 1024
"""Bytes asked of the kernel, so that a whole long request fits; it may give less."""
_READ_BUFFER = 1024 * 1024
MAX_FRAME = 1024 * 1024 * 1024
"""Bytes. More is no frame: the stream is out of step, and its connection is closed."""


class EventSender(asyncio.Protocol):
    """One connection to the coordinator. ``on_ready`` is called when it can take frames again, ``on_lost`` when it ends
    with frames that had not left the process whole, and how many. What the kernel had and the coordinator had not is
    lost with the connection and not told: nobody knows of it.
    """

    def __init__(self, on_ready: Callable[[], None], on_lost: Callable[[int], None]) -> None:
        self._on_ready = on_ready
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._paused = False
        self._full = False
        """A frame was refused as the memory had no room for it."""
        self._waiting: list[bytes] = []
        """What goes through the socket next, for ``_frames`` frames."""
        self._frames = 0
        self._timer: asyncio.TimerHandle | None = None
        self._written_at = 0.0
        self._under_way = 0
        """Frames of the last writing, of which the transport has what the kernel has not."""

    async def connect(self, path: Path) -> None:
        """Raises OSError where nobody listens."""
        loop = asyncio.get_running_loop()
        connection = socket(AF_UNIX, SOCK_STREAM)
        try:
            connection.setblocking(False)
            await loop.sock_connect(connection, str(path))
            self._memory = share(connection)
            await loop.create_unix_connection(lambda: self, sock=connection)
        except BaseException:
            connection.close()
            raise

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._loop = asyncio.get_running_loop()
        self._room = Room(len(self._memory))
        self._answer = b""
        # A frame is handed over when the one before has left the process: what waits, waits where it is counted.
        self._transport.set_write_buffer_limits(high=0)
        transport.get_extra_info("socket").setsockopt(SOL_SOCKET, SO_SNDBUF, _SEND_BUFFER)

    def data_received(self, data: bytes) -> None:
        answer = self._answer + data
        whole = len(answer) // _NUMBER.size * _NUMBER.size
        self._answer = answer[whole:]
        try:
            for (count,) in _NUMBER.iter_unpack(answer[:whole]):
                self._room.give_back(count)
        except IndexError:
            self.close()
        if self._full:
            self._full = False
            self._on_ready()

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused, self._under_way = False, 0
        self._on_ready()

    def connection_lost(self, exc: Exception | None) -> None:
        lost = self._under_way + self._frames
        self._paused = self._full = False
        self._under_way = self._frames = 0
        self._waiting.clear()
        self._transport = None
        self._memory.close()
        if lost:
            self._on_lost(lost)

    @property
    def connected(self) -> bool:
        return self._transport is not None

    def send(self, frame: bytes, rest: bytes = b"") -> bool:
        """A frame, of which a long part may come apart; whether it is taken now."""
        if self._transport is None or self._paused or self._transport.is_closing():
            return False
        length = len(frame) + len(rest)
        in_memory = LONG <= length <= len(self._memory)
        if in_memory:
            place = self._room.take(length)
            if place is None:
                # It waits here, where it costs nothing: through the socket both ends would be slower still.
                self._full = True
                return False
            middle = place + len(frame)
            self._memory[place:middle] = frame
            self._memory[middle : place + length] = rest
            self._waiting.append(_NOTE.pack(_IN_MEMORY | length, place))
        else:
            self._waiting += (_NUMBER.pack(length), frame, rest)
        self._frames += 1
        if self._timer is None and self._loop.time() < self._written_at + _TOGETHER_S:
            self._timer = self._loop.call_at(self._written_at + _TOGETHER_S, self.flush)
        # What is longer than the memory is counted as waiting until the kernel takes it, and so is what comes then.
        if self._timer is None or length > len(self._memory):
            self.flush()
        return True

    def flush(self) -> None:
        """What waits goes now."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._transport is None or not self._frames:
            return
        self._written_at = self._loop.time()
        self._transport.writelines(self._waiting)
        frames, self._waiting, self._frames = self._frames, [], 0
        # A transport that is closing now was not before: it could not write.
        self._under_way = frames if self._paused or self._transport.is_closing() else 0

    def close(self) -> None:
        if self._transport is not None:
            self.flush()
            self._transport.close()


class EventReceiver:
    """Listens at ``path`` and calls ``take`` with each frame of each sender, whose memory is used again after it."""

    def __init__(self, path: Path, take: Callable[[memoryview], None]) -> None:
        self._path = path
        self._take = take
        self._senders: set[asyncio.Transport] = set()
        self._greeted: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        # A socket file left by a process that was killed is replaced.
        self._path.unlink(missing_ok=True)
        self._listener = socket(AF_UNIX, SOCK_STREAM)
        self._listener.setblocking(False)
        self._listener.bind(str(self._path))
        self._listener.listen()
        self._accepting = asyncio.create_task(self._accept())

    def stop(self) -> None:
        for task in (self._accepting, *self._greeted):
            task.cancel()
        self._listener.close()
        for sender in list(self._senders):
            sender.abort()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            connection, _ = await loop.sock_accept(self._listener)
            task = asyncio.create_task(self._greet(connection))
            self._greeted.add(task)
            task.add_done_callback(self._greeted.discard)

    async def _greet(self, connection: socket) -> None:
        """Take what a sender shares, then its frames."""
        loop = asyncio.get_running_loop()
        try:
            await _readable(connection)
            memory = receive(connection)
            await loop.connect_accepted_socket(
                lambda: _FrameReader(self._take, self._senders, memory), connection
            )
        except (OSError, ValueError):
            connection.close()
        except BaseException:
            connection.close()
            raise


async def _readable(connection: socket) -> None:
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    loop.add_reader(connection, ready.set_result, None)
    try:
        await ready
    finally:
        loop.remove_reader(connection)


class _FrameReader(asyncio.BufferedProtocol):
    """Reads into one buffer that is kept: memory that is new for every frame costs more than reading it."""

    def __init__(
        self,
        take: Callable[[memoryview], None],
        senders: set[asyncio.Transport],
        memory: mmap.mmap,
    ) -> None:
        self._take = take
        self._senders = senders
        self._memory = memory
        self._buffer = bytearray(_READ_BUFFER)
        self._start = 0
        self._end = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._senders.add(self._transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._senders.discard(self._transport)
        self._memory.close()

    def get_buffer(self, sizehint: int) -> memoryview:
        return memoryview(self._buffer)[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        self._end += nbytes
        taken = 0
        wanted = _NUMBER.size
        with memoryview(self._buffer) as buffer, memoryview(self._memory) as memory:
            while self._end - self._start >= _NUMBER.size:
                (number,) = _NUMBER.unpack_from(buffer, self._start)
                noted = number & _IN_MEMORY
                length = number ^ noted
                wanted = _NOTE.size if noted else _NUMBER.size + length
                if not 0 < length <= MAX_FRAME:
                    self._transport.abort()
                    return
                if self._end - self._start < wanted:
                    break
                at = _NOTE.unpack_from(buffer, self._start)[1] if noted else self._start + _NUMBER.size
                if noted and at + length > len(memory):
                    self._transport.abort()
                    return
                self._start += wanted
                taken += bool(noted)
                with (memory if noted else buffer)[at : at + length] as frame:
                    self._take(frame)
        if taken:
            self._transport.write(_NUMBER.pack(taken))
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
