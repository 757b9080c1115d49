"""Marks that clients put on single blocks of their content (Anthropic's and OpenAI's cache breakpoints)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from kvpilot.hints.result import HintRequest

MAX_SCAN = 8 * 1024 * 1024
"""Bytes of a body beyond which it is not searched for marks."""
BEFORE_MESSAGES = -1

_ITEMS = msgspec.json.Decoder(list[msgspec.Raw])


@dataclass(frozen=True, slots=True)
class Mark:
    """``message``: index of the message it is in, -1 for tools and system text beside the messages."""

    value: Any
    message: int = BEFORE_MESSAGES


def find_marks(request: HintRequest, key: str, places: Sequence[str], dropped: list[str]) -> list[Mark]:
    """Every ``key`` on an item of ``places`` or on a block of its ``content``, in their order.

    ``messages`` and ``input`` count their items, the other places come before all messages. Only items that
    have the key somewhere are decoded.
    """
    needle = f'{key}"'.encode()  # a text that quotes the key has a backslash there
    if len(request.body) > MAX_SCAN:
        dropped.append(f"{key}: not looked for in a body larger than {MAX_SCAN} bytes")
        return []
    if needle not in request.body:
        return []
    marks: list[Mark] = []
    for place in places:
        for number, item in enumerate(_items(request.fields.get(place))):
            text = bytes(item)
            if needle in text:
                message = number if place in ("messages", "input") else BEFORE_MESSAGES
                marks += [Mark(value, message) for value in _values(text, key)]
    return marks


def _items(raw: msgspec.Raw | None) -> list[msgspec.Raw]:
    try:
        return [] if raw is None or memoryview(raw)[0] != ord("[") else _ITEMS.decode(raw)
    except (ValueError, RecursionError):
        return []


def _values(text: bytes, key: str) -> list[Any]:
    try:
        item = msgspec.json.decode(text)
    except (ValueError, RecursionError):
        return []
    if not isinstance(item, dict):
        return []
    content = item.get("content")
    blocks = [*content, item] if isinstance(content, list) else [item]
    values = (block.get(key) for block in blocks if isinstance(block, dict))
    return [value for value in values if value is not None]
