"""Time since something began, in log-spaced bins: half an octave each, from hundredths of a second to a day."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

FIRST_EDGE_S = 0.02
PER_OCTAVE = 2
BINS = 46

EDGES: Floats = np.concatenate(([0.0], FIRST_EDGE_S * np.exp2(np.arange(BINS) / PER_OCTAVE)))
"""[BINS + 1] seconds; bin b is [EDGES[b], EDGES[b + 1]), the last one takes all that is longer."""
WIDTHS: Floats = np.diff(EDGES)


def bin_of(seconds: float) -> int:
    """The bin of a duration; the first for negative ones."""
    if seconds < FIRST_EDGE_S:
        return 0
    return min(BINS - 1, 1 + int(math.log2(seconds / FIRST_EDGE_S) * PER_OCTAVE))


def bins_of(seconds: Floats) -> npt.NDArray[np.intp]:
    """``bin_of`` of each of [n] durations."""
    found = np.searchsorted(EDGES, seconds, side="right") - 1
    return np.minimum(np.maximum(found, 0), BINS - 1)
