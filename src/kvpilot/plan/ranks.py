"""Rows in the order of what they are worth, kept up row by row.

Rows lie in buckets of a quarter of an octave of worth: a change moves a row only where it leaves its bucket, and
whoever looks for the least or the dearest sorts no more than the buckets that have them. O(1) a change, O(rows looked
at + buckets) a look.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import chain

import numpy as np

from kvpilot.plan.exchange import Floats, Ints
from kvpilot.plan.holdings import doubled

EVERYBODY = 0
"""The group of rows of all who have none of their own."""
_OUT = -1
_BUCKET_BITS = 13
"""Of a double's 64 those of the exponent and of the first two of the fraction."""
_BATCH = 256
"""Rows that are looked at together at least: fewer take as long."""


class Ranks:
    """``put`` says which rows take part, and what they are worth; each belongs to a group (0, 1, …)."""

    def __init__(self) -> None:
        self._key = np.full(64, _OUT, dtype=np.int64)
        """By row: group and bucket."""
        self._rows: dict[int, set[int]] = {}
        """By group and bucket."""

    def grow(self, rows: int) -> None:
        while len(self._key) < rows:
            fresh = len(self._key)
            self._key = doubled(self._key)
            self._key[fresh:] = _OUT

    def put(self, rows: Ints, there: Ints, worth: Floats, group: Ints) -> None:
        """``rows`` [n] take part where ``there`` is above 0; worths [n] are 0 or more."""
        bucket = np.ascontiguousarray(worth, dtype=np.float64).view(np.int64) >> (63 - _BUCKET_BITS)
        keys = np.where(there > 0, group << _BUCKET_BITS | bucket, _OUT)
        before = self._key[rows]
        moved = keys != before
        for row, old, new in zip(
            rows[moved].tolist(), before[moved].tolist(), keys[moved].tolist(), strict=True
        ):
            if old != _OUT:
                others = self._rows[old]
                others.discard(row)
                if not others:
                    del self._rows[old]
            if new != _OUT:
                self._rows.setdefault(new, set()).add(row)
        self._key[rows] = keys

    def upwards(self, group: int | None = None) -> Iterator[Ints]:
        """Rows in batches, ascending in each, with all of a batch's worths, those worth least first; ``group`` None:
        of all."""
        chosen = (key for key in self._rows if group is None or key >> _BUCKET_BITS == group)
        return self._batches(chosen, dearest_first=False)

    def downwards(self, without: Collection[int] = ()) -> Iterator[Ints]:
        """The same, those worth most first, of all groups but those ``without``."""
        chosen = (key for key in self._rows if key >> _BUCKET_BITS not in without)
        return self._batches(chosen, dearest_first=True)

    def _batches(self, keys: Iterable[int], *, dearest_first: bool) -> Iterator[Ints]:
        by_worth: dict[int, list[set[int]]] = {}
        for key in keys:
            by_worth.setdefault(key & ((1 << _BUCKET_BITS) - 1), []).append(self._rows[key])
        found: list[set[int]] = []
        count = 0
        for bucket in sorted(by_worth, reverse=dearest_first):
            found += by_worth[bucket]
            count += sum(map(len, by_worth[bucket]))
            if count >= _BATCH:
                yield _ascending(found, count)
                found, count = [], 0
        if found:
            yield _ascending(found, count)


def _ascending(found: list[set[int]], count: int) -> Ints:
    return np.sort(np.fromiter(chain(*found), dtype=np.int64, count=count))
