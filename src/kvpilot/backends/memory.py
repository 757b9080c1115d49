"""A simulated cache layer: no bytes, but as ill-behaved as the real ones. It stores late, locks, lags, dies."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Collection, Sequence

from kvpilot.backends.base import (
    Capabilities,
    DirectoryStats,
    DropResult,
    Placement,
    PrefetchResult,
    Unreachable,
)
from kvpilot.context.chunks import ChunkHasher
from kvpilot.domain import Space, Tier, TierUsage, TokenArray

CHUNK_BYTES = 1000


class MemoryLayer:
    name = "memory"

    def __init__(self, chunk_size: int = 4, capacity_chunks: int = 1000) -> None:
        self.chunk_size = chunk_size
        self.capacity = capacity_chunks * CHUNK_BYTES
        self.held: dict[tuple[Space, bytes], set[Tier]] = {}
        self.locked: set[bytes] = set()
        self.dead = False
        self.listed: dict[tuple[Space, bytes], set[Tier]] | None = None
        """What the directory shows while it lags behind; None: what is held."""
        self.host_room = 1000
        """Chunks host memory takes before a prefetch leaves the rest out."""
        self.drops: deque[tuple[tuple[bytes, ...], frozenset[Tier]]] = deque(maxlen=100)
        """The latest."""
        self._hasher = ChunkHasher(chunk_size)

    def store(self, space: Space, tokens: TokenArray, *tiers: Tier) -> list[bytes]:
        """What an engine does after a request; returns the chunk hashes."""
        hashes = self._hasher.hashes(tokens)
        for chunk in hashes:
            self.held.setdefault((space, chunk), set()).update(tiers or (Tier.HOST, Tier.DISK))
        return hashes

    def tiers(self, space: Space, chunk: bytes) -> set[Tier]:
        return self.held.get((space, chunk), set())

    def _alive(self) -> None:
        if self.dead:
            raise Unreachable("the cache layer is dead")

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def capabilities(self) -> Capabilities:
        return Capabilities(True, frozenset((Tier.HOST, Tier.DISK)), True, self.chunk_size, "blake3")

    async def usage(self) -> tuple[TierUsage, ...]:
        self._alive()
        return tuple(
            TierUsage(t, sum(t in tiers for tiers in self.held.values()) * CHUNK_BYTES, self.capacity)
            for t in (Tier.HOST, Tier.DISK)
        )

    async def locate(self, space: Space, chunks: Sequence[bytes]) -> list[frozenset[Tier]]:
        self._alive()
        shown = self.held if self.listed is None else self.listed
        return [frozenset(shown.get((space, chunk), ())) for chunk in chunks]

    async def prefetch(self, space: Space, tokens: TokenArray, *, timeout_s: float) -> PrefetchResult:
        self._alive()
        hashes = self._hasher.hashes(tokens)
        found = 0
        room = self.host_room
        if len(self.held) > room:
            room -= sum(Tier.HOST in other for other in self.held.values())
        for chunk in hashes:
            tiers = self.tiers(space, chunk)
            if Tier.HOST not in tiers:
                if not tiers or room <= 0:
                    continue
                tiers.add(Tier.HOST)
                room -= 1
            found += 1
        return PrefetchResult(found, len(hashes), 0.001)

    async def drop(
        self, space: Space, chunks: Sequence[bytes], tiers: Collection[Tier], *, force: bool = False
    ) -> DropResult:
        self._alive()
        self.drops.append((tuple(chunks), frozenset(tiers)))
        skipped = 0
        for chunk in chunks:
            if chunk in self.locked:
                skipped += 1
                continue
            held = self.tiers(space, chunk)
            held.difference_update(tiers)
            if not held:
                self.held.pop((space, chunk), None)
        return DropResult(len(chunks) - skipped, skipped)

    async def directory_stats(self) -> DirectoryStats:
        raise Unreachable("not part of these tests")

    async def list_keys(self) -> AsyncIterator[list[Placement]]:
        self._alive()
        yield [Placement(space, chunk, frozenset(tiers)) for (space, chunk), tiers in self.held.items()]
