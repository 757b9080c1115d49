"""In which order free blocks that somebody still needs are reused. Pure.

The victim is always, of all kept blocks, one whose best claimant ranks lowest, and of that claimant's blocks the one
furthest from the head. Blocks are filed under one of their claimants; that another one ranks higher is noticed when
the block comes up, and then it is filed there: a shared system prompt outlives any one agent, and nothing is sorted
before somebody needs room.

This runs in every step of an engine's scheduler, for every block that comes and goes: hence the plain loops, and the
links in the blocks themselves, as in vLLM's own queue. Whoever takes a block out (vLLM does when a request hits it)
need not know where it is filed, and nothing is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush
from typing import Any, Generic, Protocol, TypeVar

from kvpilot.engine.book import Book, Hash, Ranking


class Linked(Protocol):
    """What can be filed. The names are those of vLLM's blocks."""

    prev_free_block: Any
    next_free_block: Any


B = TypeVar("B", bound=Linked)


def unlink(block: Linked) -> None:
    """Take a block out of the pile it is in."""
    before, after = block.prev_free_block, block.next_free_block
    before.next_free_block, after.prev_free_block = after, before


class _Pile(Generic[B]):
    """Blocks filed under one context, from its tail to its head, in a ring that begins and ends here."""

    __slots__ = ("next_free_block", "prev_free_block", "tidy")

    def __init__(self) -> None:
        self.next_free_block: Any = self
        self.prev_free_block: Any = self
        self.tidy = True

    def __iter__(self) -> Iterator[B]:
        block = self.next_free_block
        while block is not self:
            after = block.next_free_block  # The block may be taken out meanwhile.
            yield block
            block = after

    def __bool__(self) -> bool:
        return self.next_free_block is not self

    def link(self, blocks: Sequence[B], before: Any) -> None:
        """Put blocks in behind ``before``, which is one of these or the pile itself: then they come first."""
        after = before.next_free_block
        for block in blocks:
            block.prev_free_block = before
            before.next_free_block = block
            before = block
        before.next_free_block = after
        after.prev_free_block = before

    def cut(self, blocks: Sequence[B]) -> None:
        """Take out the first ones, which are these; the links within them mean nothing any more."""
        after = blocks[-1].next_free_block
        self.next_free_block = after
        after.prev_free_block = self


