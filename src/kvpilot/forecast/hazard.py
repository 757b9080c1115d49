"""How likely a wait ends in the next moment, given what is known about it: learned online, from cold.

A discrete-time survival model with additive effects (Cox 1972; Tutz & Schmid, "Modeling Discrete Time-to-Event
Data", 2016, ch. 3). In each time bin b of a wait with features x

    logit h(b | x) = BASE + Σ_f∈x ( w_f[b] + w_f[group of b] + w_f )

so a feature such as "this program" or "this session" shifts the hazard at one time scale, at a few, or at all.
Weights follow the gradient of the log-likelihood with AdaGrad steps (Duchi et al. 2011): what is seen rarely moves
fast, what is seen often stays. Squared gradients are forgotten slowly, so that change is followed. A wait that
has not ended yet counts for the bins it has survived, so those who never return are learned from too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvpilot.forecast.bins import BINS, Floats
from kvpilot.forecast.curve import look

GROUP = 4
"""Bins that share a weight (two octaves)."""
GROUPS = -(-BINS // GROUP)
COLUMNS = BINS + GROUPS + 1
BASE = -2.0
STEP = 0.1
FIRST_SQUARES = 0.3
"""What the sum of squared gradients starts with: it bounds the first steps."""
FORGET = 0.9995
"""Factor on the squared gradients of a feature per wait."""
MAX_FEATURES = 20_000
PARTICULAR = ("session:", "conversation:")
"""How features begin that name one session: they come and go, and never push out what all have in common."""

_GROUP_OF = np.arange(BINS) // GROUP
_STARTS = np.arange(0, BINS, GROUP)


Singles = npt.NDArray[np.float32]
Rows = npt.NDArray[np.intp]


def hazards_of(weights: Singles, rows: Rows) -> Floats:
    """[BINS] hazards of a wait whose features have ``rows`` of ``weights`` [n, COLUMNS]."""
    return _sigmoid(_logits(_summed(weights.take(rows, axis=0))))


def step(weights: Singles, squares: Singles, rows: Rows, first: int, last: int, ended: bool) -> None:
    """``weights`` and ``squares`` [n, COLUMNS] move in these rows after a wait as in :meth:`HazardModel.learn`."""
    own, sums = weights.take(rows, axis=0), squares.take(rows, axis=0)
    slope = np.zeros(BINS)
    slope[first : last + 1] = _sigmoid(_logits(_summed(own))[first : last + 1])
    if ended:
        slope[last] -= 1.0
    gradient = np.empty(COLUMNS, dtype=np.float32)
    gradient[:BINS], gradient[BINS:-1], gradient[-1] = slope, np.add.reduceat(slope, _STARTS), slope.sum()
    sums *= FORGET
    np.maximum(sums, FIRST_SQUARES, out=sums)
    sums += gradient * gradient
    squares[rows] = sums
    weights[rows] = own - STEP * gradient / np.sqrt(sums)


@dataclass(frozen=True, slots=True)
class Kernels:
    """The inner loops: numpy's here; others may compile them (``kvpilot.sim.compiled``)."""

    hazards: Callable[[Singles, Rows], Floats] = hazards_of
    step: Callable[[Singles, Singles, Rows, int, int, bool], None] = step
    look: Callable[[Rows, float, Floats, Floats, Floats, Floats, Floats], None] = look


NUMPY = Kernels()


