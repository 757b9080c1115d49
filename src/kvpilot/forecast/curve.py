"""The distribution of a wait, and what room kept for its end is worth."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from kvpilot.forecast.bins import BINS, EDGES, WIDTHS, Floats, bin_of, bins_of

_NOBODY = 1e-9
"""A share of waits too small to say anything about: below it rates would be those of rounding errors."""
_HALF_WIDTHS = 0.5 * WIDTHS
_ENDS = np.append(EDGES[1:-1], np.inf)
"""[BINS] seconds at which a bin ends; the last one does not."""
_Worth = TypeVar("_Worth", float, Floats)


@dataclass(frozen=True)
class Curve:
    """A wait's distribution as seen at its beginning. ``cdf`` [BINS + 1] over ``EDGES``; what is missing to 1 at
    the end never comes, as far as is known."""

    cdf: Floats

    @cached_property
    def worth(self) -> list[float]:
        """[BINS] what a unit of room is worth for a wait that has reached each bin: see :func:`worth_in`."""
        survival = np.broadcast_to(1.0 - self.cdf, (BINS, BINS + 1))
        found: list[float] = worth_in(survival, np.arange(BINS)).tolist()
        return found

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
        return self.worth[bin_of(elapsed_s)]


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


def worth_ahead(worth: _Worth, ahead_s: _Worth) -> _Worth:
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
    cdf = np.empty(BINS + 1)
    cdf[0] = 0.0
    np.cumprod(1.0 - hazards, out=cdf[1:])
    np.maximum(cdf, _NOBODY, out=cdf)
    np.subtract(1.0, cdf[1:], out=cdf[1:])
    return Curve(cdf)


def worth_in(survival: Floats, bins: npt.NDArray[np.intp], horizon_s: float = np.inf) -> Floats:
    """For n waits that have reached ``bins`` [n]: max over later edges e of P(it ends by e) ÷ E[room held until then
    or e].

    The index of Gittins (1979) for stopping: holding a unit of room costs its time, the wait's end pays one hit,
    and we may give up at any edge. Ranking by it needs neither a horizon nor the price of room: whoever has the
    highest index makes the most of the room, at any pressure. ``survival`` [n, BINS + 1] at ``EDGES``; result [n]
    in 1/s, as seen from the beginning of each wait's bin.

    ``horizon_s``: only moments to give up within that time, but at least the end of the bin. What was given up can be
    brought back in that time, so what comes later is no reason to hold it now.
    """
    held = np.zeros(survival.shape)
    np.cumsum((survival[:, :-1] + survival[:, 1:]) * _HALF_WIDTHS, axis=1, out=held[:, 1:])
    rows = np.arange(len(bins))
    ended = survival[rows, bins][:, None] - survival
    # Of edges behind us the first is at most 0, the second too: they take no part in the maximum.
    cost = np.maximum(held - held[rows, bins][:, None], 1e-12)
    if horizon_s < np.inf:
        ends = np.maximum(EDGES[bins] + horizon_s, EDGES[bins + 1])
        ended[EDGES[None, :] > ends[:, None]] = 0.0
    return np.asarray((ended / cost).max(axis=1))


def look(
    owners: npt.NDArray[np.intp],
    now: float,
    horizons: Floats,
    since: Floats,
    survival: Floats,
    current: Floats,
    until: Floats,
) -> None:
    """What the waits of ``owners`` [n] are worth now within each of ``horizons`` [k] seconds goes into ``current``
    [k, owners], until when that is so into ``until``.

    By owner: ``since`` when it waits (it may lie ahead), and ``survival`` [BINS + 1] at ``EDGES``.
    """
    elapsed = now - since[owners]
    bins = bins_of(elapsed)
    of_owners, ahead = survival[owners], np.maximum(-elapsed, 0.0)
    for row, horizon_s in enumerate(horizons.tolist()):
        current[row, owners] = worth_ahead(worth_in(of_owners, bins, horizon_s), ahead)
    until[owners] = np.where(elapsed < 0.0, now, since[owners] + _ENDS[bins])
