"""Where the messages of a request lie in the prompt's text. Pure; offsets are bytes of the engine's tokens.

Two ways. *By template*: the template rendered over the first k messages ends where message k ends in the full
prompt, exactly. Templates that treat a last message in their own way (a kept thought, a closed tool group) are
asked again with a stand-in message behind it. *By search*: each message's text is looked for behind the one
before. Template text between two messages (tools among it) then goes to the first: what stands before a message's
own text does not change with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import numpy as np

from kvpilot.context.pieces import Piece, tool_shapes
from kvpilot.context.render import RenderError
from kvpilot.context.segmented import Span
from kvpilot.context.vocabulary import TokenText
from kvpilot.domain import SegmentKind

Prepared = Mapping[str, Any]
Render = Callable[[Sequence[Prepared], bool], bytes]
"""Messages, with tools or not → bytes of their prompt, no generation prompt. Raises RenderError."""

_SHORT = 24
"""Texts of fewer bytes may turn up by chance: those that end at a special token are preferred."""
_TRIES = 50
_STAND_IN = "kvpilot"
_FOLLOWING = (("tool",), ("tool", "user"), ("user",))
"""Roles of stand-ins behind a message: the running turn goes on, an old one goes on, a new one begins."""


@dataclass(slots=True)
class Layout:
    """Byte offsets: message ``k`` is ``[ends[k - 1], ends[k])``, message 0 starts at ``first``."""

    first: int = 0
    ends: list[int] = field(default_factory=list)
    tools: Span | None = None
    per_tool: list[Span] = field(default_factory=list)
    inexact: set[int] = field(default_factory=set)
    """Messages whose end is not certain; -1 when it is not where the first begins."""

    def span(self, message: int) -> Span:
        return (self.ends[message - 1] if message else self.first, self.ends[message])


class Finder:
    """Looks for pieces of messages in a prompt's text."""

    def __init__(self, text: TokenText, normalize: Callable[[str], bytes]) -> None:
        self.data = text.data
        self.special = text.special_starts()
        self._normalize = normalize

    def piece(self, piece: Piece, start: int, end: int) -> Span | None:
        """The first place of the piece in ``[start, end)``: all its needles, one behind the other."""
        first: int | None = None
        for needle in piece.needles:
            found = self.any_of(needle, start, end)
            if found is None:
                return None
            first = found[0] if first is None else first
            start = found[1]
        return None if first is None else (first, start)

    def any_of(self, shapes: Sequence[str], start: int, end: int) -> Span | None:
        """The place of the first of ``shapes`` that is there at all."""
        for shape in shapes:
            needle = self._normalize(shape)
            at = self._find(needle, start, end) if needle else -1
            if at >= 0:
                return at, at + len(needle)
        return None

    def _find(self, needle: bytes, start: int, end: int) -> int:
        first = self.data.find(needle, start, end)
        if first < 0 or len(needle) >= _SHORT:
            return first
        at = first
        for _ in range(_TRIES):
            if self._at_border(at + len(needle)):
                return at
            at = self.data.find(needle, at + 1, end)
            if at < 0:
                break
        return first

    def without(self, span: Span) -> Finder:
        """One that finds nothing in ``span``."""
        other = copy(self)
        other.data = self.data[: span[0]] + bytes(span[1] - span[0]) + self.data[span[1] :]
        return other

    def _at_border(self, offset: int) -> bool:
        return offset in self.special or offset == len(self.data)

    def pieces(self, pieces: Sequence[Piece], start: int, end: int) -> list[tuple[Piece, Span]]:
        """Those pieces that are there, one behind the other."""
        found = []
        for piece in pieces:
            place = self.piece(piece, start, end)
            if place is not None:
                found.append((piece, place))
                start = place[1]
        return found

    def tools(self, tools: Sequence[Mapping[str, Any]], start: int, end: int) -> list[Span]:
        """Each tool's JSON, or nothing at all when one of them is not there as it is."""
        spans: list[Span] = []
        for tool in tools:
            found = self.any_of(tool_shapes(tool), spans[-1][1] if spans else start, end)
            if found is None:
                return []
            spans.append(found)
        return spans


