"""Who holds which KV, and what that makes it worth: the planner's picture, changed as things happen.

A *run* is a run of chunks that the same contexts hold, as the nodes of the token-prefix tree are: it has a predecessor
(``above``), and contexts *rest* on the run at whose end they end. Runs and contexts are rows of arrays, a few dozen
bytes each, however many chunks they have. A run is worth what all who hold it are together; that sum, and the requests
that run on it, are kept up along the way to the first run: every change is O(runs of the context).

Worths are counted in whole :data:`UNIT` s: sums of them are exact in any order, so that what was kept up change by
change is what adding everything up anew would give.

Where runs lie is told by :class:`~kvpilot.plan.layout.Layout` s.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvpilot.plan.exchange import Floats, Ints

NOTHING = -1
"""Above the first run of a context; what a context rests on that holds nothing."""
UNIT = 2.0**-32
"""Returns per second (one in 136 years) by which worths are told apart. Doubles add up exactly while sums stay below
2^53 of them: two million returns a second."""
_DEAREST = 256.0
"""Returns per second that no single context is worth more than."""
Bools = npt.NDArray[np.bool_]


class Watcher(Protocol):
    """Keeps columns of its own by run."""

    stale: Bools
    """Runs that something was changed of; set here, cleared by the watcher."""

    def grow(self, runs: int) -> None:
        """There is room for so many runs now."""

    def resized(self, run: int) -> None:
        """The run has another number of chunks; also when it is new or gone."""


class Holdings:
    """Rows by run and by context, both small numbers. Who gives numbers to contexts may give them again."""

    def __init__(self) -> None:
        self.runs = 0
        """Rows in use or vacant: those to look at."""
        self.above = np.full(64, NOTHING, dtype=np.int64)
        self.end = np.zeros(64, dtype=np.int64)
        """Chunks up to the run's end: grows along a context."""
        self.chunks = np.zeros(64, dtype=np.int64)
        self.tenant = np.zeros(64, dtype=np.int64)
        self.running = np.zeros(64, dtype=np.int64)
        """Requests under way whose context has the run."""
        self.holders = np.zeros(64, dtype=np.int64)
        """Contexts that have the run."""
        self.declined = np.zeros(64, dtype=np.int64)
        """Those of them for which nothing is to be brought."""
        self.worth: Floats = np.zeros(64)
        """Returns per second of all who hold the run, and of who will begin with it."""
        self.contexts = 0
        self.rests_on = np.full(64, NOTHING, dtype=np.int64)
        self.kept = np.zeros(64, dtype=bool)
        """A client's wish to keep the context is in force."""
        self.priority = np.zeros(64, dtype=np.int64)
        """Decides between contexts of equal prospects, -100…100: the lower goes first."""
        self.due: Floats = np.full(64, np.nan)
        """Unix seconds at which the next request was announced for; NaN: nobody said."""
        self.foreseen: Floats = np.zeros(64)
        """What the context is worth by its forecast."""
        self.begun = np.zeros(64, dtype=np.int64)
        """Requests of the context under way."""
        self.declines = np.zeros(64, dtype=bool)
        self._counted: Floats = np.zeros(64)
        """What it is counted with in the worth of its runs."""
        self._unsure = np.zeros(64, dtype=bool)
        """Contexts that may be worth something else than they are counted with."""
        self._announced = np.zeros(64, dtype=bool)
        """Those whose next request was announced."""
        self._wishing = np.zeros(64, dtype=bool)
        """Those that wish to be kept, or have a priority above 0, and …"""
        self._heard = np.zeros(64, dtype=bool)
        """… those of them whose wish is counted."""
        self._arrivals: Floats = np.zeros(64)
        self._resting = np.zeros(64, dtype=np.int64)
        """Contexts that rest on the run."""
        self._behind: dict[int, set[int]] = {}
        """Runs behind the run, where there are any."""
        self._vacant: list[int] = []
        self._watchers: list[Watcher] = []

    def watch(self, watcher: Watcher) -> None:
        """Tell it of every change of a run from now on."""
        self._watchers.append(watcher)
        watcher.grow(len(self.above))

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
        self.above[run], self.tenant[run] = above, tenant
        self._follow(run, above)
        self.resize(run, chunks)
        return run

    def move(self, run: int, above: int) -> None:
        """The run is behind another one now, as a run in front of it was cut in two, or two were joined. Its end stays
        where it is: :meth:`resize` it accordingly."""
        before = int(self.above[run])
        if before == above:
            return
        worth = float(self.worth[run])
        counts = int(self.running[run]), int(self.holders[run]), int(self.declined[run])
        self._climb(before, -worth, *(-count for count in counts))
        self._leave(run, before)
        self.above[run] = above
        self._follow(run, above)
        self._climb(above, worth, *counts)
        self._changed(run)

    def resize(self, run: int, chunks: int) -> None:
        """The run has that many chunks now: a context went on, or lost its end (what is behind a run stays there)."""
        above = int(self.above[run])
        self.chunks[run] = chunks
        self.end[run] = chunks + (0 if above == NOTHING else int(self.end[above]))
        self._changed(run)

    def expect_arrivals(self, run: int, rate: float) -> None:
        """So many conversations a second begin with the run that are not there yet
        (:meth:`kvpilot.forecast.arrivals.Arrivals.rates`)."""
        rate = float(_in_units(np.array([rate]))[0])
        self._climb(run, rate - float(self._arrivals[run]))
        self._arrivals[run] = rate

    def remove(self, run: int) -> None:
        """Nothing is known of the run any more. Raises ValueError while something rests on it."""
        if self._resting[run] or run in self._behind:
            raise ValueError(f"run {run} is still rested on")
        self.expect_arrivals(run, 0.0)
        self._leave(run, int(self.above[run]))
        self.chunks[run] = 0
        self._changed(run)
        self._vacant.append(run)

    def path(self, run: int) -> Iterator[int]:
        """The run and those in front of it, tail first."""
        while run != NOTHING:
            yield run
            run = int(self.above[run])

    def next_to(self, run: int) -> Collection[int]:
        """The runs right behind the run."""
        return self._behind.get(run, ())

    def behind(self, run: int) -> Iterator[int]:
        """All runs behind the run."""
        waiting = [run]
        while waiting:
            following = self.next_to(waiting.pop())
            yield from following
            waiting.extend(following)

    # ------------------------------------------------------------ contexts

    def rest(self, context: int, run: int) -> None:
        """The context ends with ``run`` now (NOTHING: it holds nothing any more)."""
        while context >= len(self.rests_on):
            self._grow_contexts()
        self.contexts = max(self.contexts, context + 1)
        before = int(self.rests_on[context])
        if before == run:
            return
        begun, declines = int(self.begun[context]), int(self.declines[context])
        if run != NOTHING:
            self._resting[run] += 1
            self._climb(run, 0.0, begun, 1, declines)
        if before != NOTHING:
            self._resting[before] -= 1
            self._climb(before, -float(self._counted[context]), -begun, -1, -declines)
        self._counted[context] = 0.0
        self._unsure[context] = True
        self.rests_on[context] = run

    def release(self, context: int) -> None:
        """The context is over; its number may be given again. What is foreseen of the number is as :meth:`foresee` said
        last."""
        self.rest(context, NOTHING)
        self.wish(context)
        self.announce(context)
        self.decline(context, False)
        self.begun[context] = 0

    def foresee(self, contexts: Ints, worth: Floats) -> None:
        """What these [n] are worth by their forecasts from now on."""
        while len(contexts) and int(contexts.max()) >= len(self.foreseen):
            self._grow_contexts()
        self.foreseen[contexts] = worth
        self._unsure[contexts] = True

    def wish(self, context: int, kept: bool = False, priority: int = 0) -> None:
        """What a client wishes for the context."""
        self.kept[context], self.priority[context] = kept, priority
        self._wishing[context], self._unsure[context] = kept or priority > 0, True

    def announce(self, context: int, due: float = np.nan) -> None:
        """The context's next request comes at ``due``, unix seconds; NaN: nobody says so any more."""
        self.due[context] = due
        self._announced[context], self._unsure[context] = not np.isnan(due), True

    def decline(self, context: int, declines: bool) -> None:
        """Whether nothing is to be brought for this context: what others hold, too, is brought for them."""
        if declines != self.declines[context]:
            self.declines[context] = declines
            self._climb(int(self.rests_on[context]), 0.0, 0, 0, 1 if declines else -1)

    def begin(self, context: int) -> None:
        """A request of the context begins: nothing of what it has goes until it :meth:`finish` es."""
        self.begun[context] += 1
        self._climb(int(self.rests_on[context]), 0.0, 1)

    def finish(self, context: int) -> None:
        """A request of the context ended."""
        self.begun[context] -= 1
        self._climb(int(self.rests_on[context]), 0.0, -1)

    # ------------------------------------------------------------ worth

    def wishes(self) -> Ints:
        """Contexts that wish to be kept, or have a priority above 0. O(them) and a look through a column of bits."""
        return np.flatnonzero(self._wishing[: self.contexts])

    def to_count(self, heard: Ints) -> tuple[Ints, Bools]:
        """Contexts to :meth:`count` [n], and whether their wishes are heard [n]: those of which something has changed,
        or whose return was announced. ``heard``: all whose wishes are. O(contexts) only in looking through columns of
        bits."""
        n = self.contexts
        now = np.zeros(n, dtype=bool)
        now[heard] = True
        rows = np.flatnonzero(self._unsure[:n] | self._announced[:n] | (now != self._heard[:n]))
        self._unsure[:n], self._heard[:n] = False, now
        return rows, now[rows]

    def count(self, contexts: Ints, worth: Floats) -> None:
        """These [n], each once, are worth that much, and all their runs accordingly. O(n · runs of a context)."""
        rests = self.rests_on[contexts]
        worth = np.where(rests == NOTHING, 0.0, _in_units(worth))
        more = worth - self._counted[contexts]
        self._counted[contexts] = worth
        moved = more != 0.0
        rows, more = rests[moved], more[moved]
        while len(rows):
            np.add.at(self.worth, rows, more)
            for watcher in self._watchers:
                watcher.stale[rows] = True
            rows = self.above[rows]
            on = rows != NOTHING
            rows, more = rows[on], more[on]

    @property
    def nbytes(self) -> int:
        """Bytes of all columns."""
        return column_bytes(self)

    # ------------------------------------------------------------ inside

    def _climb(self, run: int, worth: float, running: int = 0, holders: int = 0, declined: int = 0) -> None:
        """So much more from the run to the beginning."""
        for each in self.path(run):
            self.worth[each] += worth
            self.running[each] += running
            self.holders[each] += holders
            self.declined[each] += declined
            for watcher in self._watchers:
                watcher.stale[each] = True

    def _follow(self, run: int, above: int) -> None:
        if above != NOTHING:
            self._behind.setdefault(above, set()).add(run)

    def _leave(self, run: int, above: int) -> None:
        if above != NOTHING:
            following = self._behind[above]
            following.discard(run)
            if not following:
                del self._behind[above]

    def _changed(self, run: int) -> None:
        for watcher in self._watchers:
            watcher.stale[run] = True
            watcher.resized(run)

    def _grow_runs(self) -> None:
        for name in (
            *("above", "end", "chunks", "tenant", "running", "holders", "declined"),
            *("worth", "_arrivals", "_resting"),
        ):
            setattr(self, name, doubled(getattr(self, name)))
        for watcher in self._watchers:
            watcher.grow(len(self.above))

    def _grow_contexts(self) -> None:
        fresh = len(self.rests_on)
        for name in (
            *("rests_on", "kept", "priority", "due", "foreseen"),
            *("begun", "declines", "_counted", "_unsure", "_announced", "_wishing", "_heard"),
        ):
            setattr(self, name, doubled(getattr(self, name)))
        self.rests_on[fresh:], self.due[fresh:] = NOTHING, np.nan


def doubled(column: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Twice as long along its last axis, the new part zeros."""
    return np.concatenate((column, np.zeros_like(column)), axis=-1)


def column_bytes(owner: object) -> int:
    """Bytes of the arrays that are its attributes."""
    return sum(column.nbytes for column in vars(owner).values() if isinstance(column, np.ndarray))


def _in_units(worth: Floats) -> Floats:
    """The nearest multiples of ``UNIT``, within what a context can be worth."""
    return np.asarray(np.rint(np.clip(worth, 0.0, _DEAREST) / UNIT) * UNIT)
