"""The distribution of a wait, and what room kept for its end is worth."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvpilot.forecast.bins import BINS, EDGES, WIDTHS, Floats, bin_of

_NOBODY = 1e-9
"""A share of waits too small to say anything about: below it rates would be those of rounding errors."""
_LATER = np.triu(np.ones((BINS, BINS + 1), dtype=bool), 1)
"""[b, e]: whether edge e is behind the beginning of bin b."""


@dataclass(frozen=True, slots=True)
class Curve:
    """A wait's distribution as seen at its beginning. ``cdf`` [BINS + 1] over ``EDGES``; what is missing to 1 at
    the end never comes, as far as is known. ``worth`` [BINS]: see :func:`worth_by_bin`."""

    cdf: Floats
    worth: Floats

    def within(self, elapsed_s: float, seconds: float) -> float:
        """Probability that a wait of ``elapsed_s`` so far ends within ``seconds`` more."""
        past, then = np.interp((elapsed_s, elapsed_s + seconds), EDGES, self.cdf)
        return float((then - past) / max(1.0 - past, 1e-12))

    def quantile(self, elapsed_s: float, q: float) -> float:
        """Seconds from now in which a wait of ``elapsed_s`` so far ends with probability ``q``, if it ends at all.

        Longer than nearly all that was seen: heavy tails have no scale, so as much again as already waited.
        """
        past = float(np.interp(elapsed_s, EDGES, self.cdf))
        left = float(self.cdf[-1]) - past
        if left < 1e-6:
            return elapsed_s * q / max(1e-3, 1.0 - q)
        return max(0.0, _inverse(self.cdf, past + q * left) - elapsed_s)

    def worth_at(self, elapsed_s: float) -> float:
        """Worth of a unit of room, in returns per second, for a wait of ``elapsed_s`` so far."""
        return float(self.worth[bin_of(elapsed_s)])


@dataclass(frozen=True, slots=True)
class Forecast:
    """A wait as it stands: ``elapsed_s`` of it are over (below 0: it is announced to begin in so many seconds)."""

    curve: Curve
    elapsed_s: float

    @property
    def ahead_s(self) -> float:
        """Seconds until the announced moment, 0 for what has begun."""
        return max(0.0, -self.elapsed_s)

    def quantile(self, q: float) -> float:
        """Seconds from now by which the next request has come with probability ``q``, if it comes at all."""
        return self.ahead_s + self.curve.quantile(max(0.0, self.elapsed_s), q)

    def within(self, seconds: float) -> float:
        """Probability that the next request comes within ``seconds`` from now."""
        left = seconds - self.ahead_s
        return self.curve.within(max(0.0, self.elapsed_s), left) if left > 0 else 0.0

    @property
    def worth(self) -> float:
        """Returns per second that a unit of room held for it brings; see :func:`worth_ahead`."""
        return worth_ahead(self.curve.worth_at(max(0.0, self.elapsed_s)), self.ahead_s)


def worth_ahead(worth: float, ahead_s: float) -> float:
    """What a wait worth ``worth`` at its beginning is worth ``ahead_s`` seconds before it: the same return, with
    that much more time to hold room for it."""
    return worth / (1.0 + ahead_s * worth)


def _inverse(cdf: Floats, p: float) -> float:
    """The time at which ``cdf`` reaches ``p``, log-linear inside a bin (the bins are logarithmic)."""
    at = int(np.searchsorted(cdf, p, side="left"))
    if at <= 0:
        return 0.0
    at = min(at, BINS)
    low, high = float(cdf[at - 1]), float(cdf[at])
    part = (p - low) / (high - low) if high > low else 1.0
    start, end = float(EDGES[at - 1]), float(EDGES[at])
    return end * part if start == 0.0 else start * (end / start) ** part


def curve(hazards: Floats) -> Curve:
    """The distribution with these hazards [BINS] by bin."""
    survival = np.maximum(np.concatenate(([1.0], np.cumprod(1.0 - hazards))), _NOBODY)
    return Curve(cdf=1.0 - survival, worth=worth_by_bin(survival))


def worth_by_bin(survival: Floats) -> Floats:
    """For a wait that has reached bin b: max over later edges e of P(it ends by e) ÷ E[room held until then or e].

    The index of Gittins (1979) for stopping: holding a unit of room costs its time, the wait's end pays one hit,
    and we may give up at any edge. Ranking by it needs neither a horizon nor the price of room: whoever has the
    highest index makes the most of the room, at any pressure. ``survival`` [BINS + 1] at ``EDGES``; result [BINS]
    in 1/s, as seen from the beginning of each bin.
    """
    held = np.concatenate(([0.0], np.cumsum(0.5 * (survival[:-1] + survival[1:]) * WIDTHS)))
    ended = survival[:-1, None] - survival[None, :]
    cost = np.maximum(held[None, :] - held[:-1, None], 1e-12)
    return np.asarray(np.where(_LATER, ended / cost, 0.0).max(axis=1))
