"""What a forecaster has learned, as plain data that a store can keep, and back."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from kvpilot.forecast import prior
from kvpilot.forecast.forecaster import Forecaster
from kvpilot.forecast.hazard import COLUMNS, HazardModel

VERSION = 1
_LARGEST = 6e4
"""Half-precision numbers end soon after; sums of squares this large take no part in anything fine."""


class _Model(msgspec.Struct):
    features: list[str]
    weights: bytes
    """[features, COLUMNS] little-endian half-precision numbers."""
    squares: bytes


class _Memory(msgspec.Struct):
    version: int
    columns: int
    pauses: _Model
    cycles: _Model
    asked: list[tuple[str, float, float]]


def pack(forecaster: Forecaster) -> dict[str, Any]:
    """What :func:`unpack` takes back, in plain types; some MB when full."""
    intervals = forecaster.intervals
    packed: dict[str, Any] = msgspec.to_builtins(
        _Memory(
            version=VERSION,
            columns=COLUMNS,
            pauses=_packed(forecaster.pauses.model),
            cycles=_packed(forecaster.cycles.model),
            asked=intervals.calibrator.dump() if intervals is not None else [],
        ),
        builtin_types=(bytes,),
    )
    return packed


def unpack(forecaster: Forecaster, raw: object) -> None:
    """Let the forecaster know what :func:`pack` gave. Raises ValueError when it was written by another version or is
    damaged; nothing is changed then."""
    memory = msgspec.convert(raw, _Memory)
    if (memory.version, memory.columns) != (VERSION, COLUMNS):
        raise ValueError(f"written by another version ({memory.version}, {memory.columns} columns)")
    pauses = _unpacked(memory.pauses, prior.pauses())
    cycles = _unpacked(memory.cycles, prior.cycles())
    if not np.isfinite([asked for _, _, asked in memory.asked]).all():
        raise ValueError("shares that are no numbers")
    forecaster.pauses.model, forecaster.cycles.model = pauses, cycles
    if forecaster.intervals is not None:
        forecaster.intervals.calibrator.load(memory.asked)


def _packed(model: HazardModel) -> _Model:
    raw = model.dump()
    return _Model(
        features=raw["features"],
        weights=raw["weights"].astype("<f2").tobytes(),
        squares=np.minimum(raw["squares"], _LARGEST).astype("<f2").tobytes(),
    )


def _unpacked(packed: _Model, known: HazardModel) -> HazardModel:
    weights, squares = (
        np.frombuffer(raw, dtype="<f2").reshape(-1, COLUMNS) for raw in (packed.weights, packed.squares)
    )
    known.load({"features": packed.features, "weights": weights, "squares": squares})
    return known
