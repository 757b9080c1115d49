"""Anthropic's Messages and OpenAI's Responses: read on their way through for facts, passed on as they are.

vLLM serves both itself and tells no token ids there: the coordinator asks for them (``coordinator.asking``).
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Protocol

import msgspec

from kvpilot.context import anthropic, responses
from kvpilot.gateway.reply import Facts, PromptDetails, Usage
from kvpilot.gateway.stream import EventReader, EventSplitter, data_spans

MESSAGES, RESPONSES = anthropic.PATH, responses.PATH


class ApiReader(EventReader, Protocol):
    """One reply, whole or streamed."""

    def whole(self, text: bytes) -> bytes:
        """What goes on of a whole reply."""


class _MessagesUsage(msgspec.Struct):
    input_tokens: int | None = None
    output_tokens: int = 0
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None

    def usage(self) -> Usage:
        """All of the prompt is what was read from caches, what was written to them, and the rest."""
        read, written = self.cache_read_input_tokens, self.cache_creation_input_tokens
        return Usage(
            prompt_tokens=(self.input_tokens or 0) + (read or 0) + (written or 0),
            completion_tokens=self.output_tokens,
            prompt_tokens_details=PromptDetails(cached_tokens=read) if read is not None else None,
        )


class _Message(msgspec.Struct):
    content: list[dict[str, Any]] = []
    stop_reason: str | None = None
    usage: _MessagesUsage | None = None


class _Delta(msgspec.Struct):
    text: str = ""
    thinking: str = ""
    partial_json: str = ""
    stop_reason: str | None = None


class _Event(msgspec.Struct):
    type: str
    index: int = 0
    message: _Message | None = None
    content_block: dict[str, Any] | None = None
    delta: _Delta | None = None
    usage: _MessagesUsage | None = None


class _Block:
    """A content block of a stream, in its pieces."""

    def __init__(self, start: dict[str, Any]) -> None:
        self._start = start
        self.text: list[str] = []
        self.thinking: list[str] = []
        self.partial_json: list[str] = []

    def whole(self) -> dict[str, Any]:
        block = dict(self._start)
        if self.text:
            block["text"] = str(block.get("text") or "") + "".join(self.text)
        if self.thinking:
            block["thinking"] = str(block.get("thinking") or "") + "".join(self.thinking)
        if self.partial_json:
            try:
                block["input"] = msgspec.json.decode("".join(self.partial_json))
            except (ValueError, RecursionError):
                block["input"] = {}
        return block


class MessagesReader:
    """``management``: the JSON that the reply gets as its ``context_management``, where edits were asked for."""

    def __init__(self, management: bytes = b"") -> None:
        self.facts = Facts()
        self.has_output = False
        self._management = management
        self._splitter = EventSplitter()
        self._blocks: dict[int, _Block] = {}

    def whole(self, text: bytes) -> bytes:
        try:
            message = _MESSAGE.decode(text)
        except (ValueError, RecursionError):
            return text
        self._take(message)
        self._say(message.content)
        return self._managed(text)

    def feed(self, data: bytes) -> bytes:
        out = [self._event(event) for event in self._splitter.feed(data)]
        return out[0] if len(out) == 1 else b"".join(out)

    def close(self) -> bytes:
        rest = self._splitter.rest()
        return self._event(rest) if rest else b""

    def finish(self) -> None:
        if self._blocks:
            self._say([self._blocks[index].whole() for index in sorted(self._blocks)])

    def _event(self, text: bytes) -> bytes:
        spans = data_spans(text)
        if len(spans) != 1:
            return text
        start, end = spans[0]
        try:
            event = _EVENT.decode(text[start:end])
        except (ValueError, RecursionError):
            return text
        match event.type:
            case "message_start" if event.message is not None:
                self._take(event.message)
            case "content_block_start" if event.content_block is not None:
                self._blocks[event.index] = _Block(event.content_block)
            case "content_block_delta" if event.delta is not None and event.index in self._blocks:
                block, delta = self._blocks[event.index], event.delta
                self.has_output = True
                for said, pieces in (
                    (delta.text, block.text),
                    (delta.thinking, block.thinking),
                    (delta.partial_json, block.partial_json),
                ):
                    if said:
                        pieces.append(said)
            case "message_delta":
                reason = event.delta.stop_reason if event.delta is not None else None
                self._take(_Message(stop_reason=reason, usage=event.usage))
                return b"".join((text[:start], self._managed(text[start:end]), text[end:]))
        return text

    def _take(self, message: _Message) -> None:
        self.facts.finish_reason = message.stop_reason or self.facts.finish_reason
        if message.usage is not None and message.usage.input_tokens is not None:
            self.facts.usage = message.usage.usage()

    def _say(self, content: list[dict[str, Any]]) -> None:
        # What is nested too deeply for its decoder to have taken it may be too deep for an encoder.
        with suppress(ValueError, RecursionError):
            said = anthropic.chat_messages({"role": "assistant", "content": content})
            self.facts.message = msgspec.json.encode(said[-1])

    def _managed(self, text: bytes) -> bytes:
        """A JSON object with ``context_management`` in it; an engine's own is not touched."""
        whole = text.rstrip()
        if not self._management or not whole.endswith(b"}") or _says(text, "context_management"):
            return text
        comma = b"" if whole[:-1].strip() == b"{" else b","
        return b"".join((whole[:-1], comma, b'"context_management":', self._management, b"}"))


