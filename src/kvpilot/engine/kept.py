"""In which order free blocks that somebody still needs are reused. Pure.

The victim is always, of all kept blocks, one whose best claimant ranks lowest, and of that claimant's blocks the one
furthest from the head. Blocks are filed under one of their claimants; that another one ranks higher is noticed when
the block comes up, and then it is filed there: a shared system prompt outlives any one agent, and nothing is sorted
before somebody needs room.

This runs in every step of an engine's scheduler, for every block that comes and goes: hence the plain loops.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Generic, TypeVar

from kvpilot.engine.book import Book, Hash, Ranking

B = TypeVar("B")


class _Pile(Generic[B]):
    """Blocks filed under one context, by id: (tokens from the context's head to its end, hash, block).

    They come as vLLM frees a request's, from the tail on, so they are nearly always in order already.
    """

    __slots__ = ("blocks", "least", "tidy")

    def __init__(self) -> None:
        self.blocks: OrderedDict[int, tuple[int, Hash, B]] = OrderedDict()
        self.least = 0
        """Length of the block that came last."""
        self.tidy = True

    def put_in_order(self) -> None:
        """From the tail of the context to its head."""
        if not self.tidy:
            self.blocks = OrderedDict(sorted(self.blocks.items(), key=lambda item: -item[1][0]))
            self.least = next(reversed(self.blocks.values()))[0]
            self.tidy = True


class Kept(Generic[B]):
    """Free blocks that a context of ``book`` claims, by their ids. All operations are O(1) a block, but for piles
    that have to be put in order."""

    def __init__(self, book: Book) -> None:
        self._book = book
        self._claimed = book.claimed
        self.homes: dict[int, int] = {}
        """Block id → number of the context it is filed under."""
        self._piles: dict[int, _Pile[B]] = {}
        self._ranking: Ranking | None = None
        self._empty = 0
        """Of that ranking, contexts before this place have no blocks filed under them."""

    def __len__(self) -> int:
        return len(self.homes)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self.homes

    def add(
        self, ids: Sequence[int], blocks: Sequence[B], hashes: Sequence[Hash], lengths: Sequence[int]
    ) -> list[B]:
        """Keep blocks: their ids, hashes, and how many tokens from its context's head each ends. Returns those that
        nobody claims."""
        claimants = [*map(self._claimed.get, hashes)]
        first = claimants[0] if claimants else None
        if isinstance(first, int) and claimants.count(first) == len(claimants):
            self._add_run(first, ids, blocks, hashes, lengths)
            return []
        nobodys: list[B] = []
        for block_id, block, value, length, found in zip(
            ids, blocks, hashes, lengths, claimants, strict=True
        ):
            if found is None:
                nobodys.append(block)
            else:
                home = found if isinstance(found, int) else next(iter(found))
                self._file(home, block_id, length, value, block)
        return nobodys

    def _add_run(
        self,
        home: int,
        ids: Sequence[int],
        blocks: Sequence[B],
        hashes: Sequence[Hash],
        lengths: Sequence[int],
    ) -> None:
        """File blocks of one context: what a request that ends has nearly always."""
        pile = self._pile(home)
        in_order = lengths == sorted(lengths, reverse=True) and (not pile.blocks or lengths[0] <= pile.least)
        pile.tidy = pile.tidy and in_order
        pile.least = lengths[-1]
        pile.blocks.update(zip(ids, zip(lengths, hashes, blocks, strict=True), strict=True))
        self.homes.update(dict.fromkeys(ids, home))

    def discard(self, block_id: int) -> bool:
        """The block is free no more (or its content is gone). False: it was not kept."""
        home = self.homes.pop(block_id, None)
        if home is None:
            return False
        pile = self._piles[home]
        del pile.blocks[block_id]
        if not pile.blocks:
            del self._piles[home]
        return True

    def pop(self, count: int, now: float, taken: list[B] | None = None) -> list[B]:
        """The blocks to reuse first, at most ``count``, put into ``taken``; they are kept no more."""
        taken = [] if taken is None else taken
        if count <= 0:
            return taken
        ranking = self._book.ranking(now)
        if ranking is not self._ranking:
            self._ranking, self._empty = ranking, 0
        while self._empty < len(ranking.ascending):
            number = ranking.ascending[self._empty]
            if (
                number in self._piles
                and ranking.of(number) == self._empty
                and self._drain(number, ranking, count, taken)
            ):
                return taken
            self._empty += 1
        while self._piles:  # Those that have no place yet.
            if self._drain(min(self._piles), ranking, count, taken):
                break
        return taken

    def _drain(self, number: int, ranking: Ranking, count: int, taken: list[B]) -> bool:
        """Take blocks filed under a context; whether there are enough now."""
        before = len(taken)
        enough = self._take(number, ranking, count, taken)
        if len(taken) > before:
            self._book.gave(number, len(taken) - before)
        return enough

    def _take(self, number: int, ranking: Ranking, count: int, taken: list[B]) -> bool:
        pile = self._piles[number]
        pile.put_in_order()
        claimed, homes, blocks = self._claimed, self.homes, pile.blocks
        if len(blocks) <= count - len(taken):
            claims = [claimed.get(value) for _, value, _ in blocks.values()]
            if claims.count(number) == len(claims):  # All of it goes, as from most contexts.
                taken.extend([block for _, _, block in blocks.values()])
                for block_id in self._piles.pop(number).blocks:
                    del homes[block_id]
                return len(taken) == count
        while blocks:
            block_id, (length, value, block) = blocks.popitem(last=False)
            del homes[block_id]
            claimants = claimed.get(value)
            if claimants is None or claimants == number or ranking.best(claimants) == number:
                taken.append(block)
                if len(taken) == count:
                    break
            else:
                self._file(ranking.best(claimants), block_id, length, value, block)
        if not blocks:
            del self._piles[number]
        return len(taken) == count

    def lost(self, number: int, length: int) -> list[B]:
        """A context gave up claims on what ends more than ``length`` tokens from its head: blocks filed under it go
        to other claimants. Returns those that have none."""
        nobodys: list[B] = []
        pile = self._piles.get(number)
        if pile is None:
            return nobodys
        pile.put_in_order()
        gone = []
        for block_id, (end, value, block) in pile.blocks.items():
            if end <= length:
                break
            gone.append((block_id, end, value, block))
        for block_id, end, value, block in gone:
            claimants = self._claimed.get(value)
            if claimants is None:
                self.discard(block_id)
                nobodys.append(block)
            elif number != claimants and not (isinstance(claimants, set) and number in claimants):
                self.discard(block_id)
                home = claimants if isinstance(claimants, int) else next(iter(claimants))
                self._file(home, block_id, end, value, block)
        return nobodys

    def in_order(self, now: float) -> list[B]:
        """All kept blocks as they would be reused now."""
        ranking = self._book.ranking(now)
        found = []
        for home, pile in self._piles.items():
            for block_id, (length, value, block) in pile.blocks.items():
                claimants = self._claimed.get(value)
                best = home if claimants is None else ranking.best(claimants)
                found.append(((ranking.of(best), best, -length, block_id), block))
        return [block for _, block in sorted(found, key=lambda item: item[0])]

    def size_of(self, number: int) -> int:
        """How many blocks are filed under a context."""
        pile = self._piles.get(number)
        return len(pile.blocks) if pile is not None else 0

    def below(self, number: int, now: float) -> int:
        """How many kept blocks are filed under contexts that rank below this one."""
        ranking = self._book.ranking(now)
        place = ranking.of(number)
        return sum(len(pile.blocks) for other, pile in self._piles.items() if ranking.of(other) < place)

    def clear(self) -> list[B]:
        """Keep nothing any more; returns what was kept."""
        blocks = [entry[2] for pile in self._piles.values() for entry in pile.blocks.values()]
        self.homes.clear()
        self._piles.clear()
        return blocks

    def _pile(self, home: int) -> _Pile[B]:
        """The pile of a context, to file something under it."""
        pile = self._piles.get(home)
        if pile is None:
            pile = self._piles[home] = _Pile()
        if self._ranking is not None and (place := self._ranking.of(home)) < self._empty:
            self._empty = place
        return pile

    def _file(self, home: int, block_id: int, length: int, value: Hash, block: B) -> None:
        pile = self._pile(home)
        if length > pile.least and pile.blocks:
            pile.tidy = False
        pile.least = length
        pile.blocks[block_id] = (length, value, block)
        self.homes[block_id] = home
