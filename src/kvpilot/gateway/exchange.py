"""One inference request: asked, forwarded, relayed, and told to the coordinator."""

from __future__ import annotations

import asyncio
import logging
import time

import numpy as np

from kvpilot.context.tokens import parse_tokens
from kvpilot.domain import (
    CommandReply,
    PromptKnown,
    RequestFinished,
    RequestStarted,
)
from kvpilot.gateway.asgi import Send, WhileConnected, respond
from kvpilot.gateway.call import Call
from kvpilot.gateway.errors import GatewayError
from kvpilot.gateway.headers import RawHeaders, header_text, reply_headers, request_headers
from kvpilot.gateway.manage import own_headers, tell
from kvpilot.gateway.reply import Facts, read_reply, with_chunk_hashes
from kvpilot.gateway.request import TOKEN_IDS, Prepared, prepare
from kvpilot.gateway.stream import EventReader, StreamReader
from kvpilot.gateway.tools import Tools
from kvpilot.gateway.upstream import UpstreamReply

log = logging.getLogger(__name__)

LONG_REPLY_S = 0.5
"""Seconds of output after which the coordinator is told the prompt without waiting for the end."""


class Exchange:
    """From the forwarding of a prepared request to its last byte and its last event."""

    def __init__(self, tools: Tools, call: Call, request: Prepared, raw: bytes, tenant: str) -> None:
        self._tools = tools
        self._call = call
        self._request = request
        self._raw = raw
        self._tenant = tenant
        self._facts = Facts()
        self._first_token_at: float | None = None
        self._prompt_told = False
        self._started = False
        self._asked: asyncio.Task[CommandReply | None] | None = None
        self._status = 0

    async def run(self, send: Send, connection: WhileConnected) -> None:
        """Forward and relay. Raises GatewayError as long as nothing was sent to the client."""
        # The engine has the request first; what the coordinator is told of it is put together while the engine reads.
        asyncio.get_running_loop().call_soon(self._start)
        whole = False
        try:
            async with await self._forward() as reply:
                self._status = reply.status
                if reply.status != 200 or not self._request.parsed or reply.encoded:
                    await self._relay_raw(reply, send, connection)
                elif reply.is_stream:
                    await self._relay_stream(reply, send, connection)
                else:
                    await self._relay_whole(reply, send, connection)
            whole = True
        except GatewayError as error:
            self._status = error.status
            raise
        finally:
            self._finish(whole)

    def _start(self) -> None:
        if self._started:
            return
        self._started = True
        request, link = self._request, self._tools.link
        if request.hints.commands:
            timeout = self._tools.config.gateway.command_timeout_s
            self._asked = asyncio.create_task(link.ask(request.hints.commands, timeout))
        if not request.parsed:
            return
        link.emit(
            RequestStarted(
                request_id=self._call.id,
                at=time.time(),
                tenant=self._tenant,
                salt=request.salt,
                session=request.hints.session,
                path=self._call.path,
                body=self._raw,
                retention=request.hints.retention,
            )
        )

    def _finish(self, whole: bool) -> None:
        self._start()
        if self._request.parsed:
            self._tell_end(whole)
        # That a session is over, say, holds from the end of its last request on.
        tell(self._tools.link, self._request.hints.signals)

    def _tell_end(self, whole: bool) -> None:
        facts = self._facts
        usage = facts.usage
        details = usage.prompt_tokens_details if usage else None
        self._tools.link.emit(
            RequestFinished(
                request_id=self._call.id,
                at=time.time(),
                status=self._status,
                first_token_at=self._first_token_at,
                prompt_ids=b"" if self._prompt_told else facts.prompt_ids,
                output_ids=self._output_ids(),
                finish_reason=facts.finish_reason,
                message=facts.message,
                prompt_token_count=usage.prompt_tokens if usage else 0,
                cached_token_count=details.cached_tokens if details else None,
                completion_token_count=(usage.completion_tokens or 0) if usage else 0,
                aborted=not whole,
            )
        )

    async def _forward(self) -> UpstreamReply:
        """Send the request; when the engine refuses it because of what was added, send it without."""
        request = self._request
        reply = await self._send(request)
        if reply.status not in (400, 422) or not request.added:
            return reply
        async with reply:
            text = await reply.read()
        refused = frozenset(name for name in request.added if name.encode() in text)
        if not refused:
            return await self._send(request)
        keep = tuple(name for name in self._tools.questions.allowed() if name not in refused)
        plugin = self._tools.config.engine.plugin
        self._request = prepare(self._raw, self._call.headers, self._tenant, ask=keep, plugin=plugin)
        reply = await self._send(self._request)
        if reply.status == 200:
            self._tools.questions.refuse(refused)
        return reply

    async def _send(self, request: Prepared) -> UpstreamReply:
        replace = {b"accept-encoding": b"identity"}
        session = request.hints.session
        if session.id is not None and session.source != "headers":
            replace[b"x-session-id"] = header_text(session.id)
        headers = self._tools.upstream.authorize(request_headers(self._call.raw_headers, replace))
        return await self._tools.upstream.send(self._call.method, self._call.target, headers, request.pieces)

    async def _relay_whole(self, reply: UpstreamReply, send: Send, connection: WhileConnected) -> None:
        text = await reply.read()
        connection.release()
        if (read := read_reply(text)) is not None:
            self._facts.take(read)
            if TOKEN_IDS in self._request.added:
                text = read.without_ids
            if self._request.chunk_hashes:
                text = with_chunk_hashes(text, self._chunk_hashes())
        headers = reply_headers(reply.headers, keep_length=False)
        await respond(send, reply.status, [*headers, *self._own_headers()], text)

    async def _relay_stream(self, reply: UpstreamReply, send: Send, connection: WhileConnected) -> None:
        reader = self._stream_reader()
        self._facts = reader.facts
        headers = [*reply_headers(reply.headers, keep_length=False), *self._own_headers()]
        await send({"type": "http.response.start", "status": reply.status, "headers": headers})
        out = b""
        try:
            async for data in reply.chunks():
                out = reader.feed(data)
                if reader.has_output:
                    self._output_seen()
                if out and not reply.ended:
                    await send({"type": "http.response.body", "body": out, "more_body": True})
                    out = b""
            connection.release()
            await send({"type": "http.response.body", "body": out + reader.close()})
        finally:
            self._finish_reading(reader)

    def _stream_reader(self) -> EventReader:
        """Reads a streamed reply of the request as it was sent in the end."""
        return StreamReader(self._request.added, self._chunk_hashes if self._request.chunk_hashes else None)

    def _finish_reading(self, reader: EventReader) -> None:
        """The client has its reply: what cannot be read of it is only not known."""
        try:
            reader.finish()
        except Exception:
            log.exception("request %s: its reply could not be read", self._call.id)

    async def _relay_raw(self, reply: UpstreamReply, send: Send, connection: WhileConnected) -> None:
        await relay_raw(reply, send, connection, self._own_headers())

    def _own_headers(self) -> list[tuple[bytes, bytes]]:
        """Action ids are on the reply when the coordinator answered before the engine did."""
        answered = self._asked.result() if self._asked is not None and self._asked.done() else None
        return own_headers(self._request, answered.actions if answered else ())

    def _output_seen(self) -> None:
        """Note when output began; a reply that takes long has its prompt mapped before its end."""
        now = time.time()
        if self._first_token_at is None:
            self._first_token_at = now
        elif not self._prompt_told and self._facts.prompt_ids and now - self._first_token_at > LONG_REPLY_S:
            self._prompt_told = True
            self._tools.link.emit(PromptKnown(self._call.id, now, self._facts.prompt_ids))

    def _chunk_hashes(self) -> list[str]:
        """Hex hashes of the full chunks whose KV exists: all but the last sampled token was computed."""
        prompt = parse_tokens(self._facts.prompt_ids)
        if prompt is None:
            return []
        output = parse_tokens(self._output_ids())
        tokens = prompt if output is None else np.concatenate((prompt, output[:-1]))
        return [value.hex() for value in self._tools.hasher.hashes(tokens)]

    def _output_ids(self) -> bytes:
        """All of them as one JSON list; empty when the engine told none."""
        told = [ids[1:-1] for ids in self._facts.output_ids if len(ids) > 2]
        return b"[" + b",".join(told) + b"]" if told else b""


async def relay_raw(
    reply: UpstreamReply, send: Send, connection: WhileConnected, own: RawHeaders = ()
) -> None:
    """Status, headers and body as the engine sends them, byte for byte."""
    headers = [*reply_headers(reply.headers, keep_length=True), *own]
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    async for data in reply.chunks():
        await send({"type": "http.response.body", "body": data, "more_body": True})
    connection.release()
    await send({"type": "http.response.body", "body": b""})
