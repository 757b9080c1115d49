"""What enters a tier, and what leaves for it: the one comparison that all placement rests on.

Worth is what a unit of room returns (hits per second); whatever is worth most belongs into the tier. So what enters,
from the highest worth down, is set against what leaves, from the lowest up, until the next to enter is not worth more,
by a margin, than the next to leave. Selection is by partition, never a sort of everything: O(rows + moved · log moved).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_FIRST_TAKE = 64


@dataclass(frozen=True, slots=True)
class Rows:
    """What could move: rows of one tier, or of what could come into it, as columns [n].

    ``depth`` orders rows of equal worth so that no successor is ever without its predecessor: it grows along a
    context. Predecessors must be worth at least as much as what follows them.
    """

    worth: Floats
    chunks: Ints
    depth: Ints


@dataclass(frozen=True, slots=True)
class Exchange:
    """(row, chunks) in the order in which to carry it out; all chunks of a row but for the last pair's."""

    enter: list[tuple[int, int]]
    leave: list[tuple[int, int]]


def leaving(held: Rows, wanted: int, below: float = math.inf) -> tuple[Ints, Ints]:
    """Rows whose tails go to free ``wanted`` chunks [n], least worth first, of those worth less than ``below``; and how
    many of each [n]."""
    order = _first(held.worth, -held.depth, held.chunks, wanted, below)
    return _taken(order, held.chunks, wanted)


def entering(wanting: Rows, most: int, above: float = -math.inf) -> tuple[Ints, Ints]:
    """Rows to bring ``most`` chunks of [n], most worth first, of those worth more than ``above``; and how many of each
    [n]."""
    order = _first(-wanting.worth, wanting.depth, wanting.chunks, most, -above)
    return _taken(order, wanting.chunks, most)


def exchange(wanting: Rows, held: Rows, room: int, margin: float, most: int) -> Exchange:
    """What of ``wanting`` enters a tier with ``room`` free chunks, and what of ``held`` makes way.

    At most ``most`` chunks enter. What makes way is worth less than 1 ÷ (1 + ``margin``) of what comes for it.
    """
    offered = _pairs(entering(wanting, most))
    if not offered:
        return Exchange([], [])
    highest = float(wanting.worth[offered[0][0]])
    needed = sum(chunks for _, chunks in offered) - max(0, room)
    givers = _pairs(leaving(held, needed, highest / (1.0 + margin))) if needed > 0 else []
    enter: list[tuple[int, int]] = []
    leave: dict[int, int] = {}
    free, at, left = max(0, room), 0, givers[0][1] if givers else 0
    for row, chunks in offered:
        worth = float(wanting.worth[row])
        while free < chunks and at < len(givers) and held.worth[givers[at][0]] * (1.0 + margin) < worth:
            gone = min(left, chunks - free)
            leave[givers[at][0]] = leave.get(givers[at][0], 0) + gone
            free, left = free + gone, left - gone
            if not left:
                at += 1
                left = givers[at][1] if at < len(givers) else 0
        taken = min(free, chunks)
        if taken:
            enter.append((row, taken))
            free -= taken
        if taken < chunks:
            break  # What is worth less displaces nothing either.
    return Exchange(enter, list(leave.items()))


def first_rows(key: Floats, then: Ints, take: int) -> Ints:
    """The ``take`` rows that come first by (key, then, row), in no order. O(rows)."""
    limit = np.partition(key, take)[take]
    sure = np.flatnonzero(key < limit)
    tied = np.flatnonzero(key == limit)
    # Of equal keys those that come first by depth, so that the cut leaves no hole.
    return np.concatenate((sure, tied[np.argsort(then[tied], kind="stable")[: take - len(sure)]]))


def _first(key: Floats, then: Ints, chunks: Ints, wanted: int, below: float) -> Ints:
    """Rows with chunks and ``key`` < ``below``, lowest (key, then, row) first, as many as hold ``wanted`` chunks."""
    if wanted <= 0:
        return np.empty(0, dtype=np.int64)
    rows = np.flatnonzero((chunks > 0) & (key < below))
    take = _FIRST_TAKE
    while take < len(rows):
        chosen = rows[first_rows(key[rows], then[rows], take)]
        if chunks[chosen].sum() >= wanted:
            rows = chosen
            break
        take *= 4
    return np.asarray(rows[np.lexsort((rows, then[rows], key[rows]))])


def _taken(order: Ints, chunks: Ints, wanted: int) -> tuple[Ints, Ints]:
    """The first rows of ``order`` that hold ``wanted`` chunks together, and how many of each: of the last not all."""
    ends = np.cumsum(chunks[order])
    order = order[: int(np.searchsorted(ends, wanted)) + 1]
    taken = chunks[order]
    if len(order) and ends[len(order) - 1] > wanted:
        taken[-1] -= ends[len(order) - 1] - wanted
    return order, taken


def _pairs(columns: tuple[Ints, Ints]) -> list[tuple[int, int]]:
    return list(zip(*(column.tolist() for column in columns), strict=True))
