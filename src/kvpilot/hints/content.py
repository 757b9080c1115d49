"""A look into a request's content, for the little that hints need of it: how many messages, which are marked."""

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


class _Block(msgspec.Struct, gc=False):
    """Only what may be a mark: all else is skipped unread, which is what makes a look cheap."""

    cache_control: Any = None
    prompt_cache_breakpoint: Any = None


class _Item(_Block, gc=False):
    content: list[_Block | list[Any] | _Other] | _Block | _Other = None


_ITEMS = msgspec.json.Decoder(list[_Item | list[Any] | _Other])


@dataclass(frozen=True, slots=True)
class Mark:
    """A cache breakpoint that a client put on an item or on a block of its content.

    ``message``: index of the message it is in, -1 for tools and system text beside the messages.
    """

    value: Any
    message: int = BEFORE_MESSAGES


def count_items(request: HintRequest, place: str) -> int:
    """Length of a list of the body; 0 for anything else."""
    return len(_items(request, place))


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
        if raw is not None and bytes(raw).rfind(needle) >= 0:
            marks += _marks(_items(request, place), key, counts=place in ("messages", "input"))
    return marks


def _marks(items: Sequence[Any], key: str, *, counts: bool) -> list[Mark]:
    mark_of = attrgetter(key)
    marks: list[Mark] = []
    for number, item in enumerate(items):
        if type(item) is not _Item:
            continue
        message = number if counts else BEFORE_MESSAGES
        if type(item.content) is list:
            for block in item.content:
                if type(block) is _Block and (value := mark_of(block)) is not None:
                    marks.append(Mark(value, message))
        if (value := mark_of(item)) is not None:
            marks.append(Mark(value, message))
    return marks


def _items(request: HintRequest, place: str) -> list[Any]:
    """The items of a list of the body, decoded once a request; none where it is no list or cannot be read."""
    found = request.lists.get(place)
    if found is None:
        try:
            found = _ITEMS.decode(request.fields[place])
        except (KeyError, ValueError, RecursionError):
            found = []
        request.lists[place] = found
    return found
