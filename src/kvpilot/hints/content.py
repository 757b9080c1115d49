"""A look into a request's content, for the little that hints need of it: how many messages, which are marked."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import msgspec

from kvpilot.hints.body import MARKS, MAX_SCAN, Marked, Unmarked, items_of
from kvpilot.hints.result import HintRequest

BEFORE_MESSAGES = -1

_COUNTED = ("messages", "input")
_Other = str | int | float | bool | None


class Mark(msgspec.Struct, frozen=True):
    """A cache breakpoint that a client put on an item or on a block of its content.

    ``message``: index of the message it is in, -1 for tools and system text beside the messages.
    """

    value: Any
    message: int = BEFORE_MESSAGES


class _Block(msgspec.Struct, gc=False):
    """Only what may be a mark: all else is skipped unread, which is what makes a look cheap."""

    cache_control: Any = None
    prompt_cache_breakpoint: Any = None


class _Item(_Block, gc=False):
    content: list[_Block | list[Any] | _Other] | _Block | _Other = None


_decode = msgspec.json.Decoder(_Item | list[Any] | _Other).decode


def count_items(request: HintRequest, place: str) -> int:
    """Length of a list of the body; 0 for anything else."""
    return len(_items(request, place))


def find_marks(
    request: HintRequest, key: str, places: Sequence[str], dropped: list[str], most: int | None = None
) -> list[Mark]:
    """Every ``key`` on an item of ``places`` or on a block of its ``content``, in their order; no more than ``most``.

    ``messages`` and ``input`` count their items, the other places come before all messages.
    """
    if not may_be_marked(request, key):
        return []
    if len(request.body) > MAX_SCAN:
        dropped.append(f"{key}: not looked for in a body larger than {MAX_SCAN} bytes")
        return []
    marks: list[Mark] = []
    for place in places:
        items = _items(request, place)
        for number in _having(MARKS[key], items):
            for carrier in _carriers(items[number]):
                if (value := getattr(carrier, key, None)) is not None:
                    marks.append(Mark(value, number if place in _COUNTED else BEFORE_MESSAGES))
            if most is not None and len(marks) >= most:
                return marks[:most]
    return marks


def may_be_marked(request: HintRequest, key: str) -> bool:
    """Whether ``key`` is anywhere in the body, as far as that is known."""
    fields = request.fields
    if isinstance(fields, Unmarked):
        return False
    if isinstance(fields, Marked):
        return key in fields.keys_there
    return len(request.body) > MAX_SCAN or request.body.rfind(MARKS[key]) >= 0


def _having(text: bytes, items: Sequence[msgspec.Raw]) -> list[int]:
    """Indices of the items with ``text`` in them: hardly any of hundreds, so they are searched together."""
    joined = b"".join(items)
    at = joined.rfind(text)
    if at < 0:
        return []
    starts = [0, *accumulate(map(len, items))]
    found = []
    while at >= 0:
        number = bisect_right(starts, at) - 1
        found.append(number)
        at = joined.rfind(text, 0, starts[number])
    found.reverse()
    return found


def _carriers(item: msgspec.Raw) -> Sequence[object]:
    """What may carry a mark: the blocks of an item's content, then itself."""
    try:
        decoded = _decode(item)
    except (ValueError, RecursionError):
        return ()
    content = getattr(decoded, "content", None)
    return (*content, decoded) if type(content) is list else (decoded,)


def _items(request: HintRequest, place: str) -> list[msgspec.Raw]:
    """The items of a list of the body, found once a request; none where it is no list."""
    if isinstance(request.fields, Marked):
        return request.fields.lists.get(place, [])
    name = f"items of {place}"
    found: list[msgspec.Raw] | None = request.seen.get(name)
    if found is None:
        found = request.seen[name] = items_of(request.fields.get(place))
    return found
