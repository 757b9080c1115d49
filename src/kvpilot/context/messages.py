"""Names for the content of chat messages: equal names mean equal messages, however the JSON was written."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

_canonical = msgspec.json.Encoder(order="deterministic")


def message_hashes(body: Mapping[str, Any]) -> list[bytes]:
    """Chained 16-byte hashes of a chat request: its tools list first, then each message.

    The hash at index ``i + 1`` names the tools and the messages up to and with ``messages[i]``, so that one
    hash tells whether two conversations agree so far. Key order and spacing of the JSON do not matter; order
    of tools and messages does. Absent, null and empty ``tools`` are the same.
    """
    state = hashlib.blake2b(_canonical.encode(body.get("tools") or None), digest_size=16).digest()
    hashes = [state]
    messages = body.get("messages")
    for message in messages if isinstance(messages, list) else ():
        state = hashlib.blake2b(_canonical.encode(message), key=state, digest_size=16).digest()
        hashes.append(state)
    return hashes


def common_prefix(a: Sequence[bytes], b: Sequence[bytes]) -> int:
    """How many leading hashes two lists have in common, each of which stands for all before it; O(log n), and O(1)
    where one goes on with the other.

    Of two conversations: 0 = not even the tools, 1 + n messages.
    """
    low, high = 0, min(len(a), len(b))
    if high and a[high - 1] == b[high - 1]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if a[middle - 1] == b[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
