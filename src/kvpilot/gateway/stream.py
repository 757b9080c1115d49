"""Server-sent events on their way through: read for facts, and without what only kvpilot asked for."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, Literal, Protocol, cast

import msgspec

from kvpilot.gateway.reply import (
    Choice,
    Facts,
    ReadReply,
    Reply,
    read_cut_reply,
    read_reply,
    text_message,
    with_chunk_hashes,
)
from kvpilot.gateway.request import TOKEN_IDS, USAGE

_END = re.compile(rb"(?:\r\n|\n|\r(?=[^\n]))(?:\r\n|\n|\r(?=[^\n]))")
"""A blank line. A carriage return at the very end of what has arrived may still become a CRLF: not yet one."""
_DATA = re.compile(rb"(?:^|[\r\n])data:[ ]?([^\r\n]*)")
_USUAL_HEAD = re.compile(rb'data: \{"id":"[^\[{]*"choices":\[\{"index":0,"delta":')
_USUAL_MIDDLE = b',"logprobs":null,"finish_reason":null,"token_ids":'
_USUAL_END = b"}]}\n\n"
"""A chunk as vLLM writes it in the middle of a chat: head, delta, middle, ids, end."""
_USUAL_TAIL_WITHOUT_IDS = b"%bnull%b" % (_USUAL_MIDDLE, _USUAL_END)
_LISTS = re.compile(rb"(?:\[\d[\d,]*\];)+")
_DONE = b"data: [DONE]\n\n"
_PROMPT_IDS = b'"prompt_token_ids":['
_NEWLINE = re.compile(rb"[\r\n]")
_FINISHED = b'"finish_reason":"'
_EMPTY_DELTAS = (b"", b"{}")


class PlainDelta(msgspec.Struct, forbid_unknown_fields=True):
    """What most deltas are: a piece of an assistant's text."""

    content: str = ""
    role: Literal["assistant"] = "assistant"


_PLAIN_DELTAS = msgspec.json.Decoder(list[PlainDelta])


class EventReader(Protocol):
    """Reads one streamed reply on its way through. ``facts`` are complete after :meth:`finish`."""

    facts: Facts
    has_output: bool
    """Whether output (text or token ids) has been seen."""

    def feed(self, data: bytes) -> bytes:
        """What goes on of the stream's next bytes, cut anywhere."""

    def close(self) -> bytes:
        """What is left when the engine has closed the stream."""

    def finish(self) -> None:
        """Put the message together from what has arrived, whether or not the stream came to its end."""


class EventSplitter:
    """Cuts a stream into events, each with its closing blank line. Reads every byte once or twice, not more."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._tail = b""
        """The last three bytes of what waits: a blank line may have begun there."""

    def feed(self, data: bytes) -> list[bytes]:
        """The events that are complete now."""
        tail, window = self._tail, self._tail + data
        events: list[bytes] = []
        start = 0
        for end in self._ends(window):
            cut = end - len(tail)
            events.append(b"".join((*self._parts, data[start:cut])))
            self._parts.clear()
            start = cut
        if start < len(data):
            self._parts.append(data[start:] if start else data)
        self._tail = (data[start:] if events else window)[-3:]
        return events

    @property
    def empty(self) -> bool:
        return not self._parts

    def rest(self) -> bytes:
        """What is left of an event that was never closed."""
        rest = b"".join(self._parts)
        self._parts, self._tail = [], b""
        return rest

    @staticmethod
    def _ends(buffer: bytes) -> Iterator[int]:
        if b"\r" in buffer:
            for match in _END.finditer(buffer):
                yield match.end()
            return
        search = 0
        # Looking for one byte is a memchr, looking for two is a loop.
        while (at := buffer.find(b"\n", search)) >= 0:
            search = at + 1
            if buffer[search : search + 1] == b"\n":
                search += 1
                yield search


def data_spans(event: bytes) -> list[tuple[int, int]]:
    """Where the values of an event's ``data`` lines are."""
    newline = event.find(b"\n")
    if event.startswith(b"data: ") and newline in (len(event) - 2, -1) and b"\r" not in event:
        return [(6, newline if newline >= 0 else len(event))]
    return [match.span(1) for match in _DATA.finditer(event)]


class PromptIds:
    """Cuts the prompt's ids out of a stream's first event while it arrives: they are nearly all of it.

    ``over`` tells that there is nothing more to be cut.
    """

    def __init__(self, *, wanted: bool) -> None:
        self.over = not wanted
        self.ids = b""
        """The JSON list that was cut out, until it is taken."""
        self._parts: list[memoryview] = []
        self._at = 0

    def cut(self, data: bytes) -> bytes:
        """``data`` with null in the place of the ids."""
        start = 0
        if not self._parts:
            key = data.find(_PROMPT_IDS)
            self.over = key < 0 or not data.startswith(b"data: {") or bool(_NEWLINE.search(data, 0, key))
            if self.over:
                return data
            start = self._at = key + len(_PROMPT_IDS) - 1
        end = data.find(b"]", start) + 1
        self._parts.append(memoryview(data)[start : end or len(data)])
        if not end:
            return data[:start]
        self.over = True
        self.ids = self.rest()
        return b"".join((data[:start], b"null", data[end:]))

    def take(self) -> bytes:
        ids, self.ids = self.ids, b""
        return ids

    def put_back(self, event: bytes, ids: bytes) -> bytes:
        """The first event as it was."""
        return b"".join((event[: self._at], ids, event[self._at + len(b"null") :]))

    def rest(self) -> bytes:
        """What was cut out of an event that has not come to its end."""
        parts, self._parts = self._parts, []
        # Of one piece a view will do as well as bytes, for all that is done with ids, and is no copy.
        return cast("bytes", parts[0]) if len(parts) == 1 else b"".join(parts)


