"""Token ids out of JSON text, fast: a prompt of 25,000 tokens comes back with every reply."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

import msgspec
import numpy as np

from kvpilot.domain import TokenArray

_LIST = msgspec.json.Decoder(list[int])
_ONLY_NUMBERS = bytes(range(0x30, 0x3A)) + b","
_NOTHING: TokenArray = np.empty(0, dtype="<u4")


def parse_tokens(text: msgspec.Raw | bytes) -> TokenArray | None:
    """A JSON list of token ids as an array; None when it is not one (``null`` included)."""
    raw = bytes(text)
    try:
        # Compact, as engines write it: numpy reads it in two thirds of the time of a JSON decoder.
        if raw[:1] == b"[" and not raw[1:-1].translate(None, _ONLY_NUMBERS):
            tokens = np.fromstring(raw[1:-1], dtype=np.uint64, sep=",")
            if len(tokens) == raw.count(b",") + 1 and int(tokens.max()) < 2**32:
                return tokens.astype("<u4")
        return np.asarray(_LIST.decode(raw), dtype="<u4")
    except (ValueError, OverflowError, RecursionError):
        return None


def common_tokens(a: TokenArray, b: TokenArray) -> int:
    """Length of the common prefix."""
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length


class PromptParser:
    """Parses prompts that mostly begin with the one before in their thread: only what a context grew by is read.

    ``max_bytes``: JSON text and tokens remembered; the threads that were quiet for longest are forgotten first.
    """

    def __init__(self, max_bytes: int = 64 * 1024 * 1024) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._seen: OrderedDict[Hashable, tuple[bytes, TokenArray]] = OrderedDict()
        """Text without its closing bracket, and its tokens."""

    def parse(self, raw: bytes, thread: Hashable) -> TokenArray | None:
        """Same as :func:`parse_tokens`."""
        head, tokens = self._take(thread)
        # Behind a known head follows a comma, or only the closing bracket.
        if len(head) > 1 and raw.startswith(head) and raw[len(head) : len(head) + 1] in (b",", b"]"):
            if len(raw) > len(head) + 1:
                tail = parse_tokens(b"[" + raw[len(head) + 1 :])
                if tail is None:
                    return None
                tokens = np.concatenate((tokens, tail))
        elif (parsed := parse_tokens(raw)) is not None:
            tokens = parsed
        else:
            return None
        self._seen[thread] = raw[:-1], tokens
        self._bytes += len(raw) - 1 + tokens.nbytes
        while self._bytes > self._max_bytes:
            self.forget(next(iter(self._seen)))
        return tokens

    def forget(self, thread: Hashable) -> None:
        """The thread has ended."""
        self._take(thread)

    def _take(self, thread: Hashable) -> tuple[bytes, TokenArray]:
        head, tokens = self._seen.pop(thread, (b"", _NOTHING))
        self._bytes -= len(head) + tokens.nbytes
        return head, tokens
