"""The device pool rebuilt from events answers like a naive model of a prefix cache."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpilot.ingest.device import DevicePool

BLOCK = 4


def block_hash(salt: str, adapter: str, tokens: tuple[int, ...]) -> int:
    """Stands for vLLM's hash: a function of everything up to the block's end."""
    return hash((salt, adapter, tokens))


def store(pool: DevicePool, salt: str, adapter: str, tokens: list[int], first: int, last: int) -> set[int]:
    """Publish blocks [first, last) of a context as vLLM does; returns their hashes."""
    prefix = [
        block_hash(salt, adapter, tuple(tokens[: (i + 1) * BLOCK])) for i in range(len(tokens) // BLOCK)
    ]
    extra: list[list[object] | None] = []
    for index in range(first, last):
        keys: list[object] = [adapter] if adapter else []
        if index == 0 and salt:
            keys.append(salt)
        extra.append(keys or None)
    assert pool.stored(
        prefix[first:last],
        prefix[first - 1] if first else None,
        tokens[first * BLOCK : last * BLOCK],
        BLOCK,
        adapter=adapter,
        extra_keys=extra,
    )
    return set(prefix[first:last])


contexts = st.lists(st.integers(0, 1), min_size=BLOCK, max_size=5 * BLOCK)
names = st.sampled_from(["", "a", "b"])
steps = st.one_of(
    st.tuples(st.just("store"), names, names, contexts, st.integers(0, 4), st.integers(1, 5)),
    st.tuples(st.just("remove"), st.integers(0, 30)),
    st.tuples(st.just("clear")),
)


@settings(max_examples=300)
@given(st.lists(steps, max_size=25), names, names, contexts)
def test_prefix_is_what_a_prefix_cache_would_hit(
    history: list[tuple], salt: str, adapter: str, question: list[int]
) -> None:
    pool, cached = DevicePool(), set[int]()
    for step in history:
        if step[0] == "store":
            _, own_salt, own_adapter, tokens, first, last = step
            first, last = min(first, len(tokens) // BLOCK - 1), min(last, len(tokens) // BLOCK)
            if first < last:
                cached |= store(pool, own_salt, own_adapter, tokens, first, last)
        elif step[0] == "remove" and cached:
            victim = sorted(cached)[step[1] % len(cached)]
            cached.discard(victim)
            pool.removed([victim])
        elif step[0] == "clear":
            cached.clear()
            pool.clear()
    expected = 0
    while (
        expected + BLOCK <= len(question)
        and block_hash(salt, adapter, tuple(question[: expected + BLOCK])) in cached
    ):
        expected += BLOCK
    assert pool.prefix(salt, adapter, np.asarray(question, dtype=np.uint32)) == expected
    assert len(pool) == len(cached)


def test_a_block_whose_hash_covers_more_than_tokens_is_not_found_by_tokens() -> None:
    pool = DevicePool()
    assert pool.stored([1], None, [7] * BLOCK, BLOCK, extra_keys=[[["image", 0]]])
    assert pool.prefix("", "", np.full(BLOCK, 7, np.uint32)) == 0
    assert pool.stored([2], None, [7] * BLOCK, BLOCK)
    assert pool.prefix("", "", np.full(BLOCK, 7, np.uint32)) == BLOCK


def test_events_that_do_not_describe_their_blocks_change_nothing() -> None:
    pool = DevicePool()
    assert not pool.stored([1, 2], None, [7] * BLOCK, BLOCK)
    assert not pool.stored([1], None, [], 0)
    assert len(pool) == 0
    assert pool.prefix("", "", np.zeros(64, np.uint32)) == 0


def test_a_partial_block_does_not_change_the_block_size() -> None:
    pool = DevicePool()
    pool.stored([1], None, [7] * BLOCK, BLOCK)
    pool.stored([2], 1, [8, 8], 2)
    assert pool.prefix("", "", np.array([7] * BLOCK + [8, 8], np.uint32)) == BLOCK
