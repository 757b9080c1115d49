"""Who holds which KV, and where it lies: the planner's picture, changed as things happen.

A *run* is a run of chunks that the same contexts hold, as the nodes of the token-prefix tree are: it has a predecessor
(``above``), and contexts *rest* on the run at whose end they end. Runs and contexts are rows of arrays, a few dozen
bytes each, however many chunks they have; every change is O(1), or O(runs of the context) where a request begins or
ends.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvpilot.domain import Tier
from kvpilot.plan.exchange import Floats, Ints

NOTHING = -1
"""Above the first run of a context; what a context rests on that holds nothing."""
Bools = npt.NDArray[np.bool_]


class Holdings:
    """Rows by run and by context, both small numbers. Who gives numbers to contexts may give them again."""

    def __init__(self, tiers: Sequence[Tier]) -> None:
        """``tiers``: from fast to slow."""
        self.tiers = tuple(tiers)
        self.runs = 0
        """Rows in use or vacant: those to look at."""
        self.above = np.full(64, NOTHING, dtype=np.int64)
        self.depth = np.zeros(64, dtype=np.int64)
        self.chunks = np.zeros(64, dtype=np.int64)
        self.tenant = np.zeros(64, dtype=np.int64)
        self.running = np.zeros(64, dtype=np.int64)
        """Requests under way whose context has the run."""
        self.busy = np.zeros(64, dtype=bool)
        """An action on the run is under way, or was tried a moment ago: it is left alone."""
        self.arrivals: Floats = np.zeros(64)
        """Conversations a second that begin with the run and are not there yet
        (:meth:`kvpilot.forecast.arrivals.Arrivals.rates`)."""
        self.here = np.zeros((len(self.tiers), 64), dtype=np.int64)
        """[tiers, runs] leading chunks of the run that are readable there."""
        self.contexts = 0
        self.rests_on = np.full(64, NOTHING, dtype=np.int64)
        self.kept = np.zeros(64, dtype=bool)
        """A client's wish to keep the context is in force."""
        self.priority = np.zeros(64, dtype=np.int64)
        """Decides between contexts of equal prospects, -100…100: the lower goes first."""
        self.due: Floats = np.full(64, np.nan)
        """Unix seconds at which the next request was announced for; NaN: nobody said."""
        self._vacant: list[int] = []
        self._followers = np.zeros(64, dtype=np.int64)
        """Runs and contexts that rest on the run."""
        self._levels: list[Ints] | None = []
        """As :meth:`levels` tells, while no run has come since."""

    # ------------------------------------------------------------ runs

    def add(self, above: int, chunks: int, tenant: int = 0) -> int:
        """A new run behind ``above``; its number."""
        if self._vacant:
            run = self._vacant.pop()
        else:
            run = self.runs
            self.runs += 1
            if run >= len(self.above):
                self._grow_runs()
        self.above[run], self.chunks[run], self.tenant[run] = above, chunks, tenant
        self.depth[run] = 0 if above == NOTHING else self.depth[above] + 1
        self._levels = None
        self.running[run], self.busy[run], self._followers[run], self.arrivals[run] = 0, False, 0, 0.0
        self.here[:, run] = 0
        if above != NOTHING:
            self._followers[above] += 1
        return run

    def resize(self, run: int, chunks: int) -> None:
        """The run has that many chunks now: a context went on, or lost its end."""
        self.chunks[run] = chunks
        np.minimum(self.here[:, run], chunks, out=self.here[:, run])

    def remove(self, run: int) -> None:
        """Nothing is known of the run any more. Raises ValueError while something rests on it."""
        if self._followers[run]:
            raise ValueError(f"run {run} is still rested on")
        if self.above[run] != NOTHING:
            self._followers[self.above[run]] -= 1
        self.chunks[run], self.here[:, run], self.arrivals[run] = 0, 0, 0.0
        self._vacant.append(run)

    def lies(self, run: int, tier: Tier, chunks: int) -> None:
        """So many leading chunks of the run are readable in ``tier``, as the cache layer says."""
        self.here[self.tiers.index(tier), run] = min(chunks, self.chunks[run])

    def path(self, run: int) -> Iterator[int]:
        """The run and those in front of it, tail first."""
        while run != NOTHING:
            yield run
            run = int(self.above[run])

    # ------------------------------------------------------------ contexts

    def rest(self, context: int, run: int) -> None:
        """The context ends with ``run`` now (NOTHING: it holds nothing any more)."""
        while context >= len(self.rests_on):
            self._grow_contexts()
        self.contexts = max(self.contexts, context + 1)
        before = int(self.rests_on[context])
        if run != NOTHING:
            self._followers[run] += 1
        if before != NOTHING:
            self._followers[before] -= 1
        self.rests_on[context] = run

    def release(self, context: int) -> None:
        """The context is over; its number may be given again."""
        self.rest(context, NOTHING)
        self.kept[context], self.priority[context], self.due[context] = False, 0, np.nan

    def begin(self, run: int) -> None:
        """A request whose context ends with ``run`` begins: nothing of it goes until it :meth:`finish` es."""
        for each in self.path(run):
            self.running[each] += 1

    def finish(self, run: int) -> None:
        """A request that began on ``run`` ended."""
        for each in self.path(run):
            self.running[each] -= 1

    # ------------------------------------------------------------ for the planner

    def elsewhere(self, tiers: Sequence[Tier], here: Ints, busy: Bools) -> Holdings:
        """The same runs and contexts as they lie in other tiers. To look at: what changes later is not seen in it."""
        view = copy.copy(self)
        view.tiers, view.here, view.busy = tuple(tiers), here, busy
        return view

    def used(self, tier: int) -> int:
        """Chunks in the tier. O(runs)."""
        return int(self.here[tier, : self.runs].sum())

    def joined(self, worth: Floats) -> Floats:
        """Worth by context [contexts] → by run [runs]: that of all who hold it, and of those who will begin with
        it, added up. O(runs · depth)."""
        n = self.runs
        out = self.arrivals[:n].copy()
        rests = self.rests_on[: self.contexts]
        held = rests != NOTHING
        out += np.bincount(rests[held], weights=worth[held], minlength=n)[:n]
        for rows in self.levels():
            out += np.bincount(self.above[rows], weights=out[rows], minlength=n)
        return out

    def readable(self) -> Bools:
        """[runs] whether all in front of the run is readable somewhere: without it the run is of no use."""
        n = self.runs
        whole = self.here[:, :n].max(axis=0) >= self.chunks[:n]
        out: Bools = np.ones(n, dtype=bool)
        for rows in reversed(self.levels()):
            above = self.above[rows]
            out[rows] = out[above] & whole[above]
        return out

    @property
    def nbytes(self) -> int:
        """Bytes of all columns."""
        columns = vars(self).values()
        return sum(column.nbytes for column in columns if isinstance(column, np.ndarray))

    def levels(self) -> Sequence[Ints]:
        """Rows that have a predecessor, deepest first."""
        if self._levels is None:
            depth = self.depth[: self.runs]
            order = np.argsort(depth, kind="stable")
            firsts = np.searchsorted(depth[order], np.arange(1, int(depth.max(initial=0)) + 1))
            self._levels = np.split(order, firsts)[:0:-1]
        return self._levels

    def _grow_runs(self) -> None:
        for name in (
            "above",
            "depth",
            "chunks",
            "tenant",
            "running",
            "busy",
            "arrivals",
            "here",
            "_followers",
        ):
            column = getattr(self, name)
            setattr(self, name, np.concatenate((column, np.zeros_like(column)), axis=-1))

    def _grow_contexts(self) -> None:
        fresh = len(self.rests_on)
        self.rests_on = np.concatenate((self.rests_on, np.full(fresh, NOTHING)))
        self.kept = np.concatenate((self.kept, np.zeros(fresh, dtype=bool)))
        self.priority = np.concatenate((self.priority, np.zeros(fresh, dtype=np.int64)))
        self.due = np.concatenate((self.due, np.full(fresh, np.nan)))
