"""What happens in a run, in order of time: ends, life-cycle signals, requests."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from kvpilot.sim.view import View
from kvpilot.sim.workload import Workload


class EventKind(IntEnum):
    """In the order in which things of the same moment happen."""

    END = 0
    SIGNAL = 1
    REQUEST = 2


class Event(NamedTuple):
    """``item`` is the index of a call, or of one of the view's signals."""

    at: float
    kind: EventKind
    item: int


def events(workload: Workload, view: View | None = None) -> list[Event]:
    """All events of the run in order; signals where a view has some."""
    out = [Event(at, EventKind.END, i) for i, at in enumerate(workload.end.tolist())]
    out += [Event(at, EventKind.REQUEST, i) for i, at in enumerate(workload.begin.tolist())]
    if view is not None:
        out += [Event(signal.at, EventKind.SIGNAL, i) for i, signal in enumerate(view.signals)]
    return sorted(out)
