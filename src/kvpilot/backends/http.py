"""JSON over HTTP to one peer that may be slow, gone, or talking nonsense.

Every call is bounded in time and answer size, at most ``max_calls`` are under way at once, a breaker keeps
callers away from a peer that fails, and whatever goes wrong is a :class:`BackendError`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any, TypeVar

import aiohttp
import msgspec

from kvpilot.backends.base import BadAnswer, Refused, TimedOut, Unreachable
from kvpilot.backends.breaker import Breaker

T = TypeVar("T")

_MAX_ANSWER_BYTES = 64 << 20


class Peer:
    """One HTTP server. ``timeout_s`` bounds a call from waiting for its turn to the last byte; every call carries
    ``headers``."""

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float,
        max_calls: int = 8,
        max_waiting: int = 64,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._headers = dict(headers or {})
        self.url = url.rstrip("/")
        self.breaker = Breaker()
        self._timeout_s = timeout_s
        self._turns = asyncio.Semaphore(max_calls)
        self._max_pending = max_calls + max_waiting
        self._pending = 0
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def call(
        self,
        method: str,
        path: str,
        answer: type[T],
        *,
        body: Any = None,
        query: Mapping[str, str | int] | None = None,
        timeout_s: float | None = None,
    ) -> T:
        """Send ``body`` as JSON and decode the 2xx answer to ``answer``. Raises BackendError."""
        where = f"{method} {self.url}{path}"
        if self._pending >= self._max_pending:
            raise Unreachable(f"{where}: too many calls are waiting")
        if not self.breaker.admit(time.monotonic()):
            raise Unreachable(f"{where}: not asked, it failed repeatedly just now")
        limit = self._timeout_s if timeout_s is None else min(timeout_s, self._timeout_s)
        self._pending += 1
        settled = False
        try:
            async with asyncio.timeout(limit), self._turns:
                status, raw = await self._exchange(method, path, body, query)
            result = _decode(where, status, raw, answer)
            self.breaker.succeeded()
            settled = True
            return result
        except (TimeoutError, aiohttp.ServerTimeoutError):
            raise TimedOut(f"{where}: no answer within {limit:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise Unreachable(f"{where}: {error or type(error).__name__}") from None
        except Refused as refusal:
            # 503 is LMCache's considered "not now"; it proves the peer alive.
            if refusal.status < 500 or refusal.status == 503:
                self.breaker.succeeded()
                settled = True
            raise
        except asyncio.CancelledError:
            self.breaker.abandoned()
            settled = True
            raise
        finally:
            self._pending -= 1
            if not settled:
                self.breaker.failed(time.monotonic())

    async def _exchange(
        self, method: str, path: str, body: Any, query: Mapping[str, str | int] | None
    ) -> tuple[int, bytes]:
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
        data = None if body is None else msgspec.json.encode(body)
        headers = self._headers if body is None else {**self._headers, "content-type": "application/json"}
        for attempt in (1, 2):
            try:
                async with self._session.request(
                    method, self.url + path, data=data, headers=headers, params=query, allow_redirects=False
                ) as response:
                    return response.status, await _read(response)
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
                # A kept-alive connection to a peer restarted meanwhile; all our calls may be repeated.
                if attempt == 2 or isinstance(error, aiohttp.ClientConnectorError):
                    raise
        raise AssertionError("unreachable")


async def _read(response: aiohttp.ClientResponse) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for part in response.content.iter_any():
        size += len(part)
        if size > _MAX_ANSWER_BYTES:
            response.close()
            raise BadAnswer(
                f"{response.method} {response.url}: answer is larger than {_MAX_ANSWER_BYTES} bytes"
            )
        parts.append(part)
    return b"".join(parts)


def _decode(where: str, status: int, raw: bytes, answer: type[T]) -> T:
    if not 200 <= status < 300:
        raise Refused(f"{where}: HTTP {status} {_detail(raw)}".rstrip(), status)
    try:
        return msgspec.json.decode(raw, type=answer)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadAnswer(f"{where}: {error} in {raw[:80]!r}") from None


def _detail(raw: bytes) -> str:
    try:
        found = msgspec.json.decode(raw[:65536])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""
    return str(found.get("detail", ""))[:300] if isinstance(found, dict) else ""
