"""The coordinator's forecasts: tells the forecaster which conversation did what, and asks it about them.

The forecaster knows conversations by small numbers; here they get theirs, and give them back when they are forgotten.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from kvpilot.domain import SessionState, SignalKind, ToolFacts
from kvpilot.forecast import Forecast, Forecaster
from kvpilot.forecast.bins import Floats
from kvpilot.forecast.calibration import Intervals
from kvpilot.forecast.forecaster import StoredRhythm
from kvpilot.forecast.memory import pack, unpack
from kvpilot.forecast.waits import Open
from kvpilot.sessions.book import Session, Thread

log = logging.getLogger(__name__)

OF_ALL = (SignalKind.END, SignalKind.SUSPEND)
"""Signals that are about every conversation of a session; of others one is meant."""

UNFORESEEN = {SessionState.ENDED: SignalKind.END, SessionState.SUSPENDED: SignalKind.SUSPEND}
"""States in which nobody is waited for, and who says so."""


class Forecasts:
    """By conversation (``owner`` as :class:`Thread` has it)."""

    def __init__(self) -> None:
        self.intervals = Intervals()
        self.forecaster = Forecaster(intervals=self.intervals)
        self._numbers: dict[str, int] = {}
        self._free: list[int] = []

    # ------------------------------------------------------------ what happens

    def started(self, session: Session, thread: Thread, added_tokens: int, now: float) -> None:
        """A request of the conversation begins, with about ``added_tokens`` that are new."""
        self.forecaster.request(
            self.number(thread.owner),
            now,
            session=f"{session.tenant}/{session.id}",
            conversation=thread.owner,
            child=session.parent is not None,
            added_tokens=added_tokens,
        )

    def finished(
        self,
        session: Session,
        thread: Thread,
        tools: Sequence[ToolFacts],
        tokens: int,
        now: float,
        *,
        broken: bool,
    ) -> None:
        """A request of the conversation ended with a reply of ``tokens``, or broke off."""
        if (number := self._numbers.get(thread.owner)) is None:
            return
        self.forecaster.reply(number, now, tools, tokens, broken=broken)
        if session.state in UNFORESEEN:  # said while the request ran
            self.forecaster.signal(number, now, UNFORESEEN[session.state])

    def signal(self, session: Session, kind: SignalKind, eta_s: float | None, now: float) -> None:
        """A hint about the session."""
        for thread in _meant(session, kind):
            if (number := self._numbers.get(thread.owner)) is not None:
                self.forecaster.signal(number, now, kind, eta_s)

    def forget(self, owner: str) -> None:
        """The conversation is not known any more."""
        number = self._numbers.pop(owner, None)
        if number is not None:
            self.forecaster.forget(number)
            self._free.append(number)

    # ------------------------------------------------------------ what is foreseen

    def of(self, owner: str, now: float) -> Forecast | None:
        """When its next request comes; None while one runs and where nothing is foreseen."""
        number = self._numbers.get(owner)
        return None if number is None else self.forecaster.forecast(number, now)

    def wait(self, owner: str) -> Open | None:
        """What the conversation waits for, and since when; None where it waits for nothing."""
        number = self._numbers.get(owner)
        return None if number is None else self.forecaster.pauses.get(number)

    def soonest(self, session: Session, now: float) -> Forecast | None:
        """Of the session's conversations the one that is expected first; None while a request of any runs."""
        if session.in_flight:
            return None
        found = [f for owner in session.threads if (f := self.of(owner, now)) is not None]
        return min(found, key=lambda forecast: forecast.quantile(0.5), default=None)

    def worth(self, owner: str, now: float) -> float:
        """Returns per second that a unit of room held for it brings."""
        number = self._numbers.get(owner)
        return 0.0 if number is None else self.forecaster.worth(number, now)

    def worths(self, now: float) -> Floats:
        """``worth`` of all at once, by :meth:`number`."""
        return self.forecaster.worths(now)

    def news(self, now: float) -> tuple[npt.NDArray[np.intp], Floats]:
        """Numbers whose worth may be another one than when this was asked last [n], and their worths [n]: for one who
        follows them all."""
        return self.forecaster.news(now)

    # ------------------------------------------------------------ restart

    def stored(self, owner: str) -> StoredRhythm | None:
        """What is to be known of the conversation after a restart."""
        number = self._numbers.get(owner)
        return None if number is None else self.forecaster.stored(number)

    def restore(self, owner: str, known: StoredRhythm) -> None:
        self.forecaster.restore(self.number(owner), known)

    def memory(self) -> object:
        """What was learned, for :meth:`remember`."""
        return pack(self.forecaster)

    def remember(self, memory: object) -> None:
        """Know what an earlier run has learned. What is of another version or damaged is ignored."""
        try:
            unpack(self.forecaster, memory)
        except ValueError as error:
            log.warning("what forecasts had learned is not readable and begins anew: %s", error)

    def number(self, owner: str) -> int:
        """The conversation's number in :meth:`worths`; a new one gets one."""
        found = self._numbers.get(owner)
        if found is None:
            found = self._numbers[owner] = self._free.pop() if self._free else len(self._numbers)
        return found


def _meant(session: Session, kind: SignalKind) -> Iterable[Thread]:
    """Which of a session's conversations a signal is about: the one that waits for tools where one has finished, else
    the one that has been talking most."""
    threads = list(session.threads.values())
    if kind in OF_ALL:
        return threads
    idle = [thread for thread in threads if not thread.in_flight]
    if kind is SignalKind.TOOL_FINISHED:
        idle = [thread for thread in idle if thread.awaits_tools] or idle
    return [max(idle, key=lambda thread: (thread.turns, thread.last_seen))] if idle else []
