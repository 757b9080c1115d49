"""In which order free blocks that somebody still needs are reused. Pure.

The victim is always, of all kept blocks, the one whose best claimant ranks lowest, and of that claimant's blocks the
one furthest from the head. Blocks are filed under one of their claimants; that another one ranks higher is noticed
when the block comes up, and then it is filed there: a shared system prompt outlives any one agent, and nothing is
sorted before somebody needs room.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kvpilot.engine.book import Book, Hash, Ranking

B = TypeVar("B")


@dataclass(slots=True)
class _Entry(Generic[B]):
    block: B
    value: Hash
    length: int
    home: int


@dataclass(slots=True)
class _Pile:
    """Blocks filed under one context. The heap may hold blocks that have left; ``size`` counts those that have not."""

    heap: list[tuple[int, int, int]] = field(default_factory=list)
    """(−length, number of the filing, block id)."""
    size: int = 0


class Kept(Generic[B]):
    """Free blocks that a context of ``book`` claims, by their ids. All operations are O(log n) a block."""

    def __init__(self, book: Book) -> None:
        self._book = book
        self._entries: dict[int, tuple[int, _Entry[B]]] = {}
        self._piles: dict[int, _Pile] = {}
        self._filings = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._entries

    def add(self, block_id: int, block: B, value: Hash, length: int) -> bool:
        """Keep a block that ends ``length`` tokens from its context's head. False: nobody claims it."""
        claimants = self._book.claimed_by(value)
        if claimants is None:
            return False
        home = claimants if isinstance(claimants, int) else next(iter(claimants))
        self._file(block_id, _Entry(block, value, length, home))
        return True

    def discard(self, block_id: int) -> bool:
        """The block is free no more (or its content is gone). False: it was not kept."""
        found = self._entries.pop(block_id, None)
        if found is None:
            return False
        self._left(found[1].home)
        return True

    def pop(self, count: int, now: float, taken: list[B] | None = None) -> list[B]:
        """The blocks to reuse first, at most ``count``, put into ``taken``; they are kept no more."""
        ranking = self._book.ranking(now)
        taken = [] if taken is None else taken
        if count <= 0:
            return taken
        for number in ranking.ascending:
            pile = self._piles.get(number)
            while pile is not None and pile.size:
                block_id, entry = self._tail(pile)
                if not self._moved(block_id, entry, ranking):
                    self.discard(block_id)
                    taken.append(entry.block)
                    if len(taken) == count:
                        return taken
        return taken

    def lost(self, number: int) -> list[B]:
        """A context gave up claims: blocks filed under it go to other claimants; returns those that have none."""
        nobodys: list[B] = []
        pile = self._piles.get(number)
        if pile is None:
            return nobodys
        for _, filing, block_id in sorted(pile.heap):
            found = self._entries.get(block_id)
            if found is None or found[0] != filing:
                continue
            entry = found[1]
            claimants = self._book.claimed_by(entry.value)
            if claimants is None:
                self.discard(block_id)
                nobodys.append(entry.block)
            elif number != claimants and not (isinstance(claimants, set) and number in claimants):
                self.discard(block_id)
                self.add(block_id, entry.block, entry.value, entry.length)
        return nobodys

    def in_order(self, now: float) -> list[B]:
        """All kept blocks as they would be reused now."""
        ranking = self._book.ranking(now)

        def key(found: tuple[int, _Entry[B]]) -> tuple[int, int, int]:
            claimants = self._book.claimed_by(found[1].value)
            assert claimants is not None
            return ranking.place[ranking.best(claimants)], -found[1].length, found[0]

        return [entry.block for _, entry in sorted(self._entries.values(), key=key)]

    def size_of(self, number: int) -> int:
        """How many blocks are filed under a context."""
        pile = self._piles.get(number)
        return pile.size if pile is not None else 0

    def below(self, number: int, now: float) -> int:
        """How many kept blocks would be reused before those of a context, at least."""
        ranking = self._book.ranking(now)
        place = ranking.place.get(number, 0)
        return sum(pile.size for other, pile in self._piles.items() if ranking.place.get(other, 0) < place)

    def clear(self) -> list[B]:
        """Keep nothing any more; returns what was kept."""
        blocks = [entry.block for _, entry in self._entries.values()]
        self._entries.clear()
        self._piles.clear()
        return blocks

    def _file(self, block_id: int, entry: _Entry[B]) -> None:
        self._filings += 1
        self._entries[block_id] = (self._filings, entry)
        pile = self._piles.setdefault(entry.home, _Pile())
        heapq.heappush(pile.heap, (-entry.length, self._filings, block_id))
        pile.size += 1
        if len(pile.heap) > 2 * pile.size + 64:
            pile.heap = [item for item in pile.heap if self._current(item)]
            heapq.heapify(pile.heap)

    def _current(self, item: tuple[int, int, int]) -> bool:
        found = self._entries.get(item[2])
        return found is not None and found[0] == item[1]

    def _tail(self, pile: _Pile) -> tuple[int, _Entry[B]]:
        """The block of a pile that is furthest from the head; the pile is not empty."""
        while not self._current(pile.heap[0]):
            heapq.heappop(pile.heap)
        block_id = pile.heap[0][2]
        return block_id, self._entries[block_id][1]

    def _moved(self, block_id: int, entry: _Entry[B], ranking: Ranking) -> bool:
        """File a block under the claimant that ranks highest; False: that is where it is."""
        claimants = self._book.claimed_by(entry.value)
        best = entry.home if claimants is None else ranking.best(claimants)
        if best == entry.home:
            return False
        self.discard(block_id)
        entry.home = best
        self._file(block_id, entry)
        return True

    def _left(self, home: int) -> None:
        pile = self._piles[home]
        pile.size -= 1
        if not pile.size:
            del self._piles[home]
