"""The inner loops of :mod:`kvpilot.sim.flat`: plain functions over arrays, compiled where numba is installed.

Every chunk is in at most one list: ``place`` says in which (0: in none), ``previous`` and ``following`` link it. The
list with number ``k`` has its sentinel at index ``chunks + k``; ``following[sentinel]`` is its newest member,
``previous[sentinel]`` its oldest. Lists with numbers of ghosts hold chunks that are not here.
"""

from __future__ import annotations

from typing import Any

from kvpilot.sim.jit import jit

# Counters.
CAPACITY, USED, PINNED, WRITTEN, LEAST, FIRST, SECOND, GHOST_FIRST, GHOST_SECOND, TARGET = range(10)
COUNTERS = 10
# Policies.
_LRU, _LFU, _ARC, _S3FIFO = range(4)
# Places. LRU and LFU use the first only (an LFU list is one of equal counts); ARC: T1, T2, B1, B2;
# S3-FIFO: small, main, ghost.
_ABSENT, _FIRST, _SECOND, _GHOST_FIRST, _GHOST_SECOND = range(5)

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
def _lru_evict(state: State) -> None:
    previous, following, place, count, pins, counters = state
    sentinel = len(place) + _FIRST
    while True:
        oldest = previous[sentinel]
        _unlink(previous, following, oldest)
        if pins[oldest] == 0:
            place[oldest] = _ABSENT
            counters[USED] -= 1
            return
        _push(previous, following, sentinel, oldest)


@jit
def _hit(
    policy: int,
    state: State,
    chunk: int,
) -> None:
    previous, following, place, count, pins, counters = state
    chunks = len(place)
    if policy == _LRU:
        _unlink(previous, following, chunk)
        _push(previous, following, chunks + _FIRST, chunk)


@jit
def _admit(
    policy: int,
    state: State,
    chunk: int,
) -> None:
    previous, following, place, count, pins, counters = state
    chunks = len(place)
    if policy == _LRU:
        if counters[USED] >= counters[CAPACITY]:
            _lru_evict(state)
        place[chunk] = _FIRST
        _push(previous, following, chunks + _FIRST, chunk)
    counters[USED] += 1
    counters[WRITTEN] += 1


@jit
def _use(
    policy: int,
    state: State,
    firsts: Array,
    sizes: Array,
    begin: int,
) -> None:
    """Chunks of the runs from ``begin`` on are pinned and used, last to first; the first missing ones get room."""
    previous, following, place, count, pins, counters = state
    for run in range(begin, len(firsts)):
        for chunk in range(firsts[run], firsts[run] + sizes[run]):
            if pins[chunk] == 0 and _here(place, chunk):
                counters[PINNED] += 1
            pins[chunk] += 1
    room = counters[CAPACITY] - counters[PINNED]
    fits = 0
    for run in range(begin, len(firsts)):
        for chunk in range(firsts[run], firsts[run] + sizes[run]):
            if not _here(place, chunk):
                if room == 0:
                    break
                room -= 1
            fits += 1
        if room == 0:
            break
    position = 0
    for run in range(begin, len(firsts)):
        position += sizes[run]
    for run in range(len(firsts) - 1, begin - 1, -1):
        for chunk in range(firsts[run] + sizes[run] - 1, firsts[run] - 1, -1):
            position -= 1
            if _here(place, chunk):
                _hit(policy, state, chunk)
            elif position < fits:
                _admit(policy, state, chunk)
                counters[PINNED] += 1


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
    _admit(policy, state, chunk)
    return False


@jit
def flat_request(
    policy: int,
    state: State,
    firsts: Array,
    sizes: Array,
) -> int:
    """See :meth:`kvpilot.sim.flat.FlatCache.request`."""
    previous, following, place, count, pins, counters = state
    hit = 0
    going = True
    for run in range(len(firsts)):
        if not going:
            break
        for chunk in range(firsts[run], firsts[run] + sizes[run]):
            if not _here(place, chunk):
                going = False
                break
            hit += 1
    _use(policy, state, firsts, sizes, 0)
    return hit


@jit
def flat_end(
    policy: int,
    state: State,
    firsts: Array,
    sizes: Array,
    prompt_runs: int,
) -> None:
    """See :meth:`kvpilot.sim.flat.FlatCache.end`."""
    previous, following, place, count, pins, counters = state
    whole = True
    for run in range(prompt_runs):
        for chunk in range(firsts[run], firsts[run] + sizes[run]):
            whole = whole and _here(place, chunk)
    runs = prompt_runs
    if whole:
        _use(policy, state, firsts, sizes, prompt_runs)
        runs = len(firsts)
    for run in range(runs):
        for chunk in range(firsts[run], firsts[run] + sizes[run]):
            pins[chunk] -= 1
            if pins[chunk] == 0 and _here(place, chunk):
                counters[PINNED] -= 1
