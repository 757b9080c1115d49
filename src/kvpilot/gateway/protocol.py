"""uvicorn's HTTP protocol with fewer system calls."""

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


class CorkedHttpProtocol(HttpToolsProtocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        corked = CorkedTransport(cast("asyncio.Transport", transport))
        super().connection_made(cast("asyncio.Transport", corked))

    def on_body(self, body: bytes) -> None:
        if not self.cycle.body:
            # Most bodies arrive as one: uvicorn would copy them into an array and out of it again.
            self.cycle.body, body = cast("bytearray", body), b""
        super().on_body(body)