def _says(text: bytes, key: str) -> bool:
    """Whether a JSON object has a key; True for what is none."""
    if key.encode() not in text:
        return False
    try:
        return key in _FIELDS.decode(text)
    except (ValueError, RecursionError):
        return True


class _InputDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _ResponsesUsage(msgspec.Struct):
    input_tokens: int = 0
    output_tokens: int = 0
    input_tokens_details: _InputDetails | None = None


class _Response(msgspec.Struct):
    status: str | None = None
    output: list[dict[str, Any]] = []
    usage: _ResponsesUsage | None = None


class _ResponseEvent(msgspec.Struct):
    type: str
    response: _Response | None = None


class ResponsesReader:
    def __init__(self) -> None:
        self.facts = Facts()
        self.has_output = False
        self._splitter = EventSplitter()

    def whole(self, text: bytes) -> bytes:
        with suppress(ValueError, RecursionError):
            self._take(_RESPONSE.decode(text))
        return text

    def feed(self, data: bytes) -> bytes:
        for event in self._splitter.feed(data):
            self._event(event)
        return data

    def close(self) -> bytes:
        if rest := self._splitter.rest():
            self._event(rest)
        return b""

    def finish(self) -> None:
        """The last event has all of the reply; of one that broke off nothing is said."""

    def _event(self, text: bytes) -> None:
        if b".delta" in text:
            self.has_output = True
        if b'"response":' not in text:
            return
        spans = data_spans(text)
        try:
            event = _RESPONSE_EVENT.decode(text[slice(*spans[0])])
        except (ValueError, RecursionError, IndexError):
            return
        if event.response is not None and event.response.usage is not None:
            self._take(event.response)

    def _take(self, response: _Response) -> None:
        self.facts.finish_reason = response.status
        if said := [m for m in responses.chat_messages(response.output) if m.get("role") == "assistant"]:
            with suppress(ValueError, RecursionError):
                self.facts.message = msgspec.json.encode(said[-1])
        if (usage := response.usage) is not None:
            details = usage.input_tokens_details
            self.facts.usage = Usage(
                prompt_tokens=usage.input_tokens,
                completion_tokens=usage.output_tokens,
                prompt_tokens_details=PromptDetails(details.cached_tokens) if details else None,
            )


_MESSAGE = msgspec.json.Decoder(_Message)
_EVENT = msgspec.json.Decoder(_Event)
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_RESPONSE = msgspec.json.Decoder(_Response)
_RESPONSE_EVENT = msgspec.json.Decoder(_ResponseEvent)
