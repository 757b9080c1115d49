"""The rule of the reference table: what is released is exactly what no live session holds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvpilot.context.chunks import ChunkHasher, short_hash
from kvpilot.domain import Space, TokenArray
from kvpilot.sessions.references import IntegrityError, ReferenceTable

SPACES = (Space("m"), Space("m", salt="tenant"))
CHUNK = 4
HASHER = ChunkHasher(CHUNK)


def array(*parts: list[int] | range) -> TokenArray:
    return np.array([token for part in parts for token in part], dtype=np.uint32)


class Sessions(RuleBasedStateMachine):
    """Random sessions against a naive model: owner → space and the set of its chunks."""

    def __init__(self) -> None:
        super().__init__()
        self.table = ReferenceTable(HASHER)
        self.contexts: dict[str, tuple[Space, list[int]]] = {}

    def held(self, space: Space) -> set[bytes]:
        return {
            chunk
            for where, tokens in self.contexts.values()
            if where == space
            for chunk in HASHER.hashes(array(tokens))
        }

    owners = st.sampled_from(["a", "b", "c", "d"])
    # Few token values and a common head, so that contexts share, part inside chunks, and meet again.
    tokens = st.builds(
        lambda head, tail: [7] * head + tail,
        st.integers(0, 11),
        st.lists(st.integers(0, 1), max_size=14),
    )

    @initialize()
    def start(self) -> None:
        assert self.table.owners() == []

    @rule(owner=owners, space=st.sampled_from(SPACES), tokens=tokens, with_hashes=st.booleans())
    def move(self, owner: str, space: Space, tokens: list[int], with_hashes: bool) -> None:
        old = self.contexts.get(owner)
        self.contexts[owner] = (space, tokens)
        context = array(tokens)
        released = self.table.set(
            owner, space, context, hashes=HASHER.hashes(context) if with_hashes else None
        )
        self.check_released(old, released.space, released.chunks)

    @precondition(lambda self: self.contexts)
    @rule(data=st.data(), tail=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def append(self, data: st.DataObject, tail: list[int]) -> None:
        owner = data.draw(st.sampled_from(sorted(self.contexts)))
        space, tokens = self.contexts[owner]
        self.move(owner, space, tokens + tail, with_hashes=False)

    @precondition(lambda self: self.contexts)
    @rule(data=st.data(), cut=st.integers(0, 25))
    def edit_away_the_tail(self, data: st.DataObject, cut: int) -> None:
        owner = data.draw(st.sampled_from(sorted(self.contexts)))
        space, tokens = self.contexts[owner]
        self.move(owner, space, tokens[:cut], with_hashes=True)

    @precondition(lambda self: self.contexts)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(sorted(self.contexts)))
        old = self.contexts.pop(owner)
        released = self.table.drop(owner)
        self.check_released(old, released.space, released.chunks)

    def check_released(
        self, old: tuple[Space, list[int]] | None, space: Space, chunks: tuple[bytes, ...]
    ) -> None:
        if old is None:
            assert chunks == ()
            return
        assert space == old[0]
        had = HASHER.hashes(array(old[1]))
        assert list(chunks) == [chunk for chunk in reversed(had) if chunk not in self.held(space)]

    @invariant()
    def table_agrees_with_the_model(self) -> None:
        self.table.check_integrity(rehash=True)
        assert set(self.table.owners()) == set(self.contexts)
        for owner, (space, tokens) in self.contexts.items():
            assert self.table.space(owner) == space
            assert self.table.tokens(owner).tolist() == tokens
            assert self.table.length(owner) == len(tokens)
            assert self.table.chunks(owner) == HASHER.hashes(array(tokens))
        for space in SPACES:
            chunks = sorted(self.held(space))
            expected = [
                sum(
                    where == space and chunk in HASHER.hashes(array(tokens))
                    for where, tokens in self.contexts.values()
                )
                for chunk in chunks
            ]
            assert self.table.holders(space, chunks) == expected
            assert all(self.table.resolve(space, short_hash(chunk)) == chunk for chunk in chunks)

    @invariant()
    def no_more_tokens_are_kept_than_the_contexts_have(self) -> None:
        kept = self.table.size().tokens
        assert kept <= sum(len(tokens) for _, tokens in self.contexts.values())


TestSessions = Sessions.TestCase
TestSessions.settings = settings(max_examples=60, stateful_step_count=30)

SPACE = SPACES[0]


def test_ending_one_session_keeps_every_chunk_of_the_shared_system_prompt() -> None:
    table = ReferenceTable(HASHER)
    system = range(100, 110)
    table.set("a", SPACE, array(system, [1] * 9))
    table.set("b", SPACE, array(system, [2] * 9))
    kept = table.chunks("b")
    released = table.drop("a")
    assert not set(released.chunks) & set(kept)
    # 10 shared tokens hold 2 chunks; the chunk over the branch point differs between the two.
    assert len(released.chunks) == 19 // CHUNK - 2
    assert table.holders(SPACE, kept) == [1] * len(kept)


def test_compaction_releases_what_only_the_old_context_held() -> None:
    table = ReferenceTable(HASHER)
    old = array(range(8), range(50, 80))
    table.set("a", SPACE, old)
    released = table.set("a", SPACE, array(range(8), [9, 9, 9, 9]))
    assert released.chunks == tuple(reversed(HASHER.hashes(old)[2:]))
    assert released.tokens == 30


def test_a_context_that_ends_inside_a_chunk_does_not_hold_it() -> None:
    table = ReferenceTable(HASHER)
    table.set("long", SPACE, array(range(16)))
    table.set("short", SPACE, array(range(10)))
    chunks = table.chunks("long")
    assert table.holders(SPACE, chunks) == [2, 2, 1, 1]
    assert table.drop("long").chunks == (chunks[3], chunks[2])


def test_equal_tokens_of_another_space_are_another_context() -> None:
    table = ReferenceTable(HASHER)
    for space in SPACES:
        table.set(space.salt or "none", space, array(range(8)))
    assert len(table.drop("none").chunks) == 2
    assert table.holders(SPACES[1], table.chunks("tenant")) == [1, 1]


def test_moving_to_another_space_releases_in_the_old_one() -> None:
    table = ReferenceTable(HASHER)
    table.set("a", SPACES[0], array(range(8)))
    released = table.set("a", SPACES[1], array(range(8)))
    assert (released.space, len(released.chunks)) == (SPACES[0], 2)


def test_longest_shared_and_audit_of_a_directory() -> None:
    table = ReferenceTable(HASHER)
    assert table.longest_shared(SPACE, array(range(5))) == 0
    table.set("a", SPACE, array(range(20)))
    assert table.longest_shared(SPACE, array(range(7), [99])) == 7
    assert table.longest_shared(SPACE, array(range(30))) == 20
    stranger = HASHER.hashes(array([1, 2, 3, 4]))[0]
    assert list(table.unreferenced(SPACE, [*table.chunks("a"), stranger])) == [stranger]
    assert not table.is_live(SPACE, stranger)
    assert table.resolve(SPACE, short_hash(stranger)) is None


def test_hashes_that_do_not_belong_to_the_tokens_are_refused_and_change_nothing() -> None:
    table = ReferenceTable(HASHER)
    table.set("a", SPACE, array(range(8)))
    with pytest.raises(ValueError, match="2 chunks, not 1"):
        table.set("b", SPACE, array(range(8)), hashes=[bytes(32)])
    with pytest.raises(ValueError, match="another hash"):
        table.set("b", SPACE, array(range(8)), hashes=[bytes(32), bytes(32)])
    with pytest.raises(ValueError, match="2 chunks, not 0"):
        table.set("b", SPACES[1], array(range(8)), hashes=[])
    table.check_integrity()
    assert table.owners() == ["a"]


def test_a_growing_context_stays_one_run() -> None:
    table = ReferenceTable(ChunkHasher(256))
    context = np.random.default_rng(0).integers(0, 49152, 20_000, dtype=np.uint32)
    for length in range(1000, 20_001, 1000):
        assert table.set("a", SPACE, context[:length]).chunks == ()
    size = table.size()
    assert (size.nodes, size.tokens, size.chunks) == (2, 20_000, 20_000 // 256)
    table.check_integrity(rehash=True)


def test_nothing_is_left_after_many_sessions_came_and_went() -> None:
    table = ReferenceTable(HASHER)
    generator = np.random.default_rng(1)
    for number in range(300):
        table.set(f"s{number}", SPACE, array(range(40), generator.integers(0, 3, 60).tolist()))
    table.check_integrity(rehash=True)
    for number in range(300):
        table.drop(f"s{number}")
    table.check_integrity()
    assert table.size().nbytes == 0


def test_a_miscounted_reference_is_found() -> None:
    table = ReferenceTable(HASHER)
    table.set("a", SPACE, array(range(8)))
    table._owners["ghost"] = table._owners["a"]
    with pytest.raises(IntegrityError, match="miscounted"):
        table.check_integrity()
