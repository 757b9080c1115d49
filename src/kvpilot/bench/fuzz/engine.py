"""An engine that takes everything: no sockets, no model, replies as vLLM writes them."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator
from dataclasses import dataclass
from types import TracebackType

import msgspec
import numpy as np

from kvpilot.config import Config
from kvpilot.gateway.http_client import Headers
from kvpilot.gateway.upstream import Upstream, UpstreamReply

MAX_TOKENS = 4000
_BYTES_PER_TOKEN = 4
_WORDS = ("All ", "work ", "and ", "no ", "play.")
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


@dataclass(frozen=True, slots=True)
class Received:
    headers: Headers
    body: bytes


@dataclass(frozen=True, slots=True)
class Answer:
    kind: bytes
    text: bytes


class AcceptingEngine(Upstream):
    """``received`` is the last request. A request ends up here instead of on a connection."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.received: Received | None = None

    async def send(
        self, method: str, target: str, headers: Headers, body: bytes | AsyncIterable[bytes] | None
    ) -> UpstreamReply:
        assert isinstance(body, bytes), "requests for completions are read whole"
        self.received = Received(headers, body)
        return _Reply(answer(body))


class _Reply(UpstreamReply):
    def __init__(self, given: Answer) -> None:
        self._text = given.text
        self.status = 200
        self.headers = [(b"content-type", given.kind)]
        self.chunks = self._chunks
        self.read = self._read

    async def _chunks(self) -> AsyncIterator[bytes]:
        """Cut where it cannot be convenient: a network does not keep events whole."""
        for start in range(0, len(self._text), 3000):
            yield self._text[start : start + 3000]

    async def _read(self) -> bytes:
        return self._text

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


def answer(body: bytes) -> Answer:
    """The reply to a request; ids and usage for who asks. Equal beginnings of messages have equal tokens."""
    try:
        fields = _FIELDS.decode(body)
    except (ValueError, RecursionError):
        return Answer(b"application/json", b'{"error":{"message":"not a JSON object"}}')
    ids = _is_true(fields.get("return_token_ids"))
    prompt = _ids(fields) if ids else b"null"
    if not _is_true(fields.get("stream")):
        return Answer(b"application/json", _whole(prompt, ids))
    usage = _is_true(_object(fields.get("stream_options")).get("include_usage"))
    return Answer(b"text/event-stream", _events(prompt, ids, usage))


def _whole(prompt: bytes, ids: bool) -> bytes:
    return (
        b'{"id":"c","choices":[{"index":0,"message":{"role":"assistant","content":"%b"},"finish_reason":"stop",'
        b'"token_ids":%b}],"usage":{"prompt_tokens":9,"completion_tokens":5},"prompt_token_ids":%b}'
        % ("".join(_WORDS).encode(), b"[1,2,3,4,5]" if ids else b"null", prompt)
    )


def _events(prompt: bytes, ids: bool, usage: bool) -> bytes:
    head = b'data: {"id":"c","choices":['
    events = [
        head
        + b'{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}],"prompt_token_ids":%b}'
        % prompt
    ]
    for number, word in enumerate(_WORDS):
        finish = b'"stop"' if number == len(_WORDS) - 1 else b"null"
        tokens = b"[%d]" % number if ids else b"null"
        delta = b'{"index":0,"delta":{"content":"%b"},"finish_reason":%b,"token_ids":%b}]}'
        events.append(head + delta % (word.encode(), finish, tokens))
    if usage:
        events.append(head + b'],"usage":{"prompt_tokens":9,"completion_tokens":5}}')
    return b"".join(event + b"\n\n" for event in (*events, b"data: [DONE]"))


def _ids(fields: dict[str, msgspec.Raw]) -> bytes:
    text = bytes(fields.get("messages", fields.get("prompt", b"")))[: MAX_TOKENS * _BYTES_PER_TOKEN]
    whole = len(text) // _BYTES_PER_TOKEN * _BYTES_PER_TOKEN
    tokens = np.frombuffer(text[:whole], dtype="<u4") % 49_152
    return msgspec.json.encode(tokens.tolist())


def _object(value: msgspec.Raw | None) -> dict[str, msgspec.Raw]:
    try:
        return {} if value is None else _FIELDS.decode(value)
    except (ValueError, RecursionError):
        return {}


def _is_true(value: msgspec.Raw | None) -> bool:
    return value is not None and bytes(value) == b"true"
