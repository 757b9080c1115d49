"""One request of an API that tells no token ids: forwarded as it is but for its salt and its context edits."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvpilot.domain import PromptKnown
from kvpilot.gateway.asgi import Send, WhileConnected, respond
from kvpilot.gateway.call import Call
from kvpilot.gateway.errors import GatewayError, as_anthropic
from kvpilot.gateway.exchange import LONG_REPLY_S, Exchange, relay_raw
from kvpilot.gateway.headers import RawHeaders, reply_headers
from kvpilot.gateway.other_apis import MESSAGES, RESPONSES, ApiReader, MessagesReader, ResponsesReader
from kvpilot.gateway.request import Prepared
from kvpilot.gateway.tools import Tools
from kvpilot.gateway.upstream import UpstreamReply

READERS: dict[str, Callable[[], ApiReader]] = {MESSAGES: MessagesReader, RESPONSES: ResponsesReader}


class ApiExchange(Exchange):
    """``raw`` and ``request`` are what is forwarded: any edits are done."""

    def __init__(
        self, tools: Tools, call: Call, request: Prepared, raw: bytes, tenant: str, reader: ApiReader
    ) -> None:
        super().__init__(tools, call, request, raw, tenant)
        self._reader = reader
        self._facts = reader.facts
        self._streaming = False

    async def run(self, send: Send, connection: WhileConnected) -> None:
        try:
            await super().run(send, connection)
        except GatewayError as error:
            if self._streaming and self._call.path == MESSAGES:
                event = b"event: error\ndata: %b\n\n" % error.anthropic_body()
                await send({"type": "http.response.body", "body": event})
            raise

    async def _relay_raw(self, reply: UpstreamReply, send: Send, connection: WhileConnected) -> None:
        relay = relay_refusal if self._call.path == MESSAGES else relay_raw
        await relay(reply, send, connection, self._own_headers())

    async def _relay_stream(self, reply: UpstreamReply, send: Send, connection: WhileConnected) -> None:
        self._streaming = True
        await super()._relay_stream(reply, send, connection)

    async def _relay_whole(self, reply: UpstreamReply, send: Send, connection: WhileConnected) -> None:
        text = self._reader.whole(await reply.read())
        connection.release()
        headers = reply_headers(reply.headers, keep_length=False)
        await respond(send, reply.status, [*headers, *self._own_headers()], text)

    def _stream_reader(self) -> ApiReader:
        return self._reader

    def _output_seen(self) -> None:
        """Note when output began; of a reply that takes long its prompt's length is told before its end."""
        now = time.time()
        if self._first_token_at is None:
            self._first_token_at = now
        elif not self._prompt_told and self._facts.usage and now - self._first_token_at > LONG_REPLY_S:
            self._prompt_told = True
            count = self._facts.usage.prompt_tokens
            self._tools.link.emit(PromptKnown(self._call.id, now, prompt_token_count=count))


async def relay_refusal(
    reply: UpstreamReply, send: Send, connection: WhileConnected, own: RawHeaders = ()
) -> None:
    """Anything but a 200 on Anthropic's API: errors in Anthropic's shape, the rest as the engine sends it."""
    if reply.status < 400 or reply.encoded:
        return await relay_raw(reply, send, connection, own)
    text = as_anthropic(reply.status, await reply.read())
    connection.release()
    await respond(send, reply.status, [*reply_headers(reply.headers, keep_length=False), *own], text)
    return None
