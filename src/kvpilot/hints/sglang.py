"""The ``agent_hints`` proposed for SGLang (#24656): a step of an agent in a workflow, and what to keep of it."""

from __future__ import annotations

from typing import Any

from kvpilot.domain import Retention, SessionRef
from kvpilot.hints.ids import MAX_ID, read_id
from kvpilot.hints.result import HintRequest, Hints
from kvpilot.hints.values import MAX_TTL_S, MIN_PRIORITY, read_object, read_ttl

FIELD = "agent_hints"
TTL_DEFAULT_S = 300.0


def read(request: HintRequest) -> Hints | None:
    dropped: list[str] = []
    hints = read_object(request.fields.get(FIELD), FIELD, dropped)
    if hints is None:
        return Hints(dropped=tuple(dropped)) if dropped else None
    return Hints(
        session=_session(hints, dropped), retention=_retention(hints, dropped), dropped=tuple(dropped)
    )


def _session(hints: dict[str, Any], dropped: list[str]) -> SessionRef:
    """An agent in a workflow is one conversation; agents' names repeat from workflow to workflow."""
    workflow = read_id(hints, "workflow_id", FIELD, dropped)
    agent = read_id(hints, "agent_id", FIELD, dropped)
    joined = f"{workflow}:{agent}" if workflow and agent else workflow or agent or ""
    if len(joined) > MAX_ID:
        dropped.append(f"{FIELD}: workflow_id and agent_id together are longer than {MAX_ID} characters")
        joined = ""
    return SessionRef(id=joined or None, source="sglang")


def _retention(hints: dict[str, Any], dropped: list[str]) -> Retention | None:
    reuse, ttl_ms = hints.get("reuse_hint"), hints.get("cache_ttl_ms")
    if reuse not in (None, "keep", "neutral", "discard"):
        dropped.append(f"{FIELD}.reuse_hint: not one of keep, neutral, discard")
        reuse = None
    if reuse == "discard":
        return Retention(priority=MIN_PRIORITY)
    if reuse == "neutral" or (reuse is None and ttl_ms is None):
        return None
    default_ms = 1000 * TTL_DEFAULT_S if reuse == "keep" else 0.0
    ttl = read_ttl(ttl_ms, f"{FIELD}.cache_ttl_ms", default_ms, 1000 * MAX_TTL_S, dropped) / 1000
    return Retention(ttl_s=ttl) if ttl else None
