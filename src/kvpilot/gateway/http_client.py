"""A small HTTP/1.1 client for one server: pooled connections, bodies as they arrive, cancelled by closing.

Much of what a general client does for a request is of no use to a proxy: URLs, cookies, redirects, encodings,
header objects. Here headers go in and come out raw, and a body is passed on as the bytes that arrive.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterable, AsyncIterator
from types import TracebackType
from typing import cast
from urllib.parse import urlsplit

import httptools

Headers = list[tuple[bytes, bytes]]
Body = bytes | tuple[bytes | memoryview, ...] | AsyncIterable[bytes] | None
"""As one, in pieces that are sent together, or as it comes."""

_IDLE_S = 4.0
"""vLLM closes idle connections after 5 s; ours are not used any more before that."""
_MAX_IDLE = 256
READ_BYTES = 256 * 1024
"""Bytes that are read at once, here and from clients."""
_BUFFER = 1024 * 1024
"""Bytes of a reply's body buffered before reading pauses."""
_LONG = 64 * 1024
"""Bytes of a piece that is not copied to travel with others."""
_TOGETHER_S = 0.002
"""What follows a piece within so many seconds waits as long for more, and travels as one."""


class ConnectFailed(Exception):
    """No connection could be made."""


class Disconnected(Exception):
    """The server closed the connection, or spoke no HTTP, before the reply was complete."""


class ReadTimeout(Exception):
    """The server was silent for too long."""


class Connection(asyncio.BufferedProtocol):
    """One connection, one request at a time. Reads into ``memory``, which connections of one loop may share."""

    def __init__(self, read_timeout_s: float, memory: memoryview) -> None:
        self._memory = memory
        self._loop = asyncio.get_running_loop()
        self.read_timeout_s = read_timeout_s
        self._waiter: asyncio.Future[None] | None = None
        self._writable: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._waiting_since = 0.0
        self._paused = False
        self._holding = False
        self.closed = False
        self.idle_since = 0.0
        self._reset(head=False)

    def _reset(self, *, head: bool) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._head_request = head
        self._chunks: list[bytes] = []
        self._buffered = 0
        self._framed = False
        self._keep_alive = False
        self._error: Exception | None = None
        self.headers: Headers = []
        self.status = 0
        self.complete = False
        self.touched = False
        """Whether the server has sent anything for this request."""

    # asyncio.BufferedProtocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._memory

    def buffer_updated(self, nbytes: int) -> None:
        self.touched = True
        try:
            self._parser.feed_data(self._memory[:nbytes])
        except httptools.HttpParserError as error:
            self._error = Disconnected(f"not HTTP: {error}")
            self.close()
        if not self._holding or self.complete or self._paused or self._error is not None:
            self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        if self.status and not self.complete and not self._framed and exc is None:
            # Without a length and without chunks the end of the connection is the end of the body.
            self.complete = True
        self._wake()
        self.resume_writing()

    def pause_writing(self) -> None:
        self._writable = self._loop.create_future()

    def resume_writing(self) -> None:
        writable, self._writable = self._writable, None
        if writable is not None and not writable.done():
            writable.set_result(None)

    # httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        self._framed = self._framed or name in (b"content-length", b"transfer-encoding")
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:
            self.headers = []
            return
        self.status = status
        self._keep_alive = self._parser.should_keep_alive()
        if self._head_request:
            # The parser would wait for a body that a reply to HEAD does not have.
            self.complete = True
            self._keep_alive = False

    def on_body(self, body: bytes) -> None:
        self._chunks.append(body)
        self._buffered += len(body)
        if self._buffered > _BUFFER and not self._paused:
            self._paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        if self.status:
            self.complete = True

    # the client's side

    async def request(self, method: str, target: str, headers: Headers, body: Body) -> None:
        """Send a request and wait for status and headers of the reply."""
        self._reset(head=method == "HEAD")
        lines = [f"{method} {target} HTTP/1.1".encode("latin-1")]
        lines += [name + b": " + value for name, value in headers]
        chunked = False
        if isinstance(body, bytes):
            body = (body,)
        if isinstance(body, tuple):
            lines.append(b"content-length: %d" % sum(map(len, body)))
        elif body is not None and not any(name == b"content-length" for name, _ in headers):
            lines.append(b"transfer-encoding: chunked")
            chunked = True
        head = b"\r\n".join((*lines, b"\r\n"))
        if body is None or isinstance(body, tuple):
            self._transport.writelines((head, *(body or ())))
        else:
            self._transport.write(head)
            async for chunk in body:
                await self._write(b"%x\r\n%b\r\n" % (len(chunk), chunk) if chunked else chunk)
            if chunked:
                await self._write(b"0\r\n\r\n")
        while not self.status:
            await self._wait()

    async def chunks(self) -> AsyncIterator[bytes]:
        """The reply's body as it arrives."""
        while True:
            if self._chunks:
                yield self._take()
            elif self.complete:
                return
            else:
                passed_on = time.monotonic()
                await self._wait()
                # One more turn of the loop: under load several chunks have come by then and travel as one.
                await asyncio.sleep(0)
                if not self.complete and time.monotonic() < passed_on + _TOGETHER_S:
                    await self._hold()

    async def _hold(self) -> None:
        """Until the reply has come to its end, at most for as long as its pieces wait for one another."""
        self._holding = True
        self._waiter = self._loop.create_future()
        timer = self._loop.call_later(_TOGETHER_S, self._wake)
        try:
            await self._waiter
        finally:
            self._holding, self._waiter = False, None
            timer.cancel()

    async def read(self) -> bytes:
        """The reply's whole body."""
        parts: list[bytes] = []
        while not self.complete:
            if self._paused:
                parts.append(self._take())
            await self._wait()
        while self._chunks:
            parts.append(self._take())
        return parts[0] if len(parts) == 1 else b"".join(parts)

    @property
    def read_out(self) -> bool:
        return self.complete and not self._chunks

    @property
    def reusable(self) -> bool:
        return self.read_out and self._keep_alive and not self.closed

    def close(self) -> None:
        """Drop the connection; the server sees that nobody waits any more."""
        self.stop_timer()
        if not self.closed:
            self.closed = True
            self._transport.abort()

    async def _write(self, data: bytes) -> None:
        if not self.closed:
            self._transport.write(data)
        if self._writable is not None:
            await self._writable

    def _take(self) -> bytes:
        if len(self._chunks) > 1 and len(self._chunks[0]) > _LONG:
            data = self._chunks.pop(0)
        else:
            data = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
            self._chunks.clear()
        self._buffered -= len(data)
        if self._paused and not self.closed:
            self._paused = False
            self._transport.resume_reading()
        return data

    async def _wait(self) -> None:
        """Until something has arrived. Raises Disconnected, ReadTimeout."""
        if self.closed:
            raise self._error or Disconnected("the connection was closed")
        self._waiter = self._loop.create_future()
        self._waiting_since = self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_later(self.read_timeout_s, self._expire)
        try:
            await self._waiter
        finally:
            self._waiter = None
        if self._error is not None:
            raise self._error

    def _expire(self) -> None:
        """One timer serves many waits: it is set anew for what is left of the one that goes on."""
        self._timer = None
        if self._waiter is None:
            return
        left = self._waiting_since + self.read_timeout_s - self._loop.time()
        if left > 0:
            self._timer = self._loop.call_later(left, self._expire)
            return
        self._error = ReadTimeout()
        self.close()
        self._wake()

    def stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Response:
    """Status and headers of a reply; use as ``async with``: leaving before the body's end closes the connection."""

    def __init__(self, connection: Connection, client: Client) -> None:
        self._connection = connection
        self._client = client
        self.status = connection.status
        self.headers = connection.headers
        self.chunks = connection.chunks
        self.read = connection.read

    @property
    def ended(self) -> bool:
        """Whether all of the body has been read."""
        return self._connection.read_out

    async def __aenter__(self) -> Response:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.release(self._connection)


