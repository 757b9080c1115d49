"""The bound on what any policy over several tiers can make of a machine.

It knows all requests, keeps by next use (Belady) in the device and in all tiers together, and loads at any time since
the agent's call before, soonest request first. A request is only delayed by a load that its link cannot finish in
time, and, where it had to wait for room, by that of what cannot have been in the device beside those that ran until
then. For room and prefill it waits as all do (and may favour another in that order by a thousandth).
"""

from __future__ import annotations

import numpy as np

from kvpilot.sim.belady import belady
from kvpilot.sim.hardware import Hardware
from kvpilot.sim.one_tier import Scenario
from kvpilot.sim.serving import Engine
from kvpilot.sim.tiers import TieredOutcome, capacities
from kvpilot.sim.workload import Floats, Ints, Workload


def clairvoyant(scenario: Scenario, hardware: Hardware, device_chunks: int) -> TieredOutcome:
    """The bound described above. What it holds and writes is not told."""
    engine = _Clairvoyant(scenario, hardware, device_chunks)
    engine.run()
    return TieredOutcome(engine.ttft, engine.waited, engine.found, {}, {}, {})


class _Clairvoyant(Engine):
    def __init__(self, scenario: Scenario, hardware: Hardware, device_chunks: int) -> None:
        super().__init__(scenario, hardware, device_chunks)
        workload = self._workload
        calls, uses = scenario.instant
        reach = 0
        self._hits: Ints = np.zeros(workload.calls, dtype=np.int32)
        self._late: Floats = np.zeros(workload.calls)
        earliest = _called_before(workload)
        speeds = {store.tier: store.read_bytes_per_s for store in hardware.stores}
        for tier, chunks in capacities(hardware, device_chunks).items():
            reach += chunks
            hits = belady(workload, calls, uses, reach).hits
            if tier in speeds:
                took = np.maximum(0, hits - self._hits) * self._chunk_bytes / speeds[tier]
                self._late = np.maximum(self._late, _lateness(workload.begin, earliest, took))
            self._hits = hits
        self._read_chunks_per_s = hardware.stores[0].read_bytes_per_s / self._chunk_bytes
        self._room = 0.0
        """Chunks of the device that were not in use until the latest end …"""
        self._missed: dict[int, int] = {}
        """… and what of their hits was not in use either, by calls that waited then."""

    def replied(self, call: int, now: float) -> None:
        if self._queue:
            self._room = max(0.0, self._device_chunks - self._in_use.chunks)
            self._missed = {waiting: self._not_in_use(waiting) for waiting in self._queue}

    def load(self, call: int, now: float) -> tuple[int, float]:
        ready = float(self._came[call] + self._late[call])
        missed = self._missed.pop(call, 0)
        if missed:
            ready = max(ready, now + max(0.0, missed - self._room) / self._read_chunks_per_s)
            self._room = max(0.0, self._room - missed)
        return int(self._hits[call]), max(now, ready)

    def _not_in_use(self, call: int) -> int:
        """Of the chunks that will hit."""
        tip = int(self._workload.context_tip[call])
        return max(0, self._in_use.missing(tip) - self._workload.depth(tip) + int(self._hits[call]))


def _lateness(begin: Floats, earliest: Floats, took: Floats) -> Floats:
    """How long after its request each load ends on one link that serves the soonest request first."""
    late = np.zeros(len(begin))
    free = 0.0
    for call in np.flatnonzero(took).tolist():
        free = max(free, earliest[call]) + took[call]
        late[call] = max(0.0, free - begin[call])
    return late


def _called_before(workload: Workload) -> Floats:
    """By call, when its agent called before (its own time where it did not)."""
    out = workload.begin.copy()
    last: dict[int, float] = {}
    for call, agent in enumerate(workload.agent.tolist()):
        out[call] = last.get(agent, out[call])
        last[agent] = float(workload.begin[call])
    return out
