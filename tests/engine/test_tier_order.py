"""The order in which chunks of a tier are given up, against a model that looks at every chunk each time."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvpilot.engine.book import Book, Context, SessionKey
from kvpilot.engine.tier_order import GROUP_BYTES, Key, TierOrder
from tests.engine.test_kept import SESSIONS, SIZE, chain


def key_of(value: bytes, group: int = 0) -> Key:
    return value + group.to_bytes(GROUP_BYTES, "big")


@dataclass
class Held:
    length: int
    used: int
    pinned: bool = False


class Machine(RuleBasedStateMachine):
    """Chunks come, are used, pinned and given up while sessions come and go. The model is the definition: unclaimed
    ones first, least recently used first; then by the best claimant's rank, furthest from the head first."""

    def __init__(self) -> None:
        super().__init__()
        self.book = Book(SIZE, pool_blocks=40)
        self.order: TierOrder[bytes] = TierOrder()
        self.order.follow(self.book)
        self.followed = True
        self.held: dict[Key, Held] = {}
        self.running: list[tuple[Context, list[bytes]]] = []
        self.now = 100.0
        self.uses = 0

    def rank(self, key: Key) -> tuple[int, int, int, int]:
        held, claimants = self.held[key], self.book.claimed.get(key[:-GROUP_BYTES])
        if claimants is None or not self.followed:
            return 0, held.used, 0, 0
        ranking = self.book.ranking(self.now)
        best = ranking.best(claimants)
        return 1, ranking.of(best), best if best not in ranking.place else 0, -held.length

    def free(self, spared: set[Key]) -> list[Key]:
        return [key for key, held in self.held.items() if not held.pinned and key not in spared]

    @rule(
        key=st.sampled_from(SESSIONS),
        parts=st.lists(st.sampled_from("ab"), min_size=1, max_size=6),
        supersedes=st.booleans(),
    )
    def begins(self, key: SessionKey, parts: list[str], supersedes: bool) -> None:
        hashes = chain(key[0], *parts)
        self.running.append((self.book.begin(key, hashes, self.now, supersedes=supersedes), hashes))

    @rule(key=st.sampled_from(SESSIONS), parts=st.lists(st.sampled_from("ab"), min_size=1, max_size=4))
    def is_learned_of(self, key: SessionKey, parts: list[str]) -> None:
        self.book.learn(key, chain(key[0], *parts), [], self.now)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), more=st.lists(st.sampled_from("xy"), max_size=3), last=st.booleans())
    def ends(self, data: st.DataObject, more: list[str], last: bool) -> None:
        context, prompt = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        hashes = chain(*prompt[-1].decode().split("/"), *more)
        self.book.finish(context, hashes, list(range(SIZE * len(hashes))), self.now, last=last)

    @rule(
        salt=st.sampled_from(["", "salt"]),
        parts=st.lists(st.sampled_from("abx"), min_size=1, max_size=6),
        pinned=st.sampled_from([False, False, True]),
        group=st.integers(0, 1),
    )
    def is_stored(self, salt: str, parts: list[str], pinned: bool, group: int) -> None:
        """From the tail on, as vLLM tells recency."""
        hashes = chain(salt, *parts)
        for place, value in reversed(list(enumerate(hashes))):
            key = key_of(value, group)
            if key in self.held:
                self.order.unpin(key)
                self.held[key].pinned = False
                continue
            self.uses += 1
            self.held[key] = Held((place + 1) * SIZE, self.uses, pinned)
            self.order.put(key, value, length=(place + 1) * SIZE, evictable=not pinned)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), what=st.sampled_from(["pin", "unpin", "use", "remove"]))
    def is_told_of_chunks(self, data: st.DataObject, what: str) -> None:
        keys = data.draw(st.lists(st.sampled_from(sorted(self.held)), max_size=4, unique=True))
        for key in keys:
            held = self.held[key]
            if what == "pin":
                self.order.pin(key)
                held.pinned = True
            elif what == "unpin":
                self.order.unpin(key)
                held.pinned = False
            elif what == "use":
                self.order.use([key])
                self.uses += 1
                held.used = self.uses
            else:
                assert self.order.remove(key) == key[:-GROUP_BYTES]
                del self.held[key]

    @rule(data=st.data(), count=st.integers(1, 12))
    def room_is_needed(self, data: st.DataObject, count: int) -> None:
        everything = sorted(self.held)
        spared = set(data.draw(st.lists(st.sampled_from(everything), max_size=4)) if everything else [])
        loved = set(data.draw(st.lists(st.sampled_from(everything), max_size=1)) if everything else [])
        evicted = self.order.evict(count, spared, self.now, lambda key: key in loved)
        free = self.free(spared)
        if evicted is None:
            victims = sorted(free, key=self.rank)[:count]
            ties = loved and any(self.rank(key) <= self.rank(victims[-1]) for key in loved & set(free))
            assert len(free) < count or ties
            return
        assert len(evicted) == count and not loved & {key for key, _ in evicted}
        gone = {key: self.rank(key) for key, _ in evicted}
        left = [self.rank(key) for key in free if key not in gone]
        assert gone.keys() <= set(free)
        assert all(rank <= other for rank in gone.values() for other in left)
        for key in gone:
            del self.held[key]

    @rule(seconds=st.sampled_from([0.01, 0.1, 5.0, 50.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.book.tick(self.now)

    @rule(key=st.sampled_from(SESSIONS), what=st.sampled_from(["end", "demote", "retain", "expect"]))
    def is_told(self, key: SessionKey, what: str) -> None:
        if what == "end":
            self.book.end(key, tree=True)
        elif what == "demote":
            self.book.demote(key)
        elif what == "expect":
            for session in self.book.sessions(key, tree=False):
                self.book.expect(session.contexts[-1], self.now + 5)
        else:
            self.book.retain(key, self.now + 20, self.now)

    @rule(what=st.sampled_from(["nothing", "follow", "follow", "forget_book", "clear"]))
    def starts_anew(self, what: str) -> None:
        if what == "clear":
            self.order.clear()
            self.held.clear()
        elif what == "forget_book" and self.now > 150:
            self.order.forget_book()
            self.followed = False
        elif what == "follow":
            self.order.follow(self.book)
            self.followed = True

    @invariant()
    def the_same_is_held(self) -> None:
        assert set(self.order) == set(self.held)
        assert self.order.evictable == len(self.free(set()))


Machine.TestCase.settings = settings(max_examples=150, stateful_step_count=50)
TestOrderOfEviction = Machine.TestCase


def stored(order: TierOrder[str], name: str, hashes: list[bytes]) -> None:
    for place, value in reversed(list(enumerate(hashes))):
        if key_of(value) not in order:
            order.put(key_of(value), f"{name}{place}", length=(place + 1) * SIZE, evictable=True)


def test_the_live_session_stays_and_the_ended_one_goes_however_recently_it_was_used() -> None:
    book = Book(SIZE, 40)
    order: TierOrder[str] = TierOrder()
    order.follow(book)
    live, ended = chain("live", "a", "b"), chain("ended", "a", "b")
    for name, hashes, now in (("live", live, 0.0), ("ended", ended, 1.0)):
        context = book.begin(("", name), hashes, now)
        stored(order, name, hashes)
        book.finish(context, hashes, (), now + 0.5, last=name == "ended")
    order.use(map(key_of, ended))
    assert [name for _, name in order.evict(4, (), 2.0) or ()] == ["ended0", "ended1", "ended2", "live2"]


def test_without_a_book_the_least_recently_used_goes() -> None:
    order: TierOrder[str] = TierOrder()
    stored(order, "a", chain("a", "x"))
    stored(order, "b", chain("b"))
    order.use([key_of(chain("a", "x")[1])])
    assert [name for _, name in order.evict(3, (), 0.0) or ()] == ["a0", "b0", "a1"]


def test_what_cannot_be_given_up_changes_nothing() -> None:
    order: TierOrder[str] = TierOrder()
    stored(order, "a", chain("a", "x", "y"))
    keys = [key_of(value) for value in chain("a", "x", "y")]
    order.pin(keys[0])
    assert order.evict(2, {keys[1]}, 0.0) is None
    assert order.evict(1, (), 0.0, lambda key: key == keys[2]) is None
    assert [name for _, name in order.evict(2, (), 0.0) or ()] == ["a2", "a1"]
