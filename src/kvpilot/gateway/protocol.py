"""uvicorn's HTTP protocol with fewer system calls and fewer copies."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class CorkedTransport:
    """Collects what is written within one turn of the loop (head, chunks, end) and sends it as one.

    A reply then is one segment, not three, and its reader wakes up once.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._pending: list[bytes] = []
        self._loop = asyncio.get_running_loop()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not self._pending:
            self._loop.call_soon(self._flush)
        self._pending.append(data)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        pending, self._pending = self._pending, []
        if pending and not self._transport.is_closing():
            self._transport.write(pending[0] if len(pending) == 1 else b"".join(pending))


class ServerConnection(asyncio.BufferedProtocol):
    """uvicorn's protocol, given what is read into ``memory``, which all connections of a loop may share."""

    def __init__(self, memory: memoryview, **settings: Any) -> None:
        self._memory = memory
        self._http = http = CorkedHttpProtocol(**settings)
        self.connection_made = http.connection_made  # type: ignore[method-assign]
        self.connection_lost = http.connection_lost  # type: ignore[method-assign]
        self.pause_writing = http.pause_writing  # type: ignore[method-assign]
        self.resume_writing = http.resume_writing  # type: ignore[method-assign]
        self.eof_received = http.eof_received  # type: ignore[method-assign]

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._memory

    def buffer_updated(self, nbytes: int) -> None:
        self._http.data_received(cast("bytes", self._memory[:nbytes]))


class CorkedHttpProtocol(HttpToolsProtocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        corked = CorkedTransport(cast("asyncio.Transport", transport))
        super().connection_made(cast("asyncio.Transport", corked))

    def on_body(self, body: bytes) -> None:
        if not self.cycle.body:
            # Most bodies arrive as one: uvicorn would copy them into an array and out of it again.
            self.cycle.body, body = cast("bytearray", body), b""
        super().on_body(body)
