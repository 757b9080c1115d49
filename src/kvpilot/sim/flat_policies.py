"""The inner loops of :mod:`kvpilot.sim.flat`: plain functions over arrays, compiled where numba is installed.

Every chunk is in at most one list: ``place`` says in which (0: in none), ``previous`` and ``following`` link it. The
list with number ``k`` has its sentinel at index ``chunks + k``; ``following[sentinel]`` is its newest member,
``previous[sentinel]`` its oldest. Lists with numbers of ghosts hold chunks that are not here.
"""

from __future__ import annotations

from typing import Any

from kvpilot.sim.jit import jit

# Counters, by chunks. LFU: the LEAST count in use. ARC: its TARGET (p) in units of 1 / SCALE. S3-FIFO: whether it
# HAS_EVICTED anything yet. A list is SPENT when running requests use all that is in it, as far as this step goes.
(
    CAPACITY,
    USED,
    PINNED,
    WRITTEN,
    LEAST,
    FIRST,
    SECOND,
    GHOSTS_FIRST,
    GHOSTS_SECOND,
    TARGET,
    SPENT_FIRST,
    SPENT_SECOND,
) = range(12)
HAS_EVICTED = TARGET
COUNTERS = 12
SCALE = 1 << 20
# Policies.
_LRU, _LFU, _ARC, _S3FIFO = range(4)
# Places, which are also lists: LRU has the first only, LFU a list for each count (place: the first); of ARC they are
# T1, T2, B1, B2; of S3-FIFO small, main, ghost.
_NOWHERE, _FIRST, _SECOND, _GHOST_FIRST, _GHOST_SECOND = range(5)
_S3_SMALL_SHARE, _S3_GHOST_SHARE, _S3_PROMOTED_FROM, _S3_MOST = 0.1, 0.9, 2, 3

Array = Any
State = tuple[Any, Any, Any, Any, Any, Any]
"""previous, following, place, count, pins, counters"""


@jit
def _unlink(previous: Array, following: Array, item: int) -> None:
    before, behind = previous[item], following[item]
    following[before] = behind
    previous[behind] = before


@jit
def _push(previous: Array, following: Array, sentinel: int, item: int) -> None:
    head = following[sentinel]
    following[sentinel] = item
    previous[item] = sentinel
    following[item] = head
    previous[head] = item


@jit
def _here(place: Array, chunk: int) -> bool:
    return bool(place[chunk] == _FIRST or place[chunk] == _SECOND)


@jit
def _oldest(state: State, number: int) -> int:
    """The oldest member of a list that no running request uses (-1: none). Those that are used become the newest."""
    previous, following, place, count, pins, counters = state
    sentinel = len(place) + number
    if number <= _SECOND and counters[SPENT_FIRST - _FIRST + number] == 1:
        return -1
    first_used = -1
    while True:
        oldest = previous[sentinel]
        if oldest in (sentinel, first_used):
            if number <= _SECOND:
                counters[SPENT_FIRST - _FIRST + number] = 1
            return -1
        if pins[oldest] == 0:
            return int(oldest)
        if first_used < 0:
            first_used = oldest
        _unlink(previous, following, oldest)
        _push(previous, following, sentinel, oldest)


@jit
def _move(state: State, chunk: int, number: int) -> None:
    """From where it is (or from nowhere) to the newest of the list; keeps the books of sizes."""
    previous, following, place, count, pins, counters = state
    before = place[chunk]
    if before != _NOWHERE:
        _unlink(previous, following, chunk)
        counters[FIRST - _FIRST + before] -= 1
        if before <= _SECOND:
            counters[USED] -= 1
    place[chunk] = number
    if number != _NOWHERE:
        _push(previous, following, len(place) + number, chunk)
        counters[FIRST - _FIRST + number] += 1
        if number <= _SECOND:
            counters[USED] += 1


@jit
def _lfu_evict(state: State) -> None:
    previous, following, place, count, pins, counters = state
    number = counters[LEAST]
    while True:
        oldest = _oldest(state, number)
        if oldest >= 0:
            _unlink(previous, following, oldest)
            place[oldest] = _NOWHERE
            counters[USED] -= 1
            return
        number += 1
        counters[LEAST] = number


@jit
def _lfu_count(state: State, chunk: int, uses: int) -> None:
    previous, following, place, count, pins, counters = state
    count[chunk] = uses
    _push(previous, following, len(place) + uses, chunk)


