"""Memory that a gateway worker and the coordinator share: a frame that lies in it is not copied through the kernel."""

from __future__ import annotations

import mmap
import os
import socket
import tempfile
from collections import deque

RING_BYTES = 4 * 1024 * 1024


class Room:
    """Whole places in a ring of ``size`` bytes, given out and taken back in the same order. No memory of its own."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._next = 0
        self._taken: deque[int] = deque()
        """Where each place that is in use begins, oldest first."""

    def take(self, length: int) -> int | None:
        """Offset of a place of ``length`` bytes, at least one; None while there is none."""
        if not self._taken:
            # From the beginning again: little traffic stays in memory that is warm.
            self._next = 0
            end = self._size
        elif self._next > self._taken[0]:
            end = self._size
            if self._next + length > end:
                self._next, end = 0, self._taken[0]
        else:
            end = self._taken[0]
        if self._next + length > end:
            return None
        at = self._next
        self._taken.append(at)
        self._next = at + length
        return at

    def give_back(self, count: int) -> None:
        """The ``count`` oldest places are free again. Raises IndexError when there are fewer."""
        for _ in range(count):
            self._taken.popleft()


def share(connection: socket.socket, size: int = RING_BYTES) -> mmap.mmap:
    """New memory that whoever :func:`receive`\\ s at the other end of a Unix socket sees, too. It has no name: it is
    gone with its two processes."""
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("kvpilot-events")
    else:  # not Linux
        with tempfile.TemporaryFile() as unnamed:
            file = os.dup(unnamed.fileno())
    try:
        os.ftruncate(file, size)
        memory = mmap.mmap(file, size)
        socket.send_fds(connection, [b"\0"], [file])
    finally:
        os.close(file)
    return memory


def receive(connection: socket.socket) -> mmap.mmap:
    """The memory that the other end shares. Raises ValueError where it sends something else, OSError."""
    _, files, _, _ = socket.recv_fds(connection, 1, 1)
    try:
        if not files:
            raise ValueError("no memory came with the connection")
        return mmap.mmap(files[0], 0, access=mmap.ACCESS_READ)
    finally:
        for file in files:
            os.close(file)