class HazardModel:
    """Learns hazards by feature. All operations are O(features of the wait · BINS); memory is bounded."""

    def __init__(self, max_features: int = MAX_FEATURES, kernels: Kernels = NUMPY) -> None:
        self.kernels = kernels
        self._max = max_features
        self._common: dict[str, int] = {}
        self._particular: dict[str, int] = {}
        self._weights = np.zeros((64, COLUMNS), dtype=np.float32)
        self._squares = np.full((64, COLUMNS), FIRST_SQUARES, dtype=np.float32)

    def hazards(self, features: Sequence[str]) -> Floats:
        """[BINS] probability that a wait which has reached a bin ends in it."""
        rows = [row for name in features if (row := self._find(name)) is not None]
        return self.kernels.hazards(self._weights, np.array(rows, dtype=np.intp))

    def learn(self, features: Sequence[str], first: int, last: int, ended: bool) -> None:
        """A wait was under way in bins ``first`` … ``last``, and ended in the last of them, or has not ended."""
        if last < first:
            return
        rows = np.array([self._row(name) for name in features], dtype=np.intp)
        self.kernels.step(self._weights, self._squares, rows, first, last, ended)

    def explain(self, features: Iterable[str]) -> dict[str, float]:
        """Each feature's mean shift of the logit over all bins: what makes a wait short (above 0) or long."""
        return {
            name: float(_logits(self._weights[row].astype(np.float64)).mean() - BASE)
            for name in features
            if (row := self._find(name)) is not None
        }

    def dump(self) -> dict[str, Any]:
        """What :meth:`load` takes back: ``features`` [n] names, ``weights`` and ``squares`` [n, COLUMNS] float32."""
        known = {**self._common, **self._particular}
        rows = list(known.values())
        return {"features": list(known), "weights": self._weights[rows], "squares": self._squares[rows]}

    def load(self, raw: dict[str, Any]) -> None:
        """Takes what :meth:`dump` gave. Raises ValueError when it has another shape; nothing is changed then."""
        names = raw.get("features", [])
        weights = np.asarray(raw.get("weights", []), dtype=np.float32)
        squares = np.asarray(raw.get("squares", []), dtype=np.float32)
        shape = (len(names), COLUMNS)
        if names and not weights.shape == squares.shape == shape:
            raise ValueError(f"weights of shape {weights.shape}, {shape} expected")
        if not (np.isfinite(weights).all() and np.isfinite(squares).all()):
            raise ValueError("weights that are no numbers")
        for name, weight, square in zip(names[-self._max :], weights, squares, strict=False):
            row = self._row(str(name))
            self._weights[row], self._squares[row] = weight, np.maximum(square, FIRST_SQUARES)

    def _find(self, name: str) -> int | None:
        row = self._common.get(name)
        return self._particular.get(name) if row is None else row

    def _row(self, name: str) -> int:
        """The feature's row, made where there is none."""
        rows = self._particular if name.startswith(PARTICULAR) else self._common
        row = rows.pop(name, None)
        if row is None:
            row = self._free_row()
        rows[name] = row  # last in order: the one learned from longest ago is the first
        return row

    def _free_row(self) -> int:
        """A new row, or that of the feature learned from longest ago: of what is particular to one session, unless
        that is less than half of all."""
        row = len(self._common) + len(self._particular)
        if row >= self._max:
            rows = self._particular if 2 * len(self._particular) >= self._max else self._common
            row = rows.pop(next(iter(rows)))
            self._weights[row], self._squares[row] = 0.0, FIRST_SQUARES
        elif row >= len(self._weights):
            self._weights = _doubled(self._weights, 0.0)
            self._squares = _doubled(self._squares, FIRST_SQUARES)
        return row


def _summed(weights: Singles) -> Floats:
    """[COLUMNS] sums of [n, COLUMNS]."""
    return np.asarray(np.ones(len(weights), dtype=np.float32) @ weights, dtype=np.float64)


def _logits(weights: Floats) -> Floats:
    """[BINS] from summed weights [COLUMNS]."""
    logits: Floats = weights[BINS : BINS + GROUPS].take(_GROUP_OF)
    logits += weights[:BINS]
    logits += BASE + weights[-1]
    return logits


def _sigmoid(logits: Floats) -> Floats:
    out: Floats = np.exp(-np.maximum(logits, -30.0))
    out += 1.0
    return np.divide(1.0, out, out=out)


def _doubled(array: Singles, fill: float) -> Singles:
    return np.concatenate((array, np.full_like(array, fill)))


def log_likelihood(hazards: Floats, last: int, ended: bool) -> float:
    """Natural log of the probability of a wait that reached bin ``last`` and ended in it (or was cut off there)."""
    survived = float(np.log1p(-hazards[:last]).sum())
    return survived + math.log(hazards[last]) if ended else survived
