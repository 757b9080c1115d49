"""Chunks of a context in LMCache's scheme.

A context is cut into chunks of ``chunk_size`` tokens; an incomplete last chunk has no hash. The hash of a
chunk is ``blake3(hash of the chunk before ‖ its tokens as big-endian uint32)``, so it names the whole prefix
up to its end. Source: ``lmcache/v1/multiprocess/token_hasher.py`` of LMCache 0.5.6, algorithm ``blake3``.
"""

from __future__ import annotations

from collections.abc import Sequence

from blake3 import blake3

from kvpilot.domain import TokenArray

HASH_BYTES = 32
"""Length of a chunk hash."""

_ROOT = blake3((0).to_bytes(8, "big") + (0).to_bytes(4, "big")).digest()
_SHORT_DIGITS = 16
_FULL_DIGITS = 2 * HASH_BYTES


class ChunkHasher:
    """Hashes contexts and projects token spans to chunks, for one chunk size (in tokens)."""

    def __init__(self, chunk_size: int = 256) -> None:
        if chunk_size < 1:
            raise ValueError(f"chunk size must be at least 1 token, not {chunk_size}")
        self.chunk_size = chunk_size

    def hashes(self, tokens: TokenArray, *, known: Sequence[bytes] = ()) -> list[bytes]:
        """Hashes of all complete chunks of ``tokens``, head first.

        ``known`` are the hashes of its leading chunks where the caller already has them: they are taken as
        they are and hashing goes on behind them. More of them than ``tokens`` has chunks are cut off.
        """
        size = self.chunk_size
        count = len(tokens) // size
        hashes = list(known[:count])
        done = len(hashes)
        previous = hashes[-1] if hashes else _ROOT
        raw = memoryview(tokens[done * size : count * size].astype(">u4").tobytes())
        width = 4 * size
        for offset in range(0, len(raw), width):
            previous = blake3(previous).update(raw[offset : offset + width]).digest()
            hashes.append(previous)
        return hashes

    def touched(self, start: int, end: int) -> range:
        """Indices of the chunks that hold at least one token of the span ``[start, end)``."""
        if end <= start:
            return range(0)
        return range(start // self.chunk_size, -(-end // self.chunk_size))

    def inside(self, start: int, end: int) -> range:
        """Indices of the chunks that lie wholly inside the span ``[start, end)``."""
        first, last = -(-start // self.chunk_size), end // self.chunk_size
        return range(first, last) if last > first else range(0)


def short_hash(chunk: bytes) -> int:
    """The 64-bit name of a chunk in KV events: the last 8 bytes of its hash, big-endian, unsigned."""
    return int.from_bytes(chunk[-8:], "big")


def parse_hash(text: str) -> bytes | int:
    """A chunk hash as a client writes it in hex.

    LMCache's own 64 digits give the 32 bytes. The seed protocol's signed hex (``-6ed9…``, leading zeros cut,
    ``0x`` allowed) gives the 32 bytes of its two's complement when it has more than 16 digits, else the
    unsigned 64-bit :func:`short_hash`. Raises ValueError for anything else.
    """
    negative = text.startswith("-")
    digits = text.removeprefix("-").removeprefix("0x")
    try:
        if not digits.isascii() or not digits.isalnum() or len(digits) > _FULL_DIGITS:
            raise ValueError
        value = -int(digits, 16) if negative else int(digits, 16)
        if len(digits) <= _SHORT_DIGITS:
            return int.from_bytes(_twos_complement(value, 8), "big")
        return _twos_complement(value, HASH_BYTES)
    except (ValueError, OverflowError):
        raise ValueError(
            f"{text[:80]!r} is not a chunk hash: expected up to {_FULL_DIGITS} hex digits, optionally signed"
        ) from None


def _twos_complement(value: int, size: int) -> bytes:
    return value.to_bytes(size, "big", signed=value < 0)
