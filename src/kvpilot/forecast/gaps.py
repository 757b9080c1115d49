"""Distribution of the time to a session's next request, from log-binned pauses.

Keys go from special to general (for example one session's own ``Bash`` pauses, ``Bash`` anywhere, any tool,
a prior). Each level is shrunk towards the next: ``p = (counts + K · p_general) / (n + K)``, the posterior mean of
a Dirichlet prior worth ``K`` samples. A pause that has already lasted ``elapsed`` seconds conditions the result
on that. Counts decay, so that a change in behaviour is followed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FIRST_EDGE_S = 0.02
BINS_PER_OCTAVE = 2
BINS = 46  # up to about 2 days
SHRINKAGE = 4.0
"""How many samples the more general level is worth (K above)."""
DECAY = 0.98
"""Factor on older counts per new sample of the same key: a memory of about 50 samples."""
MAX_KEYS = 20_000

Histogram = npt.NDArray[np.float64]

_EDGES: Histogram = FIRST_EDGE_S * np.exp2(np.arange(BINS + 1) / BINS_PER_OCTAVE)


def _bin(seconds: float) -> int:
    if seconds <= FIRST_EDGE_S:
        return 0
    return min(BINS - 1, int(math.log2(seconds / FIRST_EDGE_S) * BINS_PER_OCTAVE))


def _log_normal(median_s: float, sigma: float) -> Histogram:
    """Bin probabilities of a log-normal (sigma in natural log units), normalised over the bins."""
    centres = np.sqrt(_EDGES[:-1] * _EDGES[1:])
    density = np.exp(-0.5 * (np.log(centres / median_s) / sigma) ** 2)
    return np.asarray(density / density.sum(), dtype=np.float64)


# Medians and spreads of recorded agents (tool: 0.28 s median, 15 s at p90; person: 120 s median, 16 min at p90).
PRIORS: dict[str, Histogram] = {
    "tool": _log_normal(0.6, 2.4),
    "human": _log_normal(120.0, 1.6),
    "suspended": _log_normal(3600.0, 1.5),
}


@dataclass(frozen=True, slots=True)
class Forecast:
    """Seconds from now until the next request: ``cdf`` [n] over ``edges`` [n], conditioned on the wait so far."""

    edges: Histogram
    cdf: Histogram
    samples: float
    """Weight of observed samples behind it (0 = prior only)."""

    def quantile(self, q: float) -> float:
        """Seconds from now by which the next request has come with probability ``q``."""
        return float(np.interp(q, self.cdf, self.edges))

    def within(self, seconds: float) -> float:
        """Probability that the next request comes within ``seconds`` from now."""
        return float(np.interp(seconds, self.edges, self.cdf))


class GapForecaster:
    """Learns pauses by key. ``observe`` and ``forecast`` take O(bins)."""

    def __init__(self) -> None:
        self._counts: dict[str, Histogram] = {}

    def observe(self, keys: Sequence[str], seconds: float) -> None:
        """A pause of ``seconds`` ended; it counts for every key of the hierarchy."""
        index = _bin(seconds)
        for key in keys:
            counts = self._counts.get(key)
            if counts is None:
                if len(self._counts) >= MAX_KEYS:
                    self._counts.pop(next(iter(self._counts)))
                counts = self._counts[key] = np.zeros(BINS)
            counts *= DECAY
            counts[index] += 1.0

    def forecast(self, keys: Sequence[str], prior: str, elapsed_s: float) -> Forecast:
        """``keys`` from special to general; ``prior`` one of :data:`PRIORS`; ``elapsed_s`` the wait so far."""
        p = PRIORS[prior]
        samples = 0.0
        for key in reversed(keys):
            counts = self._counts.get(key)
            if counts is None:
                continue
            n = float(counts.sum())
            samples = max(samples, n)
            p = (counts + SHRINKAGE * p) / (n + SHRINKAGE)
        cdf_at = np.concatenate(([0.0], np.cumsum(p)))
        cdf_at /= cdf_at[-1]
        past = float(np.interp(elapsed_s, _EDGES, cdf_at)) if elapsed_s > 0 else 0.0
        if past > 0.999:
            # Longer than nearly everything seen: heavy tails have no scale, expect as much again as already waited.
            edges = np.array([0.0, elapsed_s, 10.0 * elapsed_s])
            return Forecast(edges=edges, cdf=np.array([0.0, 0.5, 1.0]), samples=samples)
        keep = elapsed_s < _EDGES
        edges = np.concatenate(([0.0], _EDGES[keep] - elapsed_s))
        cdf = np.concatenate(([0.0], (cdf_at[keep] - past) / (1.0 - past)))
        return Forecast(edges=edges, cdf=np.maximum.accumulate(cdf), samples=samples)

    def dump(self) -> dict[str, list[float]]:
        return {key: counts.round(4).tolist() for key, counts in self._counts.items()}

    def load(self, raw: dict[str, list[float]]) -> None:
        for key, counts in raw.items():
            if len(counts) == BINS:
                self._counts[key] = np.asarray(counts, dtype=np.float64)
