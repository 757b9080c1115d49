"""When each conversation comes back: told of requests, replies and signals, asked what room for it is worth.

The coordinator and the simulator drive the same class, so that what is known of a wait is made of the same facts in
one place. Two kinds of waits are kept: *pauses*, from a reply to the next request, and *cycles*, from one request to
the next, which stand for a conversation while its request runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from kvpilot.domain import SignalKind, ToolFacts
from kvpilot.forecast import prior
from kvpilot.forecast.bins import Floats
from kvpilot.forecast.calibration import Intervals
from kvpilot.forecast.curve import Forecast
from kvpilot.forecast.features import (
    PERSON,
    Cycle,
    Pause,
    announced_features,
    cycle_features,
    kind_of,
    pause_features,
    slowest,
)
from kvpilot.forecast.hazard import HazardModel
from kvpilot.forecast.waits import StoredWait, Waits


class Rhythm(msgspec.Struct):
    """What is remembered of a conversation to tell its next waits by."""

    session: str
    child: bool = False
    running: int = 0
    """Requests under way."""
    turns: int = 0
    since: float | None = None
    """When its last reply ended, while it pauses."""
    last_s: float | None = None
    """How long the pause before took."""
    cycle_s: float | None = None
    """How long the cycle before took."""
    after: ToolFacts | None = None
    """The tool that it waits for, or waited for last; None: a person."""
    work: str | None = None
    """The last tool it called at all, by its program where it has one."""
    reply_tokens: int = 0
    run: int = 0
    """Requests since a person was last waited for."""
    people: int = 0
    """How often a person was waited for."""


class StoredRhythm(msgspec.Struct):
    """All that is known of a conversation, to be taken up after a restart; ``aside`` as in :class:`Forecaster`."""

    rhythm: Rhythm
    pause: StoredWait | None = None
    cycle: StoredWait | None = None
    aside: StoredWait | None = None


class Forecaster:
    """Conversations are small numbers (``owner``), each used by one conversation at a time: memory grows with the
    largest. A request and a reply cost a step of learning and a curve each; ``forecast`` is a look-up; ``worths`` is
    O(largest owner). ``intervals``: keeps count of whether what is stated of pauses holds.
    """

    def __init__(
        self,
        pauses: HazardModel | None = None,
        cycles: HazardModel | None = None,
        intervals: Intervals | None = None,
        horizons: Sequence[float] = (math.inf,),
    ) -> None:
        """``pauses`` and ``cycles``: what is known already (default: what is packaged). ``horizons``, seconds: what
        worths can be asked for, see :func:`kvpilot.forecast.curve.worth_in`."""
        self.pauses = Waits(pauses or prior.pauses(), horizons)
        self.cycles = Waits(cycles or prior.cycles(), horizons)
        self.intervals = intervals
        self._rhythms: dict[int, Rhythm] = {}
        self._aside: dict[int, StoredWait] = {}
        """What was waited for at first, where hints have told more since: learned from when the pause has ended."""
        self._running = np.zeros(64, dtype=bool)
        self._turned = np.zeros(64, dtype=bool)
        """Owners that began or ceased to run, until :meth:`news` told of it."""

    # ------------------------------------------------------------ what happens

    def request(
        self, owner: int, now: float, *, session: str, conversation: str, child: bool, added_tokens: int
    ) -> None:
        """A request begins. ``session`` and ``conversation`` name what is learned apart; ``child``: a sub-agent's;
        ``added_tokens``: about how much is new in its prompt."""
        self.tick(now)
        rhythm = self._rhythms.get(owner)
        if rhythm is None:
            rhythm = self._rhythms[owner] = Rhythm(session)
        self.pauses.end(owner, now)
        if (first := self._aside.pop(owner, None)) is not None:
            self.pauses.learn_end(first, now)
        if rhythm.since is not None:
            rhythm.last_s, rhythm.since = max(0.0, now - rhythm.since), None
            if self.intervals is not None:
                self.intervals.end(owner, rhythm.last_s)
        rhythm.cycle_s = self.cycles.end(owner, now)
        rhythm.session, rhythm.child = session, child
        rhythm.turns += 1
        rhythm.run += 1
        rhythm.running += 1
        cycle = Cycle(
            session=session,
            conversation=conversation,
            child=child,
            turns=rhythm.turns,
            after=rhythm.after,
            added_tokens=added_tokens,
            last_s=rhythm.cycle_s,
            last_reply_tokens=rhythm.reply_tokens,
        )
        self.cycles.begin(owner, cycle_features(cycle), now)
        self._set_running(owner, rhythm)

    def reply(
        self, owner: int, now: float, tools: Sequence[ToolFacts], tokens: int, *, broken: bool = False
    ) -> None:
        """A request ended with a reply of ``tokens`` that calls ``tools``, or broke off."""
        self.tick(now)
        rhythm = self._rhythms.get(owner)
        if rhythm is None:
            return
        rhythm.running = max(0, rhythm.running - 1)
        pause = Pause(
            session=rhythm.session,
            tools=tools,
            child=rhythm.child,
            reply_tokens=tokens,
            last_s=rhythm.last_s,
            last_tool=rhythm.work,
            turns=rhythm.turns,
            run=rhythm.run,
            people=rhythm.people,
            broken=broken,
        )
        if not tools:
            rhythm.run, rhythm.people = 0, rhythm.people + 1
        rhythm.reply_tokens = tokens
        rhythm.after = tool = slowest(tools) if tools else None
        if tool is not None:
            rhythm.work = tool.program or tool.name
        rhythm.since = now
        self._set_running(owner, rhythm)
        features = pause_features(pause)
        self._aside.pop(owner, None)
        self.pauses.begin(owner, features, now)
        wait = self.pauses.get(owner)
        if self.intervals is not None and wait is not None:
            self.intervals.begin(owner, kind_of(features), wait.curve)

    def signal(self, owner: int, now: float, kind: SignalKind, eta_s: float | None = None) -> None:
        """A hint about the conversation: it is over, suspended, waits for a person, its tool has finished, or it
        says when its next request comes (``eta_s`` seconds from now). While a request runs only the end counts."""
        self.tick(now)
        rhythm = self._rhythms.get(owner)
        if kind is SignalKind.END:
            self._drop(owner)
            self.cycles.drop(owner)
            if rhythm is not None:
                rhythm.since = None
            return
        if rhythm is None or rhythm.running:
            return
        if kind is SignalKind.SUSPEND:
            self._drop(owner)
        elif kind is SignalKind.WAITING_HUMAN:
            self._person_asked(owner, rhythm, now)
        if eta_s is not None or kind in (SignalKind.TOOL_FINISHED, SignalKind.RESUME):
            self._set_aside(owner)
            due = now + max(0.0, eta_s or 0.0)
            self.pauses.begin(owner, announced_features(rhythm.session, kind.value), due)

    def forget(self, owner: int) -> None:
        """The number is free for another conversation."""
        self._drop(owner)
        self.cycles.drop(owner)
        self._rhythms.pop(owner, None)
        if owner < len(self._running):
            self._running[owner], self._turned[owner] = False, True

    def tick(self, now: float) -> None:
        """Learn from waits that go on; to be called now and then where nothing happens."""
        self.pauses.tick(now)
        self.cycles.tick(now)

    # ------------------------------------------------------------ what is foreseen

    def forecast(self, owner: int, now: float) -> Forecast | None:
        """When its next request comes; None while one runs, and where nothing is foreseen (it has ended, is
        suspended, or was never heard of)."""
        wait = None if self._is_running(owner) else self.pauses.get(owner)
        return None if wait is None else Forecast(wait.curve, now - wait.since)

    def worths(self, now: float, horizon: int = 0) -> Floats:
        """By owner, returns per second that a unit of room held for it brings; 0 where nothing is foreseen. While a
        request runs, its whole cycle is what comes back. ``horizon``: the index of one of ``horizons``."""
        n = len(self._running)
        pauses, cycles = (_padded(w.worths(now, horizon), n) for w in (self.pauses, self.cycles))
        return np.where(self._running, cycles, pauses)

    def news(self, now: float) -> tuple[npt.NDArray[np.intp], Floats]:
        """Owners whose worth may be another one than when this was asked last, ascending [n], and their worths [n]: for
        one who follows them all, O(n) where ``worths`` looks at everybody."""
        changed = (self.pauses.changed(now), self.cycles.changed(now), np.flatnonzero(self._turned))
        self._turned[changed[-1]] = False
        owners = np.unique(np.concatenate(changed))
        running = np.zeros(len(owners), dtype=bool)
        known = owners < len(self._running)
        running[known] = self._running[owners[known]]
        return owners, np.where(running, self.cycles.worths_of(owners), self.pauses.worths_of(owners))

    def worth(self, owner: int, now: float, horizon: int = 0) -> float:
        """``worths`` of one owner."""
        return (self.cycles if self._is_running(owner) else self.pauses).worth(owner, now, horizon)

    def changes(self, now: float) -> float:
        """When ``worths``, which were asked for just now, are others if nothing happens. Infinity: never."""
        return min(self.pauses.changes(now), self.cycles.changes(now))

    # ------------------------------------------------------------ restart

    def stored(self, owner: int) -> StoredRhythm | None:
        """What :meth:`restore` takes back: a copy, which may be written elsewhere while waits go on here."""
        rhythm = self._rhythms.get(owner)
        if rhythm is None:
            return None
        return StoredRhythm(
            msgspec.structs.replace(rhythm),
            self.pauses.stored(owner),
            self.cycles.stored(owner),
            self._aside.get(owner),
        )

    def restore(self, owner: int, known: StoredRhythm) -> None:
        """Take up a conversation after a restart: what ran then broke off, as far as anybody will hear."""
        self._rhythms[owner] = rhythm = msgspec.structs.replace(known.rhythm, running=0)
        if known.rhythm.running and known.cycle is not None:
            broken = Pause(rhythm.session, child=rhythm.child, broken=True)
            self.pauses.begin(owner, pause_features(broken), known.cycle.since)
        for waits, wait in ((self.pauses, known.pause), (self.cycles, known.cycle)):
            if wait is not None:
                waits.resume(owner, wait)
        if known.aside is not None:
            self._aside[owner] = known.aside

    # ------------------------------------------------------------ inside

    def _set_aside(self, owner: int) -> None:
        wait = self.pauses.stored(owner)
        if wait is not None:
            self._aside.setdefault(owner, wait)

    def _drop(self, owner: int) -> None:
        self.pauses.drop(owner)
        self._aside.pop(owner, None)
        if self.intervals is not None:
            self.intervals.end(owner, None)

    def _person_asked(self, owner: int, rhythm: Rhythm, now: float) -> None:
        """Whatever the reply called, a person is waited for from now on."""
        wait = self.pauses.get(owner)
        if wait is not None and PERSON in wait.features:
            return
        self._set_aside(owner)
        pause = Pause(
            session=rhythm.session,
            child=rhythm.child,
            reply_tokens=rhythm.reply_tokens,
            last_s=rhythm.last_s,
            last_tool=rhythm.work,
            turns=rhythm.turns,
        )
        self.pauses.begin(owner, pause_features(pause), now)

    def _is_running(self, owner: int) -> bool:
        rhythm = self._rhythms.get(owner)
        return rhythm is not None and rhythm.running > 0

    def _set_running(self, owner: int, rhythm: Rhythm) -> None:
        if owner >= len(self._running):
            more = max(len(self._running), owner + 1 - len(self._running))
            self._running = np.concatenate((self._running, np.zeros(more, dtype=bool)))
            self._turned = np.concatenate((self._turned, np.zeros(more, dtype=bool)))
        self._running[owner], self._turned[owner] = rhythm.running > 0, True


def _padded(values: Floats, n: int) -> Floats:
    return values[:n] if len(values) >= n else np.concatenate((values, np.zeros(n - len(values))))