class StreamReader:
    """One streamed reply. ``feed`` takes bytes as they arrive, cut anywhere, and returns what goes on.

    Facts accumulate in ``facts``; all of them are there after :meth:`finish`. ``chunk_hashes`` gives the hashes that
    the first choice's last chunk is to carry, once its ids are among the facts; None: nobody asked for them.
    """

    def __init__(self, added: frozenset[str], chunk_hashes: Callable[[], list[str]] | None = None) -> None:
        self.facts = Facts()
        self._chunk_hashes = chunk_hashes
        self.has_output = False
        """Whether a chunk with output (text or token ids) has been seen."""
        self._hide_ids = TOKEN_IDS in added
        self._hide_usage = USAGE in added
        self._prompt = PromptIds(wanted=self._hide_ids)
        self._splitter = EventSplitter()
        self._held = b""
        self._held_span = (0, 0)
        self._head = b""
        """How the chunks of this reply begin, up to their delta."""
        self._deltas: list[bytes] = []
        self._texts: list[bytes] = []

    def feed(self, data: bytes) -> bytes:
        out: list[bytes] = []
        if not self._prompt.over:
            data = self._prompt.cut(data)
        if self._splitter.empty and data.endswith(b"\n\n") and b"\r" not in data:
            self._whole_events(data, out)
        else:
            for event in self._splitter.feed(data):
                self._event(event, out)
        return out[0] if len(out) == 1 else b"".join(out)

    def close(self) -> bytes:
        """What is left when the engine has closed the stream."""
        out: list[bytes] = []
        if rest := self._splitter.rest() + self._prompt.rest():
            self._event(rest, out)
        return b"".join((*out, self._release()))

    def finish(self) -> None:
        try:
            self.facts.message = self.message()
        except (ValueError, RecursionError):
            # It is in no text (invalid UTF-8, say): then no message is told.
            self.facts.message = b""

    def message(self) -> bytes:
        """The first choice's message as JSON (content, reasoning, tool calls joined from their deltas)."""
        if self._texts:
            text = "".join(msgspec.json.decode(piece, type=str) for piece in self._texts)
            return text_message(msgspec.json.encode(text))
        if not self._deltas:
            return b""
        try:
            plain = _PLAIN_DELTAS.decode(b"[%b]" % b",".join(self._deltas))
        except (ValueError, RecursionError):
            return msgspec.json.encode(join_deltas(self._deltas))
        return text_message(msgspec.json.encode("".join(delta.content for delta in plain)))

    def _whole_events(self, data: bytes, out: list[bytes]) -> None:
        """The usual chunks between the first event and the end go on together."""
        start = 0
        if not self._head:
            start = data.find(b"\n\n") + 2
            self._event(data[:start], out)
        finished = data.find(_FINISHED, start)
        end = len(data) if finished < 0 else max(start, data.rfind(b"\n", 0, finished) + 1)
        if not self._usual_chunks(data[start:end], out):
            end = start
        *events, rest = data[end:].split(b"\n\n")
        for event in events:
            self._event(event + b"\n\n", out, usual=finished < 0)
        if rest:
            self._splitter.feed(rest)

    def _event(self, event: bytes, out: list[bytes], *, usual: bool = True) -> None:
        """Read one event and add to ``out`` what goes on now. Not ``usual``: it hardly is a chunk as most are."""
        if usual and self._usual_chunks(event, out):
            return
        if event == _DONE:
            out += (self._release(), event)
            return
        event, spans, read = self._read(event)
        if read is None:
            # Errors, comments (those may overtake), and anything else that is not a chunk.
            out += (self._release(), event) if spans else (event,)
            return
        reply = read.reply
        self.facts.take(read)
        for choice in reply.choices:
            self._take(choice, read.output_ids)
        if self._hide_usage and not reply.choices and reply.usage is not None:
            out.append(self._release(bytes(reply.system_fingerprint)))
            return
        if self._held:
            out.append(self._release())
        start, end = spans[0]
        if self._hide_ids:
            if self._exists_for_ids_only(reply):
                return
            if read.without_ids != event[start:end]:
                event = b"".join((event[:start], read.without_ids, event[end:]))
                end = start + len(read.without_ids)
        if self._chunk_hashes is not None and any(c.finish_reason for c in reply.choices if c.index == 0):
            data = with_chunk_hashes(event[start:end], self._chunk_hashes())
            event = b"".join((event[:start], data, event[end:]))
            end = start + len(data)
        if self._hide_usage and any(choice.finish_reason for choice in reply.choices):
            # Without our question the engine's fingerprint would be on this chunk; it comes with the next.
            self._held, self._held_span = event, (start, end)
            return
        out.append(event)

    def _read(self, event: bytes) -> tuple[bytes, list[tuple[int, int]], ReadReply | None]:
        """An event, where its data is, and what that says."""
        spans = data_spans(event)
        if self._prompt.ids:
            # It is the first event, and lacks them.
            ids = self._prompt.take()
            read = read_cut_reply(event[slice(*spans[0])], [ids]) if len(spans) == 1 else None
            if read is not None:
                return event, spans, read
            event = self._prompt.put_back(event, ids)
            spans = data_spans(event)
        if len(spans) != 1 or event.endswith(_DONE):
            return event, spans, None
        return event, spans, read_reply(event[slice(*spans[0])])

    def _usual_chunks(self, data: bytes, out: list[bytes]) -> bool:
        """The same for a run of events as most streams have most of, without decoding them; False when one of
        them is not of that kind."""
        if not self._head or not data.startswith(self._head):
            # The head names the reply: it is the same in all of its chunks.
            match = _USUAL_HEAD.match(data)
            if match is None:
                return False
            self._head = match[0]
        head = self._head
        *chunks, rest = data.split(_USUAL_END)
        count = len(chunks)
        # A quote inside a JSON text is escaped: what is counted here are keys.
        if rest or data.count(b'"delta":') != count or data.count(b'"token_ids":') != count:
            return False
        parts = [chunk.partition(_USUAL_MIDDLE) for chunk in chunks]
        deltas = [
            front[len(head) :] for front, _, _ in parts if front.startswith(head) and front.endswith(b"}")
        ]
        ids = [ids for _, _, ids in parts]
        if len(deltas) != count or b"{}" in deltas or not _LISTS.fullmatch(b"%b;" % b";".join(ids)):
            return False
        self._deltas += deltas
        self.facts.output_ids += ids
        self.has_output = True
        if self._held:
            out.append(self._release())
        if self._hide_ids:
            data = _USUAL_TAIL_WITHOUT_IDS.join([*(front for front, _, _ in parts), b""])
        out.append(data)
        return True

    def _take(self, choice: Choice, ids: bytes) -> None:
        if choice.index != 0:
            return
        delta, text = bytes(choice.delta), bytes(choice.text)
        if delta:
            self._deltas.append(delta)
        if text.startswith(b'"'):
            self._texts.append(text)
        if not self.has_output:
            has_text = text not in (b"", b'""') or (
                delta not in _EMPTY_DELTAS and b'"content":""' not in delta
            )
            self.has_output = has_text or ids not in (b"", b"[]")

    @staticmethod
    def _exists_for_ids_only(reply: Reply) -> bool:
        """vLLM sends a chunk for tokens that made no delta only to who wants token ids (or logprobs)."""
        return bool(reply.choices) and all(
            bytes(choice.delta) == b"{}"
            and choice.finish_reason is None
            and bytes(choice.logprobs) == b"null"
            for choice in reply.choices
        )

    def _release(self, fingerprint: bytes = b"null") -> bytes:
        event, self._held = self._held, b""
        if not event or fingerprint in (b"null", b""):
            return event
        start, end = self._held_span
        data = event[start:end].rstrip()
        if not data.endswith(b"}") or b'"system_fingerprint"' in data:
            return event
        return b"".join((event[:start], data[:-1], b',"system_fingerprint":', fingerprint, b"}", event[end:]))


