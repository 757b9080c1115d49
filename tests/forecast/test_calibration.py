"""Stated intervals hold, also where the model is wrong."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvpilot.forecast.bins import BINS
from kvpilot.forecast.calibration import Calibrator
from kvpilot.forecast.curve import curve


@pytest.mark.parametrize("share", [0.5, 0.8, 0.95])
@pytest.mark.parametrize("hazard", [0.05, 0.3], ids=["too long", "too short"])
def test_the_stated_share_lies_inside_whatever_the_model_says(share: float, hazard: float) -> None:
    rng, calibrator = random.Random(2), Calibrator()
    wrong = curve(np.full(BINS, hazard))
    inside = []
    for n in range(3000):
        seconds = rng.lognormvariate(0.0 if n < 1500 else 1.0, 1.0)
        low, high = calibrator.interval("tool", wrong, share)
        inside.append(low <= seconds <= high)
        calibrator.observe("tool", share, inside[-1])
    assert abs(np.mean(inside[500:]) - share) < 0.02
