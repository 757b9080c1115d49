"""What a policy achieved in a run."""

from __future__ import annotations

from dataclasses import dataclass

from kvpilot.sim.workload import Ints


@dataclass(frozen=True, slots=True)
class Outcome:
    """``hits``: by call, leading chunks of the prompt that were there. ``held``: chunks, over time."""

    hits: Ints
    held_mean: float
    held_peak: int
    written: int
    """Chunks admitted."""


class Level:
    """Mean over time and peak of something that changes in steps."""

    def __init__(self) -> None:
        self.peak = 0
        self._area = self._since = 0.0
        self._began: float | None = None
        self._value = 0

    def set(self, value: int, now: float) -> None:
        if self._began is None:
            self._began = self._since = now
        self._area += self._value * (now - self._since)
        self._since = now
        self._value = value
        self.peak = max(self.peak, value)

    @property
    def mean(self) -> float:
        lasted = self._since - (self._began or 0.0)
        # Rounding aside, no mean is above the peak.
        return min(self._area / lasted, float(self.peak)) if lasted > 0 else float(self._value)
