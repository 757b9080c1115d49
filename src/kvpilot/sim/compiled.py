"""The inner loops of forecasts, compiled where numba is installed: a simulation makes millions of small steps.

The same formulas as in :mod:`kvpilot.forecast.hazard` and :mod:`kvpilot.forecast.curve`, written as loops. Sums are
taken in another order, so results differ in the last digits.
"""

from __future__ import annotations

import math

import numpy as np

from kvpilot.forecast.bins import BINS, EDGES, WIDTHS, Floats
from kvpilot.forecast.hazard import (
    BASE,
    COLUMNS,
    FIRST_SQUARES,
    FORGET,
    GROUP,
    NUMPY,
    STEP,
    Kernels,
    Rows,
    Singles,
)
from kvpilot.sim.jit import COMPILED, jit


@jit
def _hazards(weights: Singles, rows: Rows) -> Floats:
    logits = np.full(BINS, BASE)
    for row in rows:
        for b in range(BINS):
            logits[b] += weights[row, b] + weights[row, BINS + b // GROUP] + weights[row, COLUMNS - 1]
    for b in range(BINS):
        logits[b] = 1.0 / (1.0 + math.exp(min(30.0, -logits[b])))
    return logits


@jit
def _step(weights: Singles, squares: Singles, rows: Rows, first: int, last: int, ended: bool) -> None:
    hazards = _hazards(weights, rows)
    gradient = np.zeros(COLUMNS)
    for b in range(first, last + 1):
        slope = hazards[b]
        if ended and b == last:
            slope -= 1.0
        gradient[b] = slope
        gradient[BINS + b // GROUP] += slope
        gradient[COLUMNS - 1] += slope
    for row in rows:
        for column in range(COLUMNS):
            slope = gradient[column]
            total = max(squares[row, column] * FORGET, FIRST_SQUARES) + slope * slope
            squares[row, column] = total
            weights[row, column] -= STEP * slope / math.sqrt(total)


@jit
def _look(
    owners: Rows,
    now: float,
    horizons: Floats,
    since: Floats,
    survival: Floats,
    current: Floats,
    until: Floats,
) -> None:
    for owner in owners:
        elapsed = now - since[owner]
        first = 0
        while first < BINS - 1 and elapsed >= EDGES[first + 1]:
            first += 1
        for row in range(len(horizons)):
            last_edge = max(EDGES[first] + horizons[row], EDGES[first + 1])
            held = worth = 0.0
            for b in range(first, BINS):
                if EDGES[b + 1] > last_edge:
                    break
                held += 0.5 * (survival[owner, b] + survival[owner, b + 1]) * WIDTHS[b]
                worth = max(worth, (survival[owner, first] - survival[owner, b + 1]) / max(held, 1e-12))
            current[row, owner] = worth / (1.0 + max(0.0, -elapsed) * worth)
        if elapsed < 0.0:
            until[owner] = now
        elif first < BINS - 1:
            until[owner] = since[owner] + EDGES[first + 1]
        else:
            until[owner] = math.inf


KERNELS = Kernels(_hazards, _step, _look) if COMPILED else NUMPY
