"""The engine as an HTTP server; its failures as :class:`GatewayError`."""

from __future__ import annotations

from types import TracebackType

from kvpilot.config import Config
from kvpilot.gateway.errors import GatewayError, broken_off, timed_out, unreachable
from kvpilot.gateway.http_client import (
    Body,
    Client,
    ConnectFailed,
    Disconnected,
    Headers,
    ReadTimeout,
    Response,
)

_KEYS = (b"authorization", b"x-api-key")
"""Headers in which clients bring their key."""
_FAILURES = (ConnectFailed, Disconnected, ReadTimeout)


class UpstreamReply:
    """A reply whose body is still to be read; use as ``async with``, leaving early cancels it at the engine and
    what fails inside is raised as GatewayError."""

    def __init__(self, response: Response, upstream: Upstream) -> None:
        self._response = response
        self._upstream = upstream
        self.status = response.status
        self.headers = [(name, upstream.local(name, value)) for name, value in response.headers]
        self.chunks = response.chunks
        self.read = response.read

    @property
    def ended(self) -> bool:
        """Whether all of the body has been read."""
        return self._response.ended

    @property
    def is_stream(self) -> bool:
        return self._header(b"content-type").startswith(b"text/event-stream")

    @property
    def encoded(self) -> bool:
        """Whether the body is compressed, so that it can only be passed on."""
        return self._header(b"content-encoding") not in (b"", b"identity")

    def _header(self, name: bytes) -> bytes:
        return next((value for key, value in self.headers if key == name), b"")

    async def __aenter__(self) -> UpstreamReply:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._response.__aexit__(kind, error, trace)
        if isinstance(error, _FAILURES):
            raise self._upstream.translate(error) from None


class Upstream:
    """Forwards requests to the configured engine."""

    def __init__(self, config: Config) -> None:
        self.url = config.engine.url.rstrip("/")
        self._api_key = config.engine.api_key
        self._keys_are_ours = bool(config.tenants)
        self._read_timeout_s = config.gateway.read_timeout_s
        self._client = Client(
            self.url,
            connect_timeout_s=config.gateway.connect_timeout_s,
            read_timeout_s=config.gateway.read_timeout_s,
        )

    def local(self, name: bytes, value: bytes) -> bytes:
        """A reply header's value; a redirect to the engine's own address becomes one to the gateway's."""
        base = self.url.encode()
        if name == b"location" and value.startswith(base + b"/"):
            return value[len(base) :]
        return value

    def authorize(self, headers: Headers) -> Headers:
        """``headers`` with what the engine wants to see: its own key, and never a key that is kvpilot's."""
        if not self._api_key and not self._keys_are_ours:
            return headers
        kept = [(name, value) for name, value in headers if name not in _KEYS]
        if self._api_key:
            kept.append((b"authorization", b"Bearer " + self._api_key.encode()))
        return kept

    async def send(self, method: str, target: str, headers: Headers, body: Body) -> UpstreamReply:
        """Forward a request; ``target`` is path and query as the client wrote them. Raises GatewayError."""
        try:
            return UpstreamReply(await self._client.request(method, target, headers, body), self)
        except _FAILURES as error:
            raise self.translate(error) from None

    def translate(self, error: Exception) -> GatewayError:
        if isinstance(error, ConnectFailed):
            return unreachable(self.url)
        if isinstance(error, ReadTimeout):
            return timed_out(self.url, self._read_timeout_s)
        return broken_off(self.url)

    async def healthy(self, timeout_s: float = 2.0) -> bool:
        """Whether the engine's own /health answers 200."""
        try:
            async with await self._client.request("GET", "/health", [], read_timeout_s=timeout_s) as response:
                await response.read()
                return response.status == 200
        except _FAILURES:
            return False

    def stop(self) -> None:
        self._client.close()
