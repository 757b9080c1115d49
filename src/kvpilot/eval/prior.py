"""Makes the packaged prior of forecasts: ``python -m kvpilot.eval.prior OUT TRACE…``.

The simulator's view without hints of each recording is played to the models of ``forecast``; what they have learned
that is common to all agents is written to OUT (``src/kvpilot/forecast/prior.json``). Traces are read, never copied:
the file has effects of kinds of pauses, of tools and programs on how long a wait lasts.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from kvpilot.forecast import Forecaster
from kvpilot.forecast.hazard import HazardModel
from kvpilot.forecast.prior import packaged
from kvpilot.replay.plan import Hints
from kvpilot.sim.brain import Kvpilot
from kvpilot.sim.compiled import KERNELS
from kvpilot.sim.one_tier import run_contexts, scenario_of
from kvpilot.sim.policy import Run
from kvpilot.traces import find_trace, read_trace

LEAST_SQUARES = 10.0
SESSIONS = 120


def learned(paths: list[Path], seed: int = 1) -> tuple[HazardModel, HazardModel]:
    """Models of pauses and of cycles after all of the recordings, one after the other."""
    pauses, cycles = HazardModel(kernels=KERNELS), HazardModel(kernels=KERNELS)
    for path in paths:
        scenario = scenario_of(list(read_trace(path)), SESSIONS, seed)

        def make(run: Run) -> Kvpilot:
            return Kvpilot(run, Forecaster(pauses, cycles))

        run_contexts(scenario, make, scenario.workload.distinct_chunks, Hints.NONE)
    return pauses, cycles


def main(out: Path, traces: list[str]) -> None:
    pauses, cycles = learned([find_trace(name) for name in traces])
    document = {"pauses": packaged(pauses, LEAST_SQUARES), "cycles": packaged(cycles, LEAST_SQUARES)}
    out.write_text(json.dumps(document, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
