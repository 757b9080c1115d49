"""In which order the chunks of a tier below the device pool are given up. Pure.

First those nobody claims, among them the least recently used; then those that sessions need, as the book ranks them:
of the context that ranks lowest the one furthest from the head, a shared one as the best of its contexts
(:mod:`kvpilot.engine.kept`). Without a book: least recently used. Nothing is sorted before somebody needs room.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from kvpilot.engine.book import Book, Hash
from kvpilot.engine.kept import Kept, unlink

P = TypeVar("P")
Key = bytes
"""Of a chunk: the hash of its last block and, in ``GROUP_BYTES`` more, its KV group."""

GROUP_BYTES = 4


@dataclass(slots=True, eq=False)
class Chunk(Generic[P]):
    """What a tier holds under a key."""

    key: Key
    payload: P
    number: int
    length: int
    """Tokens from the head of its context to its end; 0 = not known."""
    used: int
    """Higher: used more recently."""
    evictable: bool = False
    loose: bool = False
    """Waits among those that nobody claimed when it was last looked at."""
    prev_free_block: Any = None
    next_free_block: Any = None
    """Its neighbours where it is filed under a context."""

    @property
    def hash(self) -> Hash:
        return self.key[:-GROUP_BYTES]


def _name(chunk: Chunk[P]) -> Hash:
    return chunk.hash


def _length(chunk: Chunk[P]) -> int:
    return chunk.length


class TierOrder(Generic[P]):
    """The chunks of one tier. ``payload``: whatever the tier needs to find one again. Putting, using, pinning and
    taking cost O(log n) a chunk."""

    def __init__(self) -> None:
        self._chunks: dict[Key, Chunk[P]] = {}
        self._heap: list[tuple[int, int, Key]] = []
        """(used, number, key) of those that are loose, and of some that are no more."""
        self._kept: Kept[Chunk[P]] | None = None
        self._numbers = 0
        self._uses = 0
        self._loose = 0
        self.evictable = 0

    def __len__(self) -> int:
        return len(self._chunks)

    def __contains__(self, key: Key) -> bool:
        return key in self._chunks

    def __iter__(self) -> Iterator[Key]:
        return iter(self._chunks)

    # ------------------------------------------------------------ whose value counts

    @property
    def follows(self) -> bool:
        """Whether sessions decide; else recency alone does."""
        return self._kept is not None

    def follow(self, book: Book) -> None:
        """From now on this book's claims and ranking count."""
        self.forget_book()
        kept = self._kept = Kept(book, _name, _length)
        before = book.on_lost

        def on_lost(number: int, length: int) -> None:
            before(number, length)
            if kept is self._kept:
                for chunk in kept.lost(number, length):
                    self._loosen(chunk)

        # Those that are loose and claimed are found out when they come up.
        book.on_lost = on_lost

    def forget_book(self) -> None:
        """From now on only recency counts. Right whatever an error left behind."""
        self._kept = None
        for chunk in self._chunks.values():
            chunk.loose = chunk.evictable
            chunk.prev_free_block = chunk.next_free_block = None
        loose = [chunk for chunk in self._chunks.values() if chunk.loose]
        self._heap = [(chunk.used, chunk.number, chunk.key) for chunk in loose]
        heapq.heapify(self._heap)
        self._loose = self.evictable = len(loose)

    # ------------------------------------------------------------ what the tier tells

    def get(self, key: Key) -> P | None:
        found = self._chunks.get(key)
        return found.payload if found is not None else None

    def put(self, key: Key, payload: P, *, length: int = 0, evictable: bool = False) -> None:
        """A chunk that was not there; the most recently used now."""
        self._numbers += 1
        self._uses += 1
        self._chunks[key] = chunk = Chunk(key, payload, self._numbers, length, self._uses)
        if evictable:
            self._offer(chunk)

    def remove(self, key: Key) -> P:
        """A chunk is there no more. Raises KeyError."""
        chunk = self._chunks[key]
        self._withdraw(chunk)
        del self._chunks[key]
        return chunk.payload

    def pin(self, key: Key) -> None:
        """A transfer uses it: it cannot be given up until :meth:`unpin`."""
        if (chunk := self._chunks.get(key)) is not None:
            self._withdraw(chunk)

    def unpin(self, key: Key) -> None:
        chunk = self._chunks.get(key)
        if chunk is not None and not chunk.evictable:
            self._offer(chunk)

    def use(self, keys: Iterable[Key]) -> None:
        """These were used, the last of them most recently."""
        for key in keys:
            chunk = self._chunks.get(key)
            if chunk is None:
                continue
            self._uses += 1
            chunk.used = self._uses
            if chunk.loose:
                self._push(chunk)

    def clear(self) -> None:
        self._chunks.clear()
        self._heap.clear()
        self._loose = self.evictable = 0
        if self._kept is not None:
            self._kept.clear()

    # ------------------------------------------------------------ making room

    def evict(
        self,
        count: int,
        protected: Collection[Key],
        now: float,
        refuse: Callable[[Key], bool] | None = None,
    ) -> list[tuple[Key, P]] | None:
        """Give up exactly so many chunks, none that is pinned or ``protected``. None, and nothing changes, where
        that cannot be, or where it would take one that ``refuse`` is true of."""
        barred = sum(1 for key in protected if (chunk := self._chunks.get(key)) and chunk.evictable)
        if count > self.evictable - barred:
            return None
        taken: list[Chunk[P]] = []
        spared: list[Chunk[P]] = []
        while len(taken) < count:
            found = self._take(count - len(taken), now)
            for chunk in found:
                (spared if chunk.key in protected else taken).append(chunk)
            if not found or (refuse is not None and any(refuse(chunk.key) for chunk in taken)):
                spared, taken = spared + taken, []
                break
        for chunk in spared:
            self._file(chunk)
        if len(taken) < count:
            return None
        self.evictable -= len(taken)
        for chunk in taken:
            del self._chunks[chunk.key]
        return [(chunk.key, chunk.payload) for chunk in taken]

    def _take(self, count: int, now: float) -> list[Chunk[P]]:
        """Up to so many that go first, filed nowhere any more."""
        taken: list[Chunk[P]] = []
        while self._heap and len(taken) < count:
            used, _, key = heapq.heappop(self._heap)
            chunk = self._chunks.get(key)
            if chunk is None or not chunk.loose or chunk.used != used:
                continue
            self._tighten(chunk)
            if not self._keep(chunk):
                taken.append(chunk)
        if self._kept is not None and len(taken) < count:
            self._kept.pop(count, now, taken)
        return taken

    # ------------------------------------------------------------ where a chunk is filed

    def _offer(self, chunk: Chunk[P]) -> None:
        chunk.evictable = True
        self.evictable += 1
        self._file(chunk)

    def _withdraw(self, chunk: Chunk[P]) -> None:
        if not chunk.evictable:
            return
        chunk.evictable = False
        self.evictable -= 1
        if chunk.loose:
            self._tighten(chunk)
        elif self._kept is not None:
            unlink(chunk)

    def _file(self, chunk: Chunk[P]) -> None:
        if not self._keep(chunk):
            self._loosen(chunk)

    def _keep(self, chunk: Chunk[P]) -> bool:
        """File a chunk under a context that claims it; whether there is one."""
        if self._kept is None:
            return False
        return not self._kept.add([chunk])

    def _loosen(self, chunk: Chunk[P]) -> None:
        chunk.loose = True
        self._loose += 1
        self._push(chunk)

    def _tighten(self, chunk: Chunk[P]) -> None:
        chunk.loose = False
        self._loose -= 1

    def _push(self, chunk: Chunk[P]) -> None:
        if len(self._heap) > 64 + 2 * self._loose:
            loose = (each for each in self._chunks.values() if each.loose)
            self._heap = [(each.used, each.number, each.key) for each in loose]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (chunk.used, chunk.number, chunk.key))
