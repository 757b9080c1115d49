"""The order in which free blocks are reused, against a model that looks at every block each time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvpilot.context.messages import common_prefix
from kvpilot.engine.book import Book, Context, SessionKey
from kvpilot.engine.kept import Kept, unlink

SIZE = 4
SESSIONS = [("", f"s{i}") for i in range(4)] + [("salt", "s0")]


def chain(*parts: str) -> list[bytes]:
    """Chained hashes of blocks with these contents."""
    return ["/".join(parts[: i + 1]).encode() for i in range(len(parts))]


@dataclass(eq=False)
class Free:
    value: bytes
    length: int
    prev_free_block: Any = None
    next_free_block: Any = None


def kept_of(book: Book) -> Kept[Free]:
    return Kept(book, lambda block: block.value, lambda block: block.length)


class Machine(RuleBasedStateMachine):
    """Blocks come and go, sessions too. The model is the definition: of all kept blocks the victim is one whose
    best claimant ranks lowest, and of those one that is furthest from the head."""

    def __init__(self) -> None:
        super().__init__()
        self.book = Book(SIZE, pool_blocks=40)
        self.kept = kept_of(self.book)
        self.book.on_lost = self._lost
        self.free: list[Free] = []
        self.running: list[tuple[Context, list[bytes]]] = []
        self.now = 100.0

    def _lost(self, number: int, length: int) -> None:
        for block in self.kept.lost(number, length):
            self.free.remove(block)

    def rank(self, block: Free) -> tuple[int, int, int]:
        claimants = self.book.claimed.get(block.value)
        assert claimants is not None
        ranking = self.book.ranking(self.now)
        best = ranking.best(claimants)
        return ranking.of(best), best if best not in ranking.place else 0, -block.length

    @rule(
        key=st.sampled_from(SESSIONS),
        parts=st.lists(st.sampled_from("ab"), min_size=1, max_size=6),
        supersedes=st.booleans(),
    )
    def begins(self, key: SessionKey, parts: list[str], supersedes: bool) -> None:
        hashes = chain(key[0], *parts)
        self.running.append((self.book.begin(key, hashes, self.now, supersedes=supersedes), hashes))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), more=st.lists(st.sampled_from("xy"), max_size=3), last=st.booleans())
    def ends(self, data: st.DataObject, more: list[str], last: bool) -> None:
        context, prompt = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        parts = [*prompt[-1].decode().split("/"), *more]
        hashes = chain(*parts)
        self.book.finish(context, hashes, list(range(SIZE * len(hashes))), self.now, last=last)
        freed = [Free(value, (place + 1) * SIZE) for place, value in reversed(list(enumerate(hashes)))]
        nobodys = self.kept.add(freed)
        assert all((block in nobodys) == (block.value not in self.book.claimed) for block in freed)
        self.free += [block for block in freed if block not in nobodys]

    @precondition(lambda self: self.free)
    @rule(data=st.data())
    def is_used_again(self, data: st.DataObject) -> None:
        unlink(self.free.pop(data.draw(st.integers(0, len(self.free) - 1))))

    @rule(count=st.integers(1, 6))
    def room_is_needed(self, count: int) -> None:
        popped = self.kept.pop(count, self.now)
        assert len(popped) == min(count, len(self.free))
        for block in popped:
            self.free.remove(block)
            assert all(self.rank(block) <= self.rank(other) for other in self.free)

    @rule(seconds=st.sampled_from([0.01, 0.1, 5.0, 50.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.book.tick(self.now)

    @rule(
        key=st.sampled_from(SESSIONS), what=st.sampled_from(["end", "demote", "retain", "release", "expect"])
    )
    def is_told(self, key: SessionKey, what: str) -> None:
        if what == "end":
            self.book.end(key, tree=True)
        elif what == "demote":
            self.book.demote(key)
        elif what == "release":
            self.book.release(key)
        elif what == "expect":
            for session in self.book.sessions(key, tree=False):
                self.book.expect(session.contexts[-1], self.now + 5)
        else:
            self.book.retain(key, self.now + 20, self.now)

    @rule(key=st.sampled_from(SESSIONS), parts=st.lists(st.sampled_from("ab"), min_size=1, max_size=4))
    def is_learned_of(self, key: SessionKey, parts: list[str]) -> None:
        self.book.learn(key, chain(key[0], *parts), [], self.now)

    @rule(key=st.sampled_from(SESSIONS), parts=st.lists(st.sampled_from("ab"), min_size=1, max_size=4))
    def blocks_are_given_up_or_wished_for(self, key: SessionKey, parts: list[str]) -> None:
        hashes = chain(key[0], *parts)
        if len(parts) % 2:
            self.book.give_up(key, hashes[-1:])
        else:
            self.book.retain_blocks(key[0], hashes, self.now + 15, self.now)

    @invariant()
    def nothing_is_lost_and_nobody_elses(self) -> None:
        kept = self.kept.in_order(self.now)
        assert len(kept) == len(self.free) and set(kept) == set(self.free)
        assert all(self.book.claimed.get(block.value) is not None for block in self.free)

    @invariant()
    def what_ranks_below_is_counted_as_far_as_asked(self) -> None:
        ranking = self.book.ranking(self.now)
        for context in self.book.contexts():
            sizes = {c.number: self.kept.size_of(c.number, 99) for c in self.book.contexts()}
            below = sum(n for other, n in sizes.items() if ranking.of(other) < ranking.of(context.number))
            assert self.kept.below(context.number, self.now, 99) == below
            assert self.kept.below(context.number, self.now, 2) == min(2, below)

    @invariant()
    def claims_are_what_contexts_hold(self) -> None:
        holders: dict[bytes, set[int]] = {}
        for context in self.book.contexts():
            for value in context.hashes:
                holders.setdefault(value, set()).add(context.number)
        for value, numbers in holders.items():
            claimed = self.book.claimed.get(value)
            assert (claimed if isinstance(claimed, set) else {claimed}) == numbers
        assert self.book.claims == sum(len(context.hashes) for context in self.book.contexts())


Machine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestOrderOfReuse = Machine.TestCase


def test_a_context_loses_its_blocks_from_the_tail_and_shared_ones_last() -> None:
    book = Book(SIZE, 40)
    kept = kept_of(book)
    system = ["sys"]
    for name, parts in (("old", ["a", "b"]), ("new", ["c"])):
        hashes = chain(*system, *parts)
        context = book.begin(("", name), hashes, 0.0 if name == "old" else 1.0)
        book.finish(context, hashes, (), 0.0 if name == "old" else 1.0)
        if name == "new":
            hashes = hashes[1:]  # The shared block is there once.
        hashes.reverse()
        kept.add([Free(value, SIZE * (1 + value.count(b"/"))) for value in hashes])
    book.demote(("", "old"))
    assert [block.value for block in kept.pop(9, 2.0)] == [b"sys/a/b", b"sys/a", b"sys/c", b"sys"]


def test_what_is_loaded_slice_by_slice_goes_from_the_tail_too() -> None:
    book = Book(SIZE, 40)
    kept = kept_of(book)
    hashes = chain(*"abcdef")
    book.learn(("", "s"), hashes, (), 0.0)
    blocks = [Free(value, SIZE * (place + 1)) for place, value in enumerate(hashes)]
    for part in (blocks[:2], blocks[4:], blocks[2:4]):
        kept.add(part[::-1])
    assert kept.pop(4, 1.0) == blocks[:1:-1]


def test_blocks_of_contexts_that_came_since_the_last_ranking_are_found_wherever_they_are_filed() -> None:
    book = Book(SIZE, 40)
    kept = kept_of(book)
    book.ranking(0.0)
    shared = chain("sys")
    first, second = (book.begin(("", name), shared, 0.0) for name in ("first", "second"))
    block = Free(shared[0], SIZE)
    kept.add([block])
    assert kept.size_of(first.number, 9) + kept.size_of(second.number, 9) == 1
    assert kept.pop(1, 0.0) == [block] and not kept.in_order(0.0)


def test_common_blocks_are_found_by_the_last_that_is_equal() -> None:
    assert common_prefix(chain("a", "b", "c"), chain("a", "b", "d")) == 2
    assert common_prefix([], chain("a")) == 0
    assert common_prefix(chain("a", "b"), chain("a", "b")) == 2
