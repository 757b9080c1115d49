"""In which order free blocks that somebody still needs are reused. Pure.

The victim is always, of all kept blocks, one whose best claimant ranks lowest, and of that claimant's blocks the one
furthest from the head. Blocks are filed under one of their claimants; that another one ranks higher is noticed when
the block comes up, and then it is filed there: a shared system prompt outlives any one agent, and nothing is sorted
before somebody needs room.

This runs in every step of an engine's scheduler, for every block that comes and goes: hence the plain loops.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Generic, TypeVar

from kvpilot.engine.book import Book, Hash, Ranking

B = TypeVar("B")


def nth(values: Iterable[B], place: int) -> B:
    """One of several, by its place."""
    return next(islice(values, place, None))


class _Pile(Generic[B]):
    """Blocks filed under one context, by id.

    They come as vLLM frees a request's, from the tail on, so they are nearly always in order already.
    """

    __slots__ = ("blocks", "least", "tidy")

    def __init__(self) -> None:
        self.blocks: OrderedDict[int, B] = OrderedDict()
        self.least = 0
        """Length of the block that came last."""
        self.tidy = True


class Kept(Generic[B]):
    """Free blocks that a context of ``book`` claims, by their ids. All operations are O(1) a block, but for piles
    that have to be put in order. ``name``: a block's hash; ``length``: tokens from its context's head to its end."""

    def __init__(self, book: Book, name: Callable[[B], Hash], length: Callable[[B], int]) -> None:
        self._book = book
        self._name = name
        self._length = length
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

    def add(self, ids: Sequence[int], blocks: Sequence[B]) -> list[B]:
        """Keep blocks of one context, as a request that ends leaves them, or of any. Returns those that nobody
        claims."""
        if not ids:
            return []
        first, last = self._length(blocks[0]), self._length(blocks[-1])
        if first - last == (len(ids) - 1) * self._book.block_tokens:
            # From tail to head. Who claims a block claims what lies before it: one look is enough.
            owner = self._claimed.get(self._name(blocks[0]))
            if isinstance(owner, int) and self._book.holds_from_the_head(owner):
                pile = self._pile(owner)
                pile.tidy = pile.tidy and (not pile.blocks or first <= pile.least)
                pile.least = last
                pile.blocks.update(zip(ids, blocks, strict=True))
                self.homes.update(dict.fromkeys(ids, owner))
                return []
        nobodys: list[B] = []
        for block_id, block in zip(ids, blocks, strict=True):
            found = self._claimed.get(self._name(block))
            if found is None:
                nobodys.append(block)
            else:
                self._file(found if isinstance(found, int) else next(iter(found)), block_id, block)
        return nobodys

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
        self._put_in_order(pile)
        homes, blocks = self.homes, pile.blocks
        wanted = min(len(blocks), count - len(taken))
        if self._only_its_own(number, nth(blocks.values(), wanted - 1)):
            for _ in range(wanted):
                block_id, block = blocks.popitem(last=False)
                del homes[block_id]
                taken.append(block)
        else:
            self._take_one_by_one(number, ranking, count, taken)
        if not blocks:
            del self._piles[number]
        return len(taken) == count

    def _only_its_own(self, number: int, block: B) -> bool:
        """Whether no other context claims what is filed under this one up to this block, seen from the tail: whoever
        claims a block claims what lies before it, but for wishes."""
        claimants = self._claimed.get(self._name(block))
        return not self._book.wishes and (claimants is None or claimants == number)

    def _take_one_by_one(self, number: int, ranking: Ranking, count: int, taken: list[B]) -> None:
        homes, blocks = self.homes, self._piles[number].blocks
        while blocks:
            block_id, block = blocks.popitem(last=False)
            del homes[block_id]
            claimants = self._claimed.get(self._name(block))
            if claimants == number or claimants is None or ranking.best(claimants) == number:
                taken.append(block)
                if len(taken) == count:
                    break
            else:
                self._file(ranking.best(claimants), block_id, block)

    def lost(self, number: int, length: int) -> list[B]:
        """A context gave up claims on what ends more than ``length`` tokens from its head: blocks filed under it go
        to other claimants. Returns those that have none."""
        nobodys: list[B] = []
        pile = self._piles.get(number)
        if pile is None:
            return nobodys
        self._put_in_order(pile)
        gone = []
        for block_id, block in pile.blocks.items():
            if self._length(block) <= length:
                break
            gone.append((block_id, block))
        for block_id, block in gone:
            claimants = self._claimed.get(self._name(block))
            if claimants is None:
                self.discard(block_id)
                nobodys.append(block)
            elif number != claimants and not (isinstance(claimants, set) and number in claimants):
                self.discard(block_id)
                home = claimants if isinstance(claimants, int) else next(iter(claimants))
                self._file(home, block_id, block)
        return nobodys

    def in_order(self, now: float) -> list[B]:
        """All kept blocks as they would be reused now."""
        ranking = self._book.ranking(now)
        found = []
        for home, pile in self._piles.items():
            for block_id, block in pile.blocks.items():
                claimants = self._claimed.get(self._name(block))
                best = home if claimants is None else ranking.best(claimants)
                found.append(((ranking.of(best), best, -self._length(block), block_id), block))
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
        blocks = [block for pile in self._piles.values() for block in pile.blocks.values()]
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

    def _file(self, home: int, block_id: int, block: B) -> None:
        pile = self._pile(home)
        length = self._length(block)
        if length > pile.least and pile.blocks:
            pile.tidy = False
        pile.least = length
        pile.blocks[block_id] = block
        self.homes[block_id] = home

    def _put_in_order(self, pile: _Pile[B]) -> None:
        """From the tail of the context to its head."""
        if not pile.tidy:
            length = self._length
            pile.blocks = OrderedDict(sorted(pile.blocks.items(), key=lambda item: -length(item[1])))
            pile.least = length(next(reversed(pile.blocks.values())))
            pile.tidy = True