class Client:
    """Requests to one server."""

    def __init__(self, url: str, *, connect_timeout_s: float, read_timeout_s: float) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not an http:// or https:// URL")
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._prefix = parts.path.rstrip("/")
        self._host_header = (b"host", parts.netloc.rpartition("@")[2].encode())
        self._connect_timeout_s = connect_timeout_s
        self._read_timeout_s = read_timeout_s
        self._idle: list[Connection] = []
        self._memory = memoryview(bytearray(READ_BYTES))

    async def request(
        self,
        method: str,
        target: str,
        headers: Headers,
        body: Body = None,
        *,
        read_timeout_s: float | None = None,
    ) -> Response:
        """Send a request. Raises ConnectFailed, Disconnected, ReadTimeout.

        A connection out of the pool may have been closed by the server at the very moment it is used: when
        nothing at all came back, the request goes out once more on a fresh one.
        """
        repeatable = body is None or isinstance(body, bytes | tuple)
        headers = [self._host_header, *headers]
        connection = self._from_pool() if repeatable else None
        fresh = connection is None
        while True:
            connection = connection or await self._connect()
            connection.read_timeout_s = read_timeout_s or self._read_timeout_s
            try:
                await connection.request(method, self._prefix + target, headers, body)
                return Response(connection, self)
            except Disconnected:
                connection.close()
                if fresh or connection.touched:
                    raise
            except BaseException:
                connection.close()
                raise
            connection, fresh = None, True

    def release(self, connection: Connection) -> None:
        """Take a connection back, or close it when its reply was not read to the end."""
        if not connection.reusable:
            connection.close()
            return
        connection.stop_timer()
        connection.idle_since = time.monotonic()
        self._idle.append(connection)
        if len(self._idle) > _MAX_IDLE:
            self._idle.pop(0).close()

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    def _from_pool(self) -> Connection | None:
        deadline = time.monotonic() - _IDLE_S
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed and connection.idle_since > deadline:
                return connection
            connection.close()
        return None

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await loop.create_connection(
                    lambda: Connection(self._read_timeout_s, self._memory),
                    self._host,
                    self._port,
                    ssl=self._ssl,
                )
        except (OSError, TimeoutError) as error:
            raise ConnectFailed(str(error)) from None
        return connection