def join_deltas(deltas: list[bytes]) -> dict[str, Any]:
    """A message from its deltas: texts are joined, tool calls by their index, the last of anything else wins."""
    message: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for raw in deltas:
        try:
            delta = msgspec.json.decode(raw)
        except (ValueError, RecursionError):
            continue
        if not isinstance(delta, dict):
            continue
        tool_calls = delta.pop("tool_calls", None)
        _join(message, delta)
        for position, call in enumerate(tool_calls if isinstance(tool_calls, list) else ()):
            if isinstance(call, dict):
                index = call.pop("index", position)
                _join(calls.setdefault(index if isinstance(index, int) else position, {}), call)
    if calls:
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
    return {key: _finished(value) for key, value in message.items()}


_ONCE = frozenset({"role", "id", "type", "name"})


class _Pieces(list[str]):
    """A text still in its pieces: joining it anew with every delta would take quadratic time."""


def _join(into: dict[str, Any], delta: dict[str, Any]) -> None:
    for key, value in delta.items():
        old = into.get(key)
        if isinstance(value, str) and key not in _ONCE:
            if isinstance(old, _Pieces):
                old.append(value)
            else:
                into[key] = _Pieces((value,))
        elif isinstance(value, dict):
            if not isinstance(old, dict):
                old = into[key] = {}
            _join(old, value)
        elif value is not None or key not in into:
            into[key] = value


def _finished(value: Any) -> Any:
    if isinstance(value, _Pieces):
        return "".join(value)
    if isinstance(value, dict):
        return {key: _finished(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_finished(inner) for inner in value]
    return value
