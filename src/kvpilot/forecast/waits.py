"""Who waits for what, since when: learns from every wait, and says what each is worth now."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from kvpilot.forecast.bins import BINS, EDGES, Floats, bin_of
from kvpilot.forecast.curve import Curve, curve
from kvpilot.forecast.hazard import HazardModel

_MILESTONES = (18, 22, 26, 30, 34, 38, 42)
"""Bins at whose end a wait that goes on is learned from (about 10 s, 40 s, 3 min, 11 min, 43 min, 3 h, 12 h)."""


class Open(msgspec.Struct, gc=False):
    """A wait under way. ``learned``: the first bin that was not learned from yet."""

    curve: Curve
    features: tuple[str, ...]
    since: float
    learned: int = 0


class StoredWait(msgspec.Struct):
    """A wait that nothing is foreseen of meanwhile: before a restart, or while something more is known of its end.
    Fields as in :class:`Open`."""

    features: tuple[str, ...]
    since: float
    learned: int


class Waits:
    """One kind of wait, by owner (a small number each).

    ``begin``, then ``end`` (it came back) or ``drop`` (it never will, or nobody will know). What all owners are
    worth is one look-up; a beginning costs a curve, an end a step of learning.
    """

    def __init__(self, model: HazardModel, horizons: Sequence[float] = (np.inf,)) -> None:
        """``horizons``, seconds: see :func:`kvpilot.forecast.curve.worth_in`."""
        self.model = model
        self._horizons = np.array(horizons)
        self._since = np.zeros(64)
        self._survival = np.zeros((64, BINS + 1))
        """By owner, at ``EDGES``."""
        self._current = np.zeros((len(self._horizons), 64))
        self._until = np.zeros(64)
        """By owner: worth now, and until when that is so."""
        self._changed = np.zeros(64, dtype=bool)
        """By owner: whether :meth:`changed` has to tell of it."""
        self._now = 0.0
        self._open: dict[int, Open] = {}
        self._due: list[tuple[float, int, float, int]] = []

    def begin(self, owner: int, features: Sequence[str], now: float) -> None:
        """``owner`` begins to wait at ``now``, which may lie ahead where a hint announced it; a wait that was still
        open is forgotten."""
        while owner >= len(self._since):
            self._since = np.concatenate((self._since, np.zeros_like(self._since)))
            self._survival = np.concatenate((self._survival, np.zeros_like(self._survival)))
            self._current = np.concatenate((self._current, np.zeros_like(self._current)), axis=1)
            self._until = np.concatenate((self._until, np.zeros_like(self._until)))
            self._changed = np.concatenate((self._changed, np.zeros_like(self._changed)))
        found = curve(self.model.hazards(features))
        self._since[owner] = now
        np.subtract(1.0, found.cdf, out=self._survival[owner])
        self._until[owner] = -np.inf
        self._open[owner] = Open(found, tuple(features), now)
        self._remind(owner, now, 0)

    def end(self, owner: int, now: float) -> float | None:
        """``owner`` came back: how many seconds it was away (None: it did not wait)."""
        wait = self._open.get(owner)
        if wait is None:
            return None
        self.learn_end(wait, now)
        self.drop(owner)
        return max(0.0, now - wait.since)

    def learn_end(self, wait: Open | StoredWait, now: float) -> None:
        """A wait, open or set aside, has ended."""
        last = max(bin_of(now - wait.since), wait.learned)
        self.model.learn(wait.features, wait.learned, last, ended=True)

    def drop(self, owner: int) -> None:
        """The wait is over without an end to learn from."""
        if self._open.pop(owner, None) is not None:
            self._survival[owner] = self._current[:, owner] = 0.0
            self._until[owner] = np.inf
            self._changed[owner] = True

    def tick(self, now: float) -> None:
        """Learn from waits that go on. Call it as time passes, O(waits that have reached a milestone)."""
        while self._due and self._due[0][0] <= now:
            _, owner, since, milestone = heapq.heappop(self._due)
            wait = self._open.get(owner)
            if wait is None or wait.since != since:
                continue
            last = _MILESTONES[milestone]
            self.model.learn(wait.features, wait.learned, last, ended=False)
            wait.learned = max(wait.learned, last + 1)
            self._remind(owner, wait.since, milestone + 1)

    def stored(self, owner: int) -> StoredWait | None:
        """The open wait, for :meth:`resume` or :meth:`learn_end`."""
        wait = self._open.get(owner)
        return None if wait is None else StoredWait(wait.features, wait.since, wait.learned)

    def resume(self, owner: int, wait: StoredWait) -> None:
        """Take up a wait that was under way before a restart."""
        self.begin(owner, wait.features, wait.since)
        self._open[owner].learned = wait.learned

    def get(self, owner: int) -> Open | None:
        """An open wait: its curve, its features and since when it lasts."""
        return self._open.get(owner)

    def worth(self, owner: int, now: float, horizon: int = 0) -> float:
        """``worths`` of one owner."""
        if owner >= len(self._until):
            return 0.0
        if not now < self._until[owner] or now < self._now:
            self._look(np.array([owner]), now)
        return float(self._current[horizon, owner])

    def worths(self, now: float, horizon: int = 0) -> Floats:
        """By owner: returns per second that a unit of room held for it brings; 0 where it does not wait.

        Worth is constant within a bin of :mod:`kvpilot.forecast.bins`, so only those are looked at whose bin has
        ended, or whose wait has not begun. O(owners), O(BINS) for each of those.
        """
        self._refresh(now)
        found: Floats = self._current[horizon].copy()
        return found

    def changed(self, now: float) -> npt.NDArray[np.intp]:
        """Owners whose worth may be another one than when this was asked last, ascending: for one who follows them
        all. O(owners) in looking through two columns only, O(BINS) for each of those."""
        self._refresh(now)
        found = np.flatnonzero(self._changed)
        self._changed[found] = False
        return found

    def worths_of(self, owners: npt.NDArray[np.intp], horizon: int = 0) -> Floats:
        """[n] worths of ``owners`` [n] as they were looked up last; 0 for unknown ones."""
        known = owners < len(self._until)
        found = np.zeros(len(owners))
        found[known] = self._current[horizon, owners[known]]
        return found

    def changes(self, now: float) -> float:
        """When the next worth is another one if nothing happens: a bin of some wait ends then. Infinity: never."""
        return float(self._until.min(where=self._until > now, initial=np.inf))

    def _refresh(self, now: float) -> None:
        ended = np.flatnonzero(self._until <= now) if now >= self._now else np.arange(len(self._until))
        self._now = now
        if len(ended):
            self._look(ended, now)

    def _look(self, owners: npt.NDArray[np.intp], now: float) -> None:
        self._changed[owners] = True
        look = self.model.kernels.look
        look(owners, now, self._horizons, self._since, self._survival, self._current, self._until)

    def _remind(self, owner: int, since: float, milestone: int) -> None:
        if milestone < len(_MILESTONES):
            at = since + float(EDGES[_MILESTONES[milestone] + 1])
            heapq.heappush(self._due, (at, owner, since, milestone))