class TemplateAlignment:
    """Message ends by rendering prefixes of the conversation. ``messages`` are prepared for the template."""

    def __init__(
        self,
        finder: Finder,
        render: Render,
        messages: Sequence[Prepared],
        pieces: Sequence[Sequence[Piece]],
    ) -> None:
        self._finder = finder
        self._text = finder.data
        self._render = render
        self._messages = messages
        self._pieces = pieces
        self._stand_ins: dict[tuple[str, ...], tuple[bytes, ...]] = {}

    def ends(self, known: Sequence[int]) -> tuple[list[int], set[int]]:
        """The end of every message, and which of them are not exact; ``known``: leading ends already known."""
        ends: list[int | None] = list(known)
        at = known[-1] if known else 0
        for number in range(len(known), len(self._messages)):
            end = self._end_after(number, at)
            ends.append(end)
            at = at if end is None else end
        return self._fill(ends), {number for number, end in enumerate(ends) if end is None}

    def first(self, end: int) -> int:
        """Where message 0 begins: behind what the template writes unasked (only told for a user message)."""
        tails = self._stand_in(("user",)) if self._messages[0].get("role") == "user" else ()
        header = tails[0].partition(_STAND_IN.encode())[0] if tails else b""
        return max(0, self._text.find(header, 0, end)) if header else 0

    def _end_after(self, number: int, at: int) -> int | None:
        head = self._messages[: number + 1]
        alone = self._try(head)
        if alone is not None and len(alone) >= at and self._text.startswith(alone):
            return len(alone)
        seen = [] if alone is None else [alone]
        following = _FOLLOWING if self._next_role(number) == "tool" else _FOLLOWING[::-1]
        for roles in following:
            tails = self._stand_in(roles)
            followed = self._try([*head, *map(_stand_in_message, roles)]) if tails else None
            if followed is None:
                continue
            for tail in tails:
                stem = followed.removesuffix(tail)
                if at <= len(stem) < len(followed) and self._text.startswith(stem):
                    return len(stem)
            seen.append(followed)
        # The renderings part from the prompt: behind the message's own text, the message ends there.
        for other in seen:
            shared = common_length(self._text, other)
            pieces = self._pieces[number]
            found = self._finder.piece(pieces[-1], at, shared) if pieces and shared > at else None
            if found is not None:
                trailed = self._with_trailer(number, found[1])
                return shared if trailed is None else trailed
        return None

    def _next_role(self, number: int) -> Any:
        return self._messages[number + 1].get("role") if number + 1 < len(self._messages) else None

    def _fill(self, ends: list[int | None]) -> list[int]:
        """Ends that the template did not tell: looked for between those that it did."""
        filled: list[int] = []
        for number, end in enumerate(ends):
            at = filled[-1] if filled else 0
            if end is None:
                limit = next((known for known in ends[number:] if known is not None), len(self._text))
                found = self._finder.pieces(self._pieces[number], at, limit)
                end = found[-1][1][1] if found else at
                end = min(limit, self._with_trailer(number, end) or end)
            filled.append(max(at, end))
        return filled

    def _with_trailer(self, number: int, end: int) -> int | None:
        """The end of a message whose own text ends at ``end``, if the template's trailer is there, too."""
        last = self._text[max(0, end - _SHORT) : end]
        for tools in (True, False):
            alone = self._try(self._messages[: number + 1], tools=tools)
            if alone is not None and last in alone:
                trailer = alone[alone.rfind(last) + len(last) :]
                return end + len(trailer) if self._text.startswith(trailer, end) else None
        return None

    def _stand_in(self, roles: tuple[str, ...]) -> tuple[bytes, ...]:
        """What following messages of these roles add to a prompt, also when the first is not the first of its
        role (templates group tool results); nothing when the template won't tell."""
        if roles not in self._stand_ins:
            self._stand_ins[roles] = self._learn([_stand_in_message(role) for role in roles])
        return self._stand_ins[roles]

    def _learn(self, extra: Sequence[Prepared]) -> tuple[bytes, ...]:
        for length in range(1, min(4, len(self._messages)) + 1):
            base = self._messages[:length]
            alone, once = self._try(base), self._try([*base, *extra])
            if alone is not None and once is not None and once.startswith(alone):
                again = self._try([*base, extra[0], *extra])
                grouped = again[common_length(once, again) :] if again is not None else b""
                return tuple(tail for tail in (once[len(alone) :], grouped) if tail)
        return ()

    def _try(self, messages: Sequence[Prepared], *, tools: bool = True) -> bytes | None:
        try:
            return self._render(messages, tools)
        except RenderError:
            return None


