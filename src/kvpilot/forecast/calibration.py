"""Intervals that hold what they state, also where the model behind them errs.

Adaptive conformal inference (Gibbs & Candès, "Adaptive Conformal Inference Under Distribution Shift", 2021): after each
pause the share that is asked of the model moves a little, down when the pause lay inside, up when it lay outside, so
that in the long run exactly the stated share lies inside, whatever the model and however behaviour changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from kvpilot.forecast.curve import Curve

RATE = 0.02
_LEAST, _MOST = 0.005, 1.0 - 1e-6
"""Shares that can be asked of a model. What is learned may lie beyond: cutting it off there would break the promise."""
NOMINAL = (0.5, 0.8, 0.95)
"""Shares of pauses that intervals are stated for."""
SHORTEST_S = 1e-3
"""Ends of intervals below it count as it where widths are compared."""
_RECENT = 0.02
"""Weight of the newest in what is told of recent widths: about the last 50 pauses."""


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

    def dump(self) -> list[tuple[str, float, float]]:
        """What :meth:`load` takes back: kind, share, what is asked of the model for it."""
        return [(kind, share, asked) for (kind, share), asked in self._asked.items()]

    def load(self, raw: list[tuple[str, float, float]]) -> None:
        self._asked = {(kind, share): asked for kind, share, asked in raw}


@dataclass(frozen=True, slots=True)
class Stated:
    """What was stated of a pause at its beginning: an interval in seconds for each of ``NOMINAL``."""

    kind: str
    intervals: tuple[tuple[float, float], ...]


@dataclass(slots=True)
class Held:
    """Of one kind of pauses and one of ``NOMINAL``: how many ended, and how many of them inside. ``width``: of
    recent intervals the geometric mean of upper ÷ lower end."""

    ended: int = 0
    inside: int = 0
    log_width: float = 0.0

    @property
    def width(self) -> float:
        return math.exp(self.log_width)


@dataclass(slots=True)
class Intervals:
    """States intervals of pauses at their beginning, and keeps count of what held by the time the next request came,
    whatever hints said in between.

    ``note`` is told of every pause that ends: its owner, how long it took and what was stated of it.
    """

    calibrator: Calibrator = field(default_factory=Calibrator)
    note: Callable[[int, float, Stated], None] | None = None
    held: dict[tuple[str, float], Held] = field(default_factory=dict)
    """By kind and share."""
    _open: dict[int, Stated] = field(default_factory=dict)

    def begin(self, owner: int, kind: str, curve: Curve) -> None:
        """A pause begins; a statement about one that was open is taken back."""
        found = tuple(self.calibrator.interval(kind, curve, share) for share in NOMINAL)
        self._open[owner] = Stated(kind, found)

    def end(self, owner: int, seconds: float | None) -> None:
        """The owner's pause, if one is open, was ``seconds`` long; None: nobody will know."""
        stated = self._open.pop(owner, None)
        if stated is None or seconds is None:
            return
        for share, (low, high) in zip(NOMINAL, stated.intervals, strict=True):
            inside = low <= seconds <= high
            self.calibrator.observe(stated.kind, share, inside)
            held = self.held.setdefault((stated.kind, share), Held())
            width = math.log(max(high, SHORTEST_S) / max(low, SHORTEST_S))
            weight = max(_RECENT, 1.0 / (held.ended + 1))
            held.log_width += weight * (width - held.log_width)
            held.ended += 1
            held.inside += inside
        if self.note is not None:
            self.note(owner, seconds, stated)
