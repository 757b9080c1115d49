"""A mock OpenAI engine, as fast as Python gets: ``python -m kvpilot.bench.mock_engine PORT``.

Answers chat completions like vLLM does, at once and always with the same text: with token ids when asked for
(a token per four bytes of the request), streamed as 16 chunks when asked for. It serves one model, "mock".
For benchmarks only.
"""

from __future__ import annotations

import asyncio
import random
import sys
import zlib
from functools import lru_cache
from typing import cast

import httptools
import uvloop

CHUNKS = 16
_BYTES_PER_TOKEN = 4
_HEAD = b'{"id":"chatcmpl-1","object":"%b","created":1,"model":"mock","choices":['
_TEXT = "All work and no play makes Jack a dull boy. "


_DRAW = random.Random(0)
_POOL = [b"%d" % _DRAW.randrange(49152) for _ in range(1 << 18)]


def _ids(count: int, session: int = 0) -> bytes:
    """A JSON list of ids; a session's longer list begins with its shorter ones."""
    start = session * 7919 % (len(_POOL) // 2)
    return b"[" + b",".join(_POOL[start : start + count]) + b"]"


@lru_cache(maxsize=64)
def whole_reply(prompt_tokens: int, with_ids: bool, session: int = 0) -> bytes:
    """A non-streaming reply, HTTP head included."""
    ids = (_ids(64), _ids(prompt_tokens, session)) if with_ids else (b"null", b"null")
    body = (
        _HEAD % b"chat.completion"
        + b'{"index":0,"message":{"role":"assistant","content":"%b"},"logprobs":null,"finish_reason":"stop",'
        % (_TEXT * 6).encode()
        + b'"token_ids":%b}],"usage":{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":64,'
        % (ids[0], prompt_tokens, prompt_tokens + 64)
        + b'"prompt_tokens_details":{"cached_tokens":0}},"prompt_token_ids":%b,"kv_transfer_params":null}'
        % ids[1]
    )
    return _answer(body)


def _answer(body: bytes) -> bytes:
    """``body`` as JSON, HTTP head included."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
    return head + body


_PAGES = {
    b"/health": _answer(b""),
    b"/v1/models": _answer(b'{"object":"list","data":[{"id":"mock","object":"model","owned_by":"kvpilot"}]}'),
}


@lru_cache(maxsize=64)
def stream_reply(prompt_tokens: int, with_ids: bool, with_usage: bool) -> tuple[bytes, ...]:
    """A streamed reply: the HTTP head with the first chunk, then one write per chunk."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    start = b"data: " + _HEAD % b"chat.completion.chunk"
    first_ids, ids = (_ids(prompt_tokens), _ids(4)) if with_ids else (b"null", b"null")
    events = [
        start
        + b'{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],'
        + b'"prompt_token_ids":%b}\n\n' % first_ids
    ]
    for number in range(CHUNKS):
        finish = b'"stop"' if number == CHUNKS - 1 else b"null"
        delta = (
            b'{"index":0,"delta":{"content":"%b"},"logprobs":null,"finish_reason":%b,"token_ids":%b}]}\n\n'
        )
        events.append(start + delta % (_TEXT[:18].encode(), finish, ids))
    if with_usage:
        usage = b'],"usage":{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":64}}\n\n'
        events.append(start + usage % (prompt_tokens, prompt_tokens + 64))
    events.append(b"data: [DONE]\n\n")
    writes = [b"%x\r\n%b\r\n" % (len(event), event) for event in events]
    return (head + writes[0], *writes[1:-1], writes[-1] + b"0\r\n\r\n")


class MockEngine(asyncio.Protocol):
    """One connection."""

    def __init__(self) -> None:
        self._parser = httptools.HttpRequestParser(self)
        self._body: list[bytes] = []
        self._session = 0
        self._url = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._transport.close()

    def on_url(self, url: bytes) -> None:
        self._url = url

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"x-session-id":
            self._session = zlib.crc32(value)
        if name.lower() == b"expect":
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        body = b"".join(self._body)
        self._body = []
        if self._url in _PAGES:
            self._transport.write(_PAGES[self._url])
            return
        # What proxies re-encode lands anywhere in the body, with or without a blank.
        compact = body[:200].replace(b" ", b"") + body[-200:].replace(b" ", b"")
        tokens = len(body) // _BYTES_PER_TOKEN // 256 * 256
        with_ids = b'"return_token_ids":true' in compact
        if b'"stream":true' in compact:
            self._send(stream_reply(tokens, with_ids, b'"include_usage":true' in compact), 0)
        else:
            self._transport.write(whole_reply(tokens, with_ids, self._session))

    def _send(self, writes: tuple[bytes, ...], index: int) -> None:
        """One chunk per turn of the loop, so that chunks arrive apart, as from an engine."""
        self._transport.write(writes[index])
        if index + 1 < len(writes):
            asyncio.get_running_loop().call_soon(self._send, writes, index + 1)


async def serve(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(MockEngine, "127.0.0.1", port, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1])))