def search_layout(
    finder: Finder, pieces: Sequence[Sequence[Piece]], tools: Sequence[Mapping[str, Any]]
) -> Layout | None:
    """Layout by looking for each message's text behind the one before, and not in the tools; None without any.

    An end is certain only between two messages that are there whole (but for thoughts, which templates drop) and
    could, in the order of all, be nowhere else.
    """
    layout = Layout(per_tool=finder.tools(tools, 0, len(finder.data)))
    if layout.per_tool:
        layout.tools = (layout.per_tool[0][0], layout.per_tool[-1][1])
        finder = finder.without(layout.tools)
    places, doubtful = _places(finder, pieces)
    if not any(places):
        return None
    layout.first = at = places[0][0] if places[0] else 0
    for place, following in zip_longest(places, places[1:]):
        at = following[0] if following else place[1] if place else at
        layout.ends.append(at)
    if layout.tools and layout.tools[0] >= at:
        layout.ends[-1] = layout.tools[1]
    layout.inexact = doubtful | {number - 1 for number in doubtful}
    # Tools in a shape of the template's own, behind the last message: where that one ends nobody can tell.
    if not layout.tools and any(name in finder.data[at:] for name in _names(tools)):
        layout.inexact.add(len(places) - 1)
    return layout


def _places(finder: Finder, pieces: Sequence[Sequence[Piece]]) -> tuple[list[Span | None], set[int]]:
    """Of each message where its first text begins and its last ends, and which may be elsewhere."""
    places: list[Span | None] = []
    doubtful: set[int] = set()
    at = 0
    for number, message in enumerate(pieces):
        found = finder.pieces(message, at, len(finder.data))
        places.append((found[0][1][0], found[-1][1][1]) if found else None)
        at = found[-1][1][1] if found else at
        there = sum(piece.kind is not SegmentKind.THINKING for piece, _ in found)
        if not found:
            doubtful |= {max(0, number - 1), number}  # the one before may have been found too far behind
        elif there < sum(piece.kind is not SegmentKind.THINKING for piece in message):
            doubtful.add(number)
    texts = [(number, finder.data[slice(*place)]) for number, place in enumerate(places) if place]
    foremost, at = {}, 0
    for number, text in texts:
        foremost[number] = finder.data.find(text, at)
        at = foremost[number] + len(text)
    at = len(finder.data)
    for number, text in reversed(texts):
        at = finder.data.rfind(text, 0, at)
        if at != foremost[number]:
            doubtful.add(number)
    return places, doubtful


def _names(tools: Sequence[Mapping[str, Any]]) -> list[bytes]:
    names = [(tool.get("function") or tool).get("name") for tool in tools]
    return [name.encode() for name in names if isinstance(name, str) and name]


def inserted_span(text: bytes, without: bytes, special: set[int]) -> Span | None:
    """Where ``text`` has something that ``without`` lacks, when that is one single insertion.

    An insertion can often be read in several ways (``<a><b>`` into ``<a>``: before or behind): the one that
    begins with a special token is preferred.
    """
    length = len(text) - len(without)
    start = common_length(text, without)
    if length <= 0 or text[start + length :] != without[start:]:
        return None
    slack = common_length(text[:start][::-1], text[: start + length][::-1])
    start = min((at for at in special if start - slack <= at <= start), default=start)
    return start, start + length


def common_length(a: bytes, b: bytes) -> int:
    """Length of the common prefix."""
    length = min(len(a), len(b))
    differs = np.frombuffer(a, np.uint8, length) != np.frombuffer(b, np.uint8, length)
    return int(differs.argmax()) if differs.any() else length


def _stand_in_message(role: str) -> Prepared:
    return {"role": role, "content": _STAND_IN}
