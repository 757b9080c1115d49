"""An engine that takes everything: no sockets, no model, replies as vLLM writes them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from types import TracebackType

import msgspec
import numpy as np

from kvpilot.bench.fuzz import other_replies
from kvpilot.bench.fuzz.cases import CHAT
from kvpilot.config import Config
from kvpilot.context.conversation import Body, read_request
from kvpilot.context.engine_render import EngineRenderError
from kvpilot.domain import TokenArray
from kvpilot.gateway.editing import COUNT_PATH
from kvpilot.gateway.http_client import Body as RequestBody
from kvpilot.gateway.http_client import Headers
from kvpilot.gateway.other_apis import MESSAGES, RESPONSES
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
    """``received`` is the last request but for those that count. A request ends up here instead of on a connection."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.received: Received | None = None

    async def send(self, method: str, target: str, headers: Headers, body: RequestBody) -> UpstreamReply:
        assert isinstance(body, bytes | tuple), "requests for completions are read whole"
        body = b"".join(body) if isinstance(body, tuple) else body
        path = target.partition("?")[0]
        if path == COUNT_PATH:
            count = b'{"input_tokens":%d}' % (len(body) // _BYTES_PER_TOKEN)
            return _Reply(Answer(b"application/json", count))
        self.received = Received(headers, body)
        return _Reply(answer(body, path))


class _Reply(UpstreamReply):
    def __init__(self, given: Answer) -> None:
        self._text = given.text
        self._read_to = 0
        self.status = 200
        self.headers = [(b"content-type", given.kind)]
        self.chunks = self._chunks
        self.read = self._read

    async def _chunks(self) -> AsyncIterator[bytes]:
        """Cut where it cannot be convenient: a network does not keep events whole."""
        size = (3000, 300, 64 * 1024)[len(self._text) % 3]
        for start in range(0, len(self._text), size):
            self._read_to = start + size
            yield self._text[start : start + size]

    @property
    def ended(self) -> bool:
        return self._read_to >= len(self._text)

    async def _read(self) -> bytes:
        return self._text

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


def answer(body: bytes, path: str = CHAT) -> Answer:
    """The reply to a request; ids and usage for who asks. Equal beginnings of messages have equal tokens."""
    try:
        fields = _FIELDS.decode(body)
    except (ValueError, RecursionError):
        return Answer(b"application/json", b'{"error":{"message":"not a JSON object"}}')
    if path in (MESSAGES, RESPONSES):
        return _other_answer(path, body, streamed=_is_true(fields.get("stream")))
    ids = _is_true(fields.get("return_token_ids"))
    prompt = _ids(fields) if ids else b"null"
    if not _is_true(fields.get("stream")):
        return Answer(b"application/json", _whole(prompt, ids))
    usage = _is_true(_object(fields.get("stream_options")).get("include_usage"))
    return Answer(b"text/event-stream", _events(prompt, ids, usage))


def _other_answer(path: str, body: bytes, *, streamed: bool) -> Answer:
    try:
        count = len(render(read_request(path, body)))
    except EngineRenderError:
        count = 0
    whole, events = other_replies.response, other_replies.response_events
    if path == MESSAGES:
        whole, events = other_replies.message, other_replies.message_events
    if streamed:
        return Answer(b"text/event-stream", events(count))
    return Answer(b"application/json", whole(count))


def render(chat: Body) -> TokenArray:
    """The tokens of a chat: what it goes on with keeps those before. Raises EngineRenderError where a template would:
    without messages, and for system messages behind others."""
    messages = chat.get("messages")
    if not isinstance(messages, list) or not messages:
        raise EngineRenderError("no messages")
    system = [isinstance(message, dict) and message.get("role") == "system" for message in messages]
    if system != sorted(system, reverse=True):
        raise EngineRenderError("system messages come first")
    try:
        return _tokens(b"".join(map(msgspec.json.encode, messages)))
    except (ValueError, RecursionError) as error:
        raise EngineRenderError(str(error)) from None


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
        + b'{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],'
        + b'"prompt_token_ids":%b}' % prompt
    ]
    for number, word in enumerate(_WORDS):
        finish = b'"stop"' if number == len(_WORDS) - 1 else b"null"
        tokens = b"[%d]" % number if ids else b"null"
        delta = b'{"index":0,"delta":{"content":"%b"},"logprobs":null,"finish_reason":%b,"token_ids":%b}]}'
        events.append(head + delta % (word.encode(), finish, tokens))
    if usage:
        events.append(head + b'],"usage":{"prompt_tokens":9,"completion_tokens":5}}')
    return b"".join(event + b"\n\n" for event in (*events, b"data: [DONE]"))


def _ids(fields: dict[str, msgspec.Raw]) -> bytes:
    return msgspec.json.encode(_tokens(bytes(fields.get("messages", fields.get("prompt", b"")))).tolist())


def _tokens(text: bytes) -> TokenArray:
    whole = min(len(text) // _BYTES_PER_TOKEN, MAX_TOKENS) * _BYTES_PER_TOKEN
    return np.frombuffer(text[:whole], dtype="<u4") % np.uint32(49_152)


def _object(value: msgspec.Raw | None) -> dict[str, msgspec.Raw]:
    try:
        return {} if value is None else _FIELDS.decode(value)
    except (ValueError, RecursionError):
        return {}


def _is_true(value: msgspec.Raw | None) -> bool:
    return value is not None and bytes(value) == b"true"
