"""NVIDIA Dynamo: the ``X-Dynamo-*`` headers (AIPerf sends them, too) and ``nvext.agent_hints``."""

from __future__ import annotations

from kvpilot.domain import Retention, SignalKind
from kvpilot.hints.headers import read_flagged
from kvpilot.hints.result import HintRequest, Hints
from kvpilot.hints.values import as_object, read_object, read_priority

HEADERS = ("x-dynamo-session-id", "x-dynamo-parent-session-id", "x-dynamo-session-final")
GONE = dict.fromkeys(("latency_sensitivity", "cache_control", "session_control"))


def read_headers(request: HintRequest) -> Hints | None:
    return read_flagged(request, "dynamo", HEADERS, SignalKind.END)


def read_body(request: HintRequest) -> Hints | None:
    dropped: list[str] = []
    nvext = read_object(request.fields.get("nvext"), "nvext", dropped) or {}
    hints = as_object(nvext.get("agent_hints"), "nvext.agent_hints", dropped) or {}
    for place, values in (("nvext", nvext), ("nvext.agent_hints", hints)):
        if not GONE.keys().isdisjoint(values):
            dropped += [f"{place}.{name}: Dynamo has dropped it" for name in GONE if name in values]
    priority = read_priority(hints.get("priority"), "nvext.agent_hints.priority", dropped)
    return Hints(retention=Retention(priority=priority) if priority else None, dropped=tuple(dropped))