@jit
def _arc_replace(state: State, from_second_ghost: bool) -> None:
    previous, following, place, count, pins, counters = state
    first = counters[FIRST] * SCALE
    wants_first = counters[FIRST] > 0 and (
        first > counters[TARGET] or (from_second_ghost and first == counters[TARGET])
    )
    oldest = _oldest(state, _FIRST if wants_first else _SECOND)
    if oldest < 0:
        oldest = _oldest(state, _SECOND if wants_first else _FIRST)
    _move(state, oldest, _GHOST_FIRST if place[oldest] == _FIRST else _GHOST_SECOND)


@jit
def _arc_admit(state: State, chunk: int, full: bool) -> None:
    previous, following, place, count, pins, counters = state
    capacity = counters[CAPACITY]
    one, two = counters[GHOSTS_FIRST], counters[GHOSTS_SECOND]
    if place[chunk] == _GHOST_FIRST:
        step = SCALE * max(one, two) // one
        counters[TARGET] = min(counters[TARGET] + step, capacity * SCALE)
        if full:
            _arc_replace(state, False)
        _move(state, chunk, _SECOND)
        return
    if place[chunk] == _GHOST_SECOND:
        step = SCALE * max(one, two) // two
        counters[TARGET] = max(counters[TARGET] - step, 0)
        if full:
            _arc_replace(state, True)
        _move(state, chunk, _SECOND)
        return
    if counters[FIRST] + one >= capacity:
        if one > 0:
            _move(state, previous[len(place) + _GHOST_FIRST], _NOWHERE)
            if full:
                _arc_replace(state, False)
        elif full:
            oldest = _oldest(state, _FIRST)
            _move(state, oldest if oldest >= 0 else _oldest(state, _SECOND), _NOWHERE)
    else:
        if counters[USED] + one + two >= 2 * capacity and two > 0:
            _move(state, previous[len(place) + _GHOST_SECOND], _NOWHERE)
        if full:
            _arc_replace(state, False)
    _move(state, chunk, _FIRST)


@jit
def _s3_to_ghost(state: State, chunk: int) -> None:
    previous, following, place, count, pins, counters = state
    _move(state, chunk, _GHOST_FIRST)
    if counters[GHOSTS_FIRST] > int(_S3_GHOST_SHARE * counters[CAPACITY]):
        _move(state, previous[len(place) + _GHOST_FIRST], _NOWHERE)


@jit
def _s3_evict(state: State) -> None:
    previous, following, place, count, pins, counters = state
    counters[HAS_EVICTED] = 1
    main = counters[CAPACITY] - int(_S3_SMALL_SHARE * counters[CAPACITY])
    if counters[SECOND] <= main and counters[FIRST] > 0:
        while True:
            oldest = _oldest(state, _FIRST)
            if oldest < 0:
                break
            if count[oldest] < _S3_PROMOTED_FROM:
                _s3_to_ghost(state, oldest)
                return
            count[oldest] = 0
            counters[SPENT_SECOND] = 0
            _move(state, oldest, _SECOND)
    while True:
        oldest = _oldest(state, _SECOND)
        if oldest < 0:
            _s3_to_ghost(state, _oldest(state, _FIRST))
            return
        if count[oldest] == 0:
            _move(state, oldest, _NOWHERE)
            return
        count[oldest] -= 1
        _move(state, oldest, _SECOND)


@jit
def _s3_admit(state: State, chunk: int, full: bool) -> None:
    previous, following, place, count, pins, counters = state
    known = place[chunk] == _GHOST_FIRST
    _move(state, chunk, _NOWHERE)
    if full:
        _s3_evict(state)
    small = int(_S3_SMALL_SHARE * counters[CAPACITY])
    # As in its authors' later version, the main queue fills up first.
    filling = counters[HAS_EVICTED] == 0 and counters[FIRST] >= small
    count[chunk] = 0
    _move(state, chunk, _SECOND if known or filling else _FIRST)


@jit
def _hit(policy: int, state: State, chunk: int) -> None:
    """A chunk that is here is used."""
    previous, following, place, count, pins, counters = state
    if policy == _LRU:
        _unlink(previous, following, chunk)
        _push(previous, following, len(place) + _FIRST, chunk)
    elif policy == _LFU:
        _unlink(previous, following, chunk)
        _lfu_count(state, chunk, count[chunk] + 1)
    elif policy == _ARC:
        _move(state, chunk, _SECOND)
    else:
        count[chunk] = min(_S3_MOST, count[chunk] + 1)


