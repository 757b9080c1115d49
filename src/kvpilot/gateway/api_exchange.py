"""One request of an API that tells no token ids: forwarded as it is but for its salt and its context edits."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvpilot.domain import PromptKnown
from kvpilot.gateway.asgi import Send, WhileConnected, respond
from kvpilot.gateway.call import Call
from kvpilot.gateway.exchange import LONG_REPLY_S, Exchange
from kvpilot.gateway.headers import reply_headers
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
