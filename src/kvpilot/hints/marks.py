"""Marks that clients put on single blocks of their content (Anthropic's and OpenAI's cache breakpoints)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import msgspec

from kvpilot.hints.result import HintRequest

MAX_SCAN = 8 * 1024 * 1024
"""Bytes of a body beyond which it is not searched for marks."""
BEFORE_MESSAGES = -1

_Other = str | int | float | bool | None


class _Block(msgspec.Struct):
    """Only what may be a mark: all else is skipped unread, which is what makes a search cheap."""

    cache_control: Any = None
    prompt_cache_breakpoint: Any = None


class _Item(_Block):
    content: list[_Block | list[Any] | _Other] | _Block | _Other = None


_ITEMS = msgspec.json.Decoder(list[_Item | list[Any] | _Other])


@dataclass(frozen=True, slots=True)
class Mark:
    """``message``: index of the message it is in, -1 for tools and system text beside the messages."""

    value: Any
    message: int = BEFORE_MESSAGES


def find_marks(request: HintRequest, key: str, places: Sequence[str], dropped: list[str]) -> list[Mark]:
    """Every ``key`` on an item of ``places`` or on a block of its ``content``, in their order.

    ``messages`` and ``input`` count their items, the other places come before all messages.
    """
    body = request.body
    if len(body) > MAX_SCAN:
        dropped.append(f"{key}: not looked for in a body larger than {MAX_SCAN} bytes")
        return []
    needle = f'{key}"'.encode()  # a text that quotes the key has a backslash before the quote
    if body.rfind(needle) < 0:  # twice as fast as from the front
        return []
    marks: list[Mark] = []
    for place in places:
        raw = request.fields.get(place)
        if raw is not None and memoryview(raw)[0] == ord("[") and needle in bytes(raw):
            marks += _marks(raw, key, place, dropped)
    return marks


def _marks(raw: msgspec.Raw, key: str, place: str, dropped: list[str]) -> list[Mark]:
    try:
        items = _ITEMS.decode(raw)
    except (ValueError, RecursionError):
        dropped.append(f"{place}: not searched for marks, it cannot be read")
        return []
    counts = place in ("messages", "input")
    mark_of = attrgetter(key)
    marks: list[Mark] = []
    for number, item in enumerate(items):
        if not isinstance(item, _Item):
            continue
        message = number if counts else BEFORE_MESSAGES
        if isinstance(item.content, list):
            for block in item.content:
                if isinstance(block, _Block) and (value := mark_of(block)) is not None:
                    marks.append(Mark(value, message))
        if (value := mark_of(item)) is not None:
            marks.append(Mark(value, message))
    return marks