@jit
def _admit(policy: int, state: State, chunk: int) -> None:
    """A chunk that is not here is used; something that no running request uses can make room for it."""
    previous, following, place, count, pins, counters = state
    counters[WRITTEN] += 1
    full = counters[USED] >= counters[CAPACITY]
    if policy == _LRU:
        if full:
            _move(state, _oldest(state, _FIRST), _NOWHERE)
        _move(state, chunk, _FIRST)
    elif policy == _LFU:
        if full:
            _lfu_evict(state)
        place[chunk] = _FIRST
        counters[USED] += 1
        _lfu_count(state, chunk, 1)
    elif policy == _ARC:
        _arc_admit(state, chunk, full)
    else:
        _s3_admit(state, chunk, full)


@jit
def _new_step(counters: Array) -> None:
    counters[LEAST] = 1
    counters[SPENT_FIRST] = 0
    counters[SPENT_SECOND] = 0


@jit
def _leading_that_fit(place: Array, firsts: Array, sizes: Array, begin: int, room: int) -> int:
    """How many leading chunks can be here when ``room`` of those that are missing get in."""
    fits = 0
    for run in range(begin, len(firsts)):
        for chunk in range(firsts[run], firsts[run] + sizes[run]):
            if not _here(place, chunk):
                if room == 0:
                    return fits
                room -= 1
            fits += 1
    return fits


@jit
def _use(policy: int, state: State, firsts: Array, sizes: Array, begin: int) -> int:
    """Chunks of the runs from ``begin`` on are pinned and used, last to first; of the missing the first get room.

    Returns how many leading ones were here.
    """
    previous, following, place, count, pins, counters = state
    here = total = leading = 0
    for run in range(begin, len(firsts)):
        total += sizes[run]
        for chunk in range(firsts[run], firsts[run] + sizes[run]):
            if _here(place, chunk):
                if pins[chunk] == 0:
                    counters[PINNED] += 1
                here += 1
            elif leading == 0:
                leading = here + 1
            pins[chunk] += 1
    hit = here if leading == 0 else leading - 1
    _new_step(counters)
    room = counters[CAPACITY] - counters[PINNED]
    fits = total if total - here <= room else _leading_that_fit(place, firsts, sizes, begin, room)
    position = total
    for run in range(len(firsts) - 1, begin - 1, -1):
        for chunk in range(firsts[run] + sizes[run] - 1, firsts[run] - 1, -1):
            position -= 1
            if _here(place, chunk):
                _hit(policy, state, chunk)
            elif position < fits:
                _admit(policy, state, chunk)
                counters[PINNED] += 1
    return int(hit)


@jit
def flat_access(
    policy: int,
    state: State,
    chunk: int,
) -> bool:
    """See :meth:`kvpilot.sim.flat.FlatCache.access`."""
    previous, following, place, count, pins, counters = state
    if _here(place, chunk):
        _hit(policy, state, chunk)
        return True
    _new_step(counters)
    _admit(policy, state, chunk)
    return False


@jit
def flat_request(policy: int, state: State, firsts: Array, sizes: Array) -> int:
    """See :meth:`kvpilot.sim.flat.FlatCache.request`."""
    return _use(policy, state, firsts, sizes, 0)


@jit
def flat_unpin(state: State, firsts: Array, sizes: Array) -> None:
    """See :meth:`kvpilot.sim.flat.FlatCache.unpin`."""
    previous, following, place, count, pins, counters = state
    for run in range(len(firsts)):
        for chunk in range(firsts[run], firsts[run] + sizes[run]):
            pins[chunk] -= 1
            if pins[chunk] == 0 and _here(place, chunk):
                counters[PINNED] -= 1


@jit
def flat_reply(policy: int, state: State, firsts: Array, sizes: Array, prompt_runs: int) -> None:
    """See :meth:`kvpilot.sim.flat.FlatCache.reply`."""
    previous, following, place, count, pins, counters = state
    for run in range(prompt_runs):
        for chunk in range(firsts[run], firsts[run] + sizes[run]):
            if not _here(place, chunk):
                return
    _use(policy, state, firsts, sizes, prompt_runs)
    flat_unpin(state, firsts[prompt_runs:], sizes[prompt_runs:])
