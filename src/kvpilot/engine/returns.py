"""How likely sessions come back, as far as it can be told cheaply inside an engine. Pure.

The same hazard model as outside (``kvpilot.forecast``) with its packaged prior, but one curve for all main
conversations and one for all sub-agents', drawn anew now and then: a step of the scheduler must not pay for more.
"""

from __future__ import annotations

from kvpilot.forecast.bins import bin_of
from kvpilot.forecast.curve import Curve, curve
from kvpilot.forecast.prior import pauses

REFRESH_S = 5.0
LEARN_EVERY_S = 1.0
"""Of pauses that end sooner one after the other, one is learned from."""


class Returns:
    """Learns from pauses that ended. ``child``: the session has a parent."""

    def __init__(self) -> None:
        self._model = pauses()
        self._curves: dict[bool, tuple[float, Curve]] = {}
        self._learned_at = float("-inf")

    def observe(self, child: bool, seconds: float, now: float) -> None:
        """A conversation went on after a pause."""
        if now - self._learned_at >= LEARN_EVERY_S:
            self._learned_at = now
            self._model.learn(_features(child), 0, bin_of(seconds), ended=True)

    def curve(self, child: bool, now: float) -> Curve:
        """The distribution of such pauses; up to ``REFRESH_S`` old."""
        found = self._curves.get(child)
        if found is None or not 0 <= now - found[0] < REFRESH_S:
            found = self._curves[child] = (now, curve(self._model.hazards(_features(child))))
        return found[1]


def _features(child: bool) -> list[str]:
    """What is known of a pause from inside: hardly anything."""
    return ["any", "child" if child else "main"]
