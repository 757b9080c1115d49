"""The few pieces of ASGI the gateway needs."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from types import TracebackType
from typing import Any

from kvpilot.gateway.errors import GatewayError, too_large
from kvpilot.gateway.headers import RawHeaders

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_DECIMAL = re.compile(r"[0-9]{1,18}")
"""``int`` takes other digits, and fails on some of them and on very many."""
JSON = (b"content-type", b"application/json")
WATCH_AFTER_S = 0.05


class ClientGone(Exception):
    """The client closed its connection before it had sent its request."""


async def respond(send: Send, status: int, headers: RawHeaders, body: bytes) -> None:
    """A whole reply at once; adds its length."""
    all_headers = [*headers, (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": all_headers})
    await send({"type": "http.response.body", "body": body})


async def respond_error(send: Send, error: GatewayError, *, anthropic: bool = False) -> None:
    body = error.anthropic_body() if anthropic else error.body()
    await respond(send, error.status, (JSON, *error.headers), body)


class Body:
    """A request's body. Reading it raises GatewayError 413 beyond the limit, ClientGone."""

    def __init__(self, receive: Receive, length: str | None, limit_mb: int) -> None:
        self._receive = receive
        self._length = length
        self._limit_mb = limit_mb

    async def whole(self) -> bytes:
        chunk, more = await self._next(0)
        if not more:
            return chunk  # as most bodies come
        chunks, size = [chunk], len(chunk)
        while more:
            chunk, more = await self._next(size)
            chunks.append(chunk)
            size += len(chunk)
        return b"".join(chunks)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """As it arrives."""
        size, more = 0, True
        while more:
            chunk, more = await self._next(size)
            size += len(chunk)
            if chunk:
                yield chunk

    async def _next(self, size: int) -> tuple[bytes, bool]:
        """The chunk behind the first ``size`` bytes, and whether there is more."""
        limit, length = self._limit_mb * 1024 * 1024, self._length
        if not size and length is not None and _DECIMAL.fullmatch(length) and int(length) > limit:
            raise too_large(self._limit_mb)
        message = await self._receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunk: bytes = message.get("body", b"")
        if size + len(chunk) > limit:
            raise too_large(self._limit_mb)
        return chunk, message.get("more_body", False)


class WhileConnected:
    """Cancels the block it guards as soon as the client goes away; ``gone`` then tells so.

    Guards from :meth:`watch` on, to be called when the request's body has been read, until :meth:`release`; with
    a little delay, as most of what is answered at once needs no watching.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._timer: asyncio.TimerHandle | None = None
        self._watcher: asyncio.Task[None] | None = None
        self.gone = False

    async def __aenter__(self) -> WhileConnected:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self.release()
        if self.gone and kind is asyncio.CancelledError:
            return self._task.uncancel() == 0
        return False

    def watch(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(WATCH_AFTER_S, self._start)

    def _start(self) -> None:
        self._watcher = asyncio.create_task(self._watch())

    def release(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._watcher is not None:
            self._watcher.cancel()
            self._watcher = None

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if self._watcher is not None:
            self.gone = True
            self._task.cancel()
