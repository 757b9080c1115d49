"""The compiled inner loops of forecasts say what those of production say."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from kvpilot.domain import SignalKind, ToolFacts
from kvpilot.forecast import Forecaster, prior
from kvpilot.forecast.hazard import NUMPY, Kernels
from kvpilot.sim.compiled import KERNELS
from kvpilot.sim.jit import COMPILED

TOOLS = (ToolFacts("Bash", program="pytest"), ToolFacts("Read"), ToolFacts("Task", agent=True))


@pytest.mark.skipif(not COMPILED, reason="numba is not installed")
def test_a_simulation_forecasts_what_production_does() -> None:
    produced, simulated = _lived_through(NUMPY), _lived_through(KERNELS)
    assert len(produced) == len(simulated) > 100
    np.testing.assert_allclose(simulated, produced, rtol=1e-3)


def _lived_through(kernels: Kernels) -> list[float]:
    """Worths along the lives of some conversations, with announced returns and pauses from milliseconds to days."""
    forecaster = Forecaster(prior.pauses(kernels), prior.cycles(kernels), horizons=(math.inf, 0.3, 20.0))
    draw = random.Random(4)
    now, found = 0.0, []
    for turn in range(150):
        owner = draw.randrange(9)
        forecaster.request(
            owner, now, session=f"s{owner % 3}", conversation=str(owner), child=owner == 1, added_tokens=turn
        )
        now += draw.expovariate(0.2)
        tools = draw.sample(TOOLS, draw.randrange(3))
        forecaster.reply(owner, now, tools, draw.randrange(2000))
        if turn % 10 == 0:
            forecaster.signal(owner, now, SignalKind.RESUME, eta_s=60.0)
        now += 10 ** draw.uniform(-3, 2 if turn % 40 else 6)
        for horizon in range(3):
            found += [*forecaster.worths(now, horizon).tolist(), forecaster.worth(owner, now, horizon)]
    return found
