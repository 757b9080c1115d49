"""Intervals that hold what they state, also where the model behind them errs.

Adaptive conformal inference (Gibbs & Candès, "Adaptive Conformal Inference Under Distribution Shift", 2021): after each
pause the share that is asked of the model moves a little, down when the pause lay inside, up when it lay outside, so
that in the long run exactly the stated share lies inside, whatever the model and however behaviour changes.
"""

from __future__ import annotations

from kvpilot.forecast.curve import Curve

RATE = 0.02
_LEAST, _MOST = 0.005, 1.0 - 1e-6
"""Shares that can be asked of a model. What is learned may lie beyond: cutting it off there would break the promise."""


class Calibrator:
    """Learns by kind of pause which central share of the model's distribution holds a stated share of pauses."""

    def __init__(self) -> None:
        self._asked: dict[tuple[str, float], float] = {}

    def interval(self, kind: str, curve: Curve, share: float, elapsed_s: float = 0.0) -> tuple[float, float]:
        """Seconds from now between which ``share`` (0 to 1) of such pauses end, of those that end."""
        asked = min(_MOST, max(_LEAST, self._asked.get((kind, share), share)))
        return curve.quantile(elapsed_s, 0.5 - asked / 2), curve.quantile(elapsed_s, 0.5 + asked / 2)

    def observe(self, kind: str, share: float, inside: bool) -> None:
        """A pause has ended, inside the interval stated for ``share`` of them at its beginning, or outside."""
        self._asked[kind, share] = self._asked.get((kind, share), share) + RATE * (share - inside)
