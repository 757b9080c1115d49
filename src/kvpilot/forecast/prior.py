"""What is known of agents before the first one is seen: effects learned from recordings, packaged as data.

Only what is common to all agents is in it (kinds of pauses, tools, programs, lengths), nothing of a single session.
``kvpilot.eval.prior`` makes the file.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np

from kvpilot.forecast.hazard import FIRST_SQUARES, NUMPY, HazardModel, Kernels

CONFIDENCE = 1.0
"""Sum of squared gradients that a known effect begins with: it gives way to what is seen within tens of waits."""
SCALE = 100
"""Weights are packaged as integers, in hundredths."""
SPECIAL = ("session:", "conversation:", "line:", "after:line:", "person:after:")
"""How features begin that name one session, or what somebody's project calls its commands."""


def pauses(kernels: Kernels = NUMPY) -> HazardModel:
    """A model of pauses that knows what agents have in common."""
    return _model("pauses", kernels)


def cycles(kernels: Kernels = NUMPY) -> HazardModel:
    """A model of cycles that knows what agents have in common."""
    return _model("cycles", kernels)


def packaged(model: HazardModel, least_squares: float) -> dict[str, Any]:
    """What of a model goes into the file: common features, seen often enough."""
    raw = model.dump()
    kept = [
        (name, weights)
        for name, weights, squares in zip(raw["features"], raw["weights"], raw["squares"], strict=True)
        if not name.startswith(SPECIAL) and squares[-1] >= least_squares
    ]
    return {name: [round(SCALE * float(weight)) for weight in weights] for name, weights in kept}


def _model(kind: str, kernels: Kernels) -> HazardModel:
    model = HazardModel(kernels=kernels)
    effects = _file()[kind]
    model.load(
        {
            "features": list(effects),
            "weights": (np.array(list(effects.values()), dtype=np.float32) / SCALE),
            "squares": np.full(np.array(list(effects.values())).shape, max(CONFIDENCE, FIRST_SQUARES)),
        }
    )
    return model


@cache
def _file() -> dict[str, dict[str, list[int]]]:
    raw: dict[str, dict[str, list[int]]] = json.loads(
        files("kvpilot.forecast").joinpath("prior.json").read_text()
    )
    return raw
