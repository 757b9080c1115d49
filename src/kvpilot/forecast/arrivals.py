"""How often conversations begin that nobody has heard of yet: what a shared beginning is worth to them.

A system prompt outlives every conversation that has it, as new ones begin with it. Of each run of KV it is counted how
many conversations began with it after the first; their rate is what the run is worth beside what its holders make of
it. A run of system prompt and tools is expected to be begun with before it was seen to be.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvpilot.forecast.bins import Floats

FIRST_S = 60.0
"""How long a run has been known before its rate is believed: a burst of conversations is not their rate."""
HEAD = 0.3
"""How many conversations more a run of system prompt and tools counts with."""
SILENCE = 3.0
"""After a silence of so many mean gaps the rate is taken to be that of one per silence, times this."""


class Arrivals:
    """Runs are small numbers, each used by one run at a time: memory grows with the largest."""

    def __init__(self) -> None:
        self._known = np.full(64, np.nan)
        self._last = np.zeros(64)
        self._began = np.zeros(64)

    def knows(self, run: int) -> bool:
        return run < len(self._known) and not np.isnan(self._known[run])

    def see(self, runs: Sequence[int], now: float, head: bool = False) -> None:
        """Somebody has these runs, which were not there before. ``head``: they are of a system prompt or tools."""
        if not runs:
            return
        while max(runs) >= len(self._known):
            self._known = np.concatenate((self._known, np.full_like(self._known, np.nan)))
            self._last = np.concatenate((self._last, np.zeros_like(self._last)))
            self._began = np.concatenate((self._began, np.zeros_like(self._began)))
        at = np.array(runs, dtype=np.intp)
        self._known[at], self._last[at], self._began[at] = now, now, HEAD * head

    def begin(self, runs: Sequence[int], now: float) -> None:
        """A conversation began with these runs, all of them known."""
        if runs:
            at = np.array(runs, dtype=np.intp)
            self._began[at] += 1.0
            self._last[at] = now

    def rate(self, run: int, now: float) -> float:
        """``rates`` of one run."""
        if run >= len(self._known) or not self._began[run]:
            return 0.0
        rate = float(self._began[run]) / (now - float(self._known[run]) + FIRST_S)
        return min(rate, SILENCE / max(now - float(self._last[run]), 1e-9))

    def rates(self, runs: npt.NDArray[np.integer], now: float) -> Floats:
        """[n] conversations a second that begin with each of ``runs`` [n]; 0 for those that none did after the
        first and that are no head, and for unknown ones."""
        out = np.zeros(len(runs))
        there = np.flatnonzero(runs < len(self._known))
        at = runs[there]
        began = self._began[at]
        reused = began > 0.0
        there, at, began = there[reused], at[reused], began[reused]
        rate = began / (now - self._known[at] + FIRST_S)
        out[there] = np.minimum(rate, SILENCE / np.maximum(now - self._last[at], 1e-9))
        return out