class Kept(Generic[B]):
    """Free blocks that a context of ``book`` claims. All operations are O(1) a block, but for piles that have to be
    put in order. ``name``: a block's hash; ``length``: tokens from its context's head to its end."""

    def __init__(self, book: Book, name: Callable[[B], Hash], length: Callable[[B], int]) -> None:
        self._book = book
        self._name = name
        self._length = length
        self._claimed = book.claimed
        self.piles: dict[int, _Pile[B]] = {}
        """By the number of the context; empty ones are removed when they come up. To look at; changed here alone."""
        self._numbers: list[int] = []
        """A heap of them, and of some that are no more."""
        self._ranking: Ranking | None = None
        self._empty = 0
        """Of that ranking, contexts before this place have no blocks filed under them."""

    def add(self, blocks: Sequence[B]) -> list[B]:
        """Keep blocks of one context, as a request that ends leaves them, or of any. Returns those that nobody
        claims."""
        if not blocks:
            return []
        first, last = self._length(blocks[0]), self._length(blocks[-1])
        if first - last == (len(blocks) - 1) * self._book.block_tokens:
            # From tail to head. Who claims a block claims what lies before it: one look is enough.
            owner = self._claimed.get(self._name(blocks[0]))
            if isinstance(owner, int) and self._book.holds_from_the_head(owner):
                self._put(owner, blocks, first, last)
                return []
        nobodys: list[B] = []
        for block in blocks:
            found = self._claimed.get(self._name(block))
            if found is None:
                nobodys.append(block)
            else:
                self._file(found if isinstance(found, int) else next(iter(found)), block)
        return nobodys

    def pop(self, count: int, now: float, taken: list[B] | None = None) -> list[B]:
        """The blocks to reuse first, put into ``taken`` until it has ``count``; they are kept no more."""
        taken = [] if taken is None else taken
        if count <= len(taken):
            return taken
        ranking = self._book.ranking(now)
        if ranking is not self._ranking:
            self._ranking, self._empty = ranking, 0
        while self._empty < len(ranking.ascending):
            number = ranking.ascending[self._empty]
            if (
                number in self.piles
                and ranking.of(number) == self._empty
                and self._drain(number, ranking, count, taken)
            ):
                return taken
            self._empty += 1
        while self.piles:  # Those that have no place yet.
            if self._numbers[0] not in self.piles:
                heappop(self._numbers)
            elif self._drain(self._numbers[0], ranking, count, taken):
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
        pile = self.piles[number]
        self._put_in_order(pile)
        block, wanted = pile.next_free_block, count - len(taken)
        found: list[B] = []
        while block is not pile and len(found) < wanted:
            found.append(block)
            block = block.next_free_block
        if found:
            if self._only_its_own(number, found[-1]):
                pile.cut(found)
                taken += found
            else:
                self._take_one_by_one(number, ranking, count, taken)
        if not pile:
            pile.next_free_block = pile.prev_free_block = None  # So that no ring is left to collect.
            del self.piles[number]
        return len(taken) == count

    def _only_its_own(self, number: int, block: B) -> bool:
        """Whether no other context claims what is filed under this one up to this block, seen from the tail: whoever
        claims a block claims what lies before it, but for wishes."""
        claimants = self._claimed.get(self._name(block))
        return not self._book.wishes and (claimants is None or claimants == number)

    def _take_one_by_one(self, number: int, ranking: Ranking, count: int, taken: list[B]) -> None:
        for block in self.piles[number]:
            claimants = self._claimed.get(self._name(block))
            if claimants == number or claimants is None or ranking.best(claimants) == number:
                unlink(block)
                taken.append(block)
                if len(taken) == count:
                    break
            else:
                self._move(block, ranking.best(claimants))

    def lost(self, number: int, length: int) -> list[B]:
        """A context gave up claims on what ends more than ``length`` tokens from its head: blocks filed under it go
        to other claimants. Returns those that have none."""
        pile = self.piles.get(number)
        if pile is None:
            return []
        self._put_in_order(pile)
        gone: list[B] = []
        block = pile.next_free_block
        while block is not pile and self._length(block) > length:
            gone.append(block)
            block = block.next_free_block
        if gone and self._claimed.get(self._name(gone[-1])) is None and not self._book.wishes:
            pile.cut(gone)  # Nobody claims what lies behind what nobody claims.
            return gone
        nobodys: list[B] = []
        for block in gone:
            claimants = self._claimed.get(self._name(block))
            if claimants is None:
                unlink(block)
                nobodys.append(block)
            elif number != claimants and not (isinstance(claimants, set) and number in claimants):
                self._move(block, claimants if isinstance(claimants, int) else next(iter(claimants)))
        return nobodys

    def in_order(self, now: float) -> list[B]:
        """All kept blocks as they would be reused now."""
        ranking = self._book.ranking(now)
        found = []
        for home, pile in self.piles.items():
            for place, block in enumerate(pile):
                claimants = self._claimed.get(self._name(block))
                best = home if claimants is None else ranking.best(claimants)
                found.append(((ranking.of(best), best, -self._length(block), place, home), block))
        return [block for _, block in sorted(found, key=lambda item: item[0])]

    def size_of(self, number: int, most: int) -> int:
        """How many blocks are filed under a context, counted up to ``most``."""
        pile = self.piles.get(number)
        return 0 if pile is None else sum(1 for _ in zip(range(most), pile, strict=False))

    def below(self, number: int, now: float, most: int) -> int:
        """How many kept blocks are filed under contexts that rank below this one, counted up to ``most``."""
        ranking = self._book.ranking(now)
        place, found = ranking.of(number), 0
        for other in self.piles:
            if found >= most:
                break
            if ranking.of(other) < place:
                found += self.size_of(other, most - found)
        return found

    def clear(self) -> list[B]:
        """Keep nothing any more; returns what was kept."""
        blocks = [block for pile in self.piles.values() for block in pile]
        for pile in self.piles.values():
            pile.next_free_block = pile.prev_free_block = None
        self.piles.clear()
        self._numbers.clear()
        return blocks

    def _move(self, block: B, home: int) -> None:
        unlink(block)
        self._file(home, block)

    def _file(self, home: int, block: B) -> None:
        length = self._length(block)
        self._put(home, (block,), length, length)

    def _put(self, home: int, blocks: Sequence[B], longest: int, shortest: int) -> None:
        """File blocks, given from tail to head, under a context: at the end, or first where that is their place."""
        pile = self.piles.get(home)
        if pile is None:
            pile = self.piles[home] = _Pile()
            heappush(self._numbers, home)
            if len(self._numbers) > 64 + 2 * len(self.piles):
                self._numbers = sorted(self.piles)
        if self._ranking is not None and (place := self._ranking.of(home)) < self._empty:
            self._empty = place
        if not pile:
            pile.tidy = True
        elif self._length(pile.prev_free_block) < longest:
            if self._length(pile.next_free_block) <= shortest:
                pile.link(blocks, pile)
                return
            pile.tidy = False
        pile.link(blocks, pile.prev_free_block)

    def _put_in_order(self, pile: _Pile[B]) -> None:
        if not pile.tidy:
            blocks = sorted(pile, key=self._length, reverse=True)
            pile.next_free_block = pile.prev_free_block = pile
            pile.link(blocks, pile)
            pile.tidy = True
