"""A look into a request's content, for the little that hints need of it: how many messages, which are marked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from kvpilot.hints.result import HintRequest

MAX_SCAN = 8 * 1024 * 1024
"""Bytes of a body beyond which it is not searched for marks."""
BEFORE_MESSAGES = -1
KEYS = ("cache_control", "prompt_cache_breakpoint")

_Other = str | int | float | bool | None


class _Block(msgspec.Struct, gc=False):
    """Only what may be a mark: all else is skipped unread, which is what makes a look cheap."""

    cache_control: Any = None
    prompt_cache_breakpoint: Any = None


class _Item(_Block, gc=False):
    content: list[_Block | list[Any] | _Other] | _Block | _Other = None


_UNMARKED = _Item(content=[_Block()])
"""What most of a long conversation consists of."""
_ITEMS = msgspec.json.Decoder(list[_Item | list[Any] | _Other])
_KEYS = {key: f'"{key}"'.encode() for key in KEYS}
"""As JSON has them; a text that quotes a key has a backslash before the quote, or is looked into in vain."""


class Mark(NamedTuple):
    """A cache breakpoint that a client put on an item or on a block of its content.

    ``message``: index of the message it is in, -1 for tools and system text beside the messages.
    """

    value: Any
    message: int = BEFORE_MESSAGES


def count_items(request: HintRequest, place: str) -> int:
    """Length of a list of the body; 0 for anything else."""
    return len(_items(request, place))


def find_marks(request: HintRequest, key: str, places: Sequence[str], dropped: list[str]) -> Sequence[Mark]:
    """Every ``key`` on an item of ``places`` or on a block of its ``content``, in their order.

    ``messages`` and ``input`` count their items, the other places come before all messages.
    """
    if not may_be_marked(request, key):
        return ()
    if len(request.body) > MAX_SCAN:
        dropped.append(f"{key}: not looked for in a body larger than {MAX_SCAN} bytes")
        return ()
    marks: list[Mark] = []
    for place in places:
        if place in request.fields:
            marks += _marks(request, place).get(key, ())
    return marks


def may_be_marked(request: HintRequest, key: str) -> bool:
    """Whether ``key`` is anywhere in the body, as far as that is known, asked once; searched from behind, where marks
    mostly are."""
    name = f"a {key}"
    found: bool | None = request.seen.get(name)
    if found is None:
        found = len(request.body) > MAX_SCAN or request.body.rfind(_KEYS[key]) >= 0
        request.seen[name] = found
    return found


def _marks(request: HintRequest, place: str) -> dict[str, list[Mark]]:
    """The marks in a list of the body by their key; found once a request, for all keys."""
    name = f"marks of {place}"
    found: dict[str, list[Mark]] | None = request.seen.get(name)
    if found is None:
        found = request.seen[name] = _find(_items(request, place), counts=place in ("messages", "input"))
    return found


def _find(items: Sequence[Any], *, counts: bool) -> dict[str, list[Mark]]:
    found: dict[str, list[Mark]] = {}

    def note(block: _Block, number: int) -> None:
        for key in KEYS:
            if (value := getattr(block, key)) is not None:
                found.setdefault(key, []).append(Mark(value, number if counts else BEFORE_MESSAGES))

    # Hundreds of items, hardly any of them marked: one that is not costs a comparison, or a few.
    for number, item in enumerate(items):
        if item == _UNMARKED or type(item) is not _Item:
            continue
        if type(item.content) is list:
            for block in item.content:
                if type(block) is _Block and not (
                    block.cache_control is None and block.prompt_cache_breakpoint is None
                ):
                    note(block, number)
        if not (item.cache_control is None and item.prompt_cache_breakpoint is None):
            note(item, number)
    return found


def _items(request: HintRequest, place: str) -> list[Any]:
    """The items of a list of the body, decoded once a request; none where it is no list or cannot be read."""
    name = f"items of {place}"
    found: list[Any] | None = request.seen.get(name)
    if found is None:
        try:
            found = _ITEMS.decode(request.fields[place])
        except (KeyError, ValueError, RecursionError):
            found = []
        request.seen[name] = found
    return found
