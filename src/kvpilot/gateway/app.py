"""The ASGI application: routes, limits and tenants. The work on one inference request is in ``exchange``."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterable, AsyncIterator
from dataclasses import replace

import msgspec

from kvpilot.config import Config
from kvpilot.context.chunks import ChunkHasher
from kvpilot.gateway.api_exchange import READERS, ApiExchange, relay_refusal
from kvpilot.gateway.asgi import (
    JSON,
    Body,
    ClientGone,
    Message,
    Receive,
    Scope,
    Send,
    WhileConnected,
    respond,
    respond_error,
)
from kvpilot.gateway.call import Call
from kvpilot.gateway.editing import COUNT_PATH, Edited, EngineCounter, count_reply, edit_context
from kvpilot.gateway.errors import GatewayError, not_found, too_busy, unauthorized
from kvpilot.gateway.exchange import Exchange, relay_raw
from kvpilot.gateway.headers import reply_headers, request_headers
from kvpilot.gateway.link import GatewayLink
from kvpilot.gateway.manage import answer, tell
from kvpilot.gateway.metrics import Metrics
from kvpilot.gateway.other_apis import MESSAGES, MessagesReader
from kvpilot.gateway.request import Prepared, prepare, salted
from kvpilot.gateway.tools import Questions, Tools
from kvpilot.gateway.upstream import Upstream
from kvpilot.tenants import DEFAULT_TENANT, Tenants, UnknownKey

log = logging.getLogger(__name__)

_BODILESS = ("GET", "HEAD", "DELETE", "OPTIONS")
"""Methods whose body, if any, means nothing to the engine."""
_PLAIN = {b"accept-encoding": b"identity"}
WITH_IDS = ("/v1/chat/completions", "/v1/completions")
"""Where the engine can be asked for what clients do not ask for."""
_INFERENCE = (*WITH_IDS, *READERS)


class Gateway:
    """ASGI callable, one per worker process. Its connections open with ASGI's start-up event.

    ``upstream`` and ``link`` take the place of the connections to engine and coordinator.
    """

    def __init__(
        self, config: Config, *, upstream: Upstream | None = None, link: GatewayLink | None = None
    ) -> None:
        self._config = config
        self._tenants = Tenants(config.tenants)
        self._upstream = upstream or Upstream(config)
        self.link = link or GatewayLink(config)
        self._tools = Tools(
            config=config,
            upstream=self._upstream,
            link=self.link,
            questions=Questions(),
            hasher=ChunkHasher(config.lmcache.chunk_size),
        )
        self._counter = EngineCounter(self._upstream)
        self._metrics = Metrics(self.link)
        self._in_flight = 0
        self._metrics.in_flight.set_function(lambda: self._in_flight)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})
        elif scope["path"] == "/health":
            await self._health(send)
        elif scope["path"] == "/metrics":
            kind = (b"content-type", b"text/plain; version=0.0.4; charset=utf-8")
            await respond(send, 200, (kind,), self._metrics.text())
        else:
            await self._api(Call(scope), receive, send)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                await self.link.start()
                await send({"type": "lifespan.startup.complete"})
            elif message["type"] == "lifespan.shutdown":
                self._upstream.stop()
                await self.link.stop()
                await send({"type": "lifespan.shutdown.complete"})
                return

    async def _health(self, send: Send) -> None:
        engine = await self._upstream.healthy()
        state = {
            "status": "ok" if engine else "engine unreachable",
            "engine": engine,
            "coordinator": await self.link.alive(),
        }
        await respond(send, 200 if engine else 503, (JSON,), msgspec.json.encode(state))

    async def _api(self, call: Call, receive: Receive, send: Send) -> None:
        """One request, with its limits; whatever goes wrong becomes an answer the client understands."""
        sent = 0

        async def tracking_send(message: Message) -> None:
            nonlocal sent
            sent = sent or message.get("status", 0)
            await send(message)

        inference = call.path in _INFERENCE and call.method == "POST"
        try:
            if not call.inside_api:
                raise not_found(call.path)
            tenant = self._tenant(call)
            if self._in_flight >= self._config.gateway.max_in_flight:
                raise too_busy(self._config.gateway.max_in_flight)
            self._in_flight += 1
            try:
                if inference:
                    await self._inference(call, tenant, receive, tracking_send)
                elif call.path == COUNT_PATH and call.method == "POST":
                    await self._count_tokens(call, tenant, receive, tracking_send)
                else:
                    await self._pass_through(call, tenant, receive, tracking_send)
            finally:
                self._in_flight -= 1
        except ClientGone:
            self._metrics.aborted.inc()
        except GatewayError as error:
            if sent:
                # The reply is under way: that it breaks off is the only sign left to give.
                log.warning("%s: %s", call.path, error.message)
            else:
                await respond_error(tracking_send, error, anthropic=call.path.startswith(MESSAGES))
        self._metrics.count(call.path if inference else "other", sent)

    def _tenant(self, call: Call) -> str:
        try:
            return self._tenants.identify(call.headers)
        except UnknownKey as error:
            raise unauthorized(str(error)) from None

    async def _inference(self, call: Call, tenant: str, receive: Receive, send: Send) -> None:
        raw = await self._body(call, receive).whole()
        began = time.perf_counter()
        ask = self._tools.questions.allowed() if call.path in WITH_IDS else ()
        request = prepare(raw, call.headers, tenant, ask=ask, plugin=self._config.engine.plugin)
        if request.hints.dropped:
            self._metrics.hints_dropped.inc(len(request.hints.dropped))
            log.info("session %s: dropped %s", request.hints.session.id, "; ".join(request.hints.dropped))
        if request.hints.manage:
            tell(self.link, request.hints.signals)
            self._metrics.managed.inc()
            return await answer(self._tools, request, call, send)
        async with WhileConnected(receive) as connection:
            connection.watch()
            if call.path in WITH_IDS:
                exchange = Exchange(self._tools, call, request, raw, tenant)
            else:
                exchange = await self._api_exchange(call, request, raw, tenant)
            self._metrics.prepare.observe(time.perf_counter() - began)
            await exchange.run(send, connection)
        if connection.gone:
            raise ClientGone
        return None

    async def _api_exchange(self, call: Call, request: Prepared, raw: bytes, tenant: str) -> ApiExchange:
        if call.path != MESSAGES or not request.hints.edits:
            return ApiExchange(self._tools, call, request, raw, tenant, READERS[call.path]())
        edited = await self._edit(call, request)
        request = replace(request, pieces=(edited.body,))
        return ApiExchange(self._tools, call, request, edited.body, tenant, MessagesReader(edited.report()))

    async def _edit(self, call: Call, request: Prepared) -> Edited:
        headers = self._upstream.authorize(request_headers(call.raw_headers, _PLAIN))
        return await edit_context(request.body, request.hints.edits, self._counter.of(headers))

    async def _count_tokens(self, call: Call, tenant: str, receive: Receive, send: Send) -> None:
        """Tokens of a Messages request, as it would be after its context edits."""
        raw = await self._body(call, receive).whole()
        request = prepare(raw, call.headers, tenant, ask=())
        async with WhileConnected(receive) as connection:
            connection.watch()
            edited = await self._edit(call, request) if request.hints.edits else Edited(request.body)
            headers = self._upstream.authorize(request_headers(call.raw_headers, _PLAIN))
            async with await self._upstream.send(call.method, call.target, headers, edited.body) as reply:
                if not request.hints.edits or reply.status != 200:
                    return await relay_refusal(reply, send, connection)
                text = count_reply(await reply.read(), edited.original_tokens)
                connection.release()
                await respond(send, 200, reply_headers(reply.headers, keep_length=False), text)
        if connection.gone:
            raise ClientGone
        return None

    async def _pass_through(self, call: Call, tenant: str, receive: Receive, send: Send) -> None:
        headers = self._upstream.authorize(request_headers(call.raw_headers, {}, keep_length=True))
        body: AsyncIterable[bytes] | bytes | None = None
        async with WhileConnected(receive) as connection:
            if tenant != DEFAULT_TENANT and call.has_body and call.method not in _BODILESS:
                # Whatever the body claims to be: what reaches the engine unsalted shares KV with everybody.
                raw = await self._body(call, receive).whole()
                body = salted(raw, tenant) if raw else raw
                headers = [(name, value) for name, value in headers if name != b"content-length"]
                connection.watch()
            elif call.has_body:
                body = _then_watch(self._body(call, receive), connection)
            else:
                connection.watch()
            async with await self._upstream.send(call.method, call.target, headers, body) as reply:
                await relay_raw(reply, send, connection)
        if connection.gone:
            raise ClientGone

    def _body(self, call: Call, receive: Receive) -> Body:
        return Body(receive, call.headers.get("content-length"), self._config.gateway.max_body_mb)


async def _then_watch(body: AsyncIterable[bytes], connection: WhileConnected) -> AsyncIterator[bytes]:
    async for chunk in body:
        yield chunk
    connection.watch()
