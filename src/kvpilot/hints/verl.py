"""verl uni-agent: ``kv_transfer_params.agent_hint``, a trajectory with a priority and a lease."""

from __future__ import annotations

from kvpilot.domain import Retention
from kvpilot.hints.ids import read_session
from kvpilot.hints.result import HintRequest, Hints
from kvpilot.hints.values import MAX_TTL_S, as_number, as_object, read_field, read_priority

NAME = "kv_transfer_params.agent_hint"
SCHEMA = 1


def read(request: HintRequest) -> Hints | None:
    dropped: list[str] = []
    params = read_field(request, "kv_transfer_params", dropped) or {}
    hint = as_object(params.get("agent_hint"), NAME, dropped)
    if hint is None:
        return Hints(dropped=tuple(dropped)) if dropped else None
    version = hint.get("schema_version", SCHEMA)
    if type(version) is not int or version != SCHEMA:
        return Hints(dropped=(f"{NAME}.schema_version: not {SCHEMA}",))
    priority = read_priority(hint.get("kv_priority"), f"{NAME}.kv_priority", dropped)
    ttl = _lease(request.now, hint.get("lease_until"), dropped)
    return Hints(
        session=read_session(hint, NAME, "trajectory_id", None, dropped),
        retention=Retention(ttl_s=ttl, priority=priority) if ttl or priority else None,
        dropped=tuple(dropped),
    )


def _lease(now: float, until: object, dropped: list[str]) -> float:
    """Seconds left of a lease that ends at a unix time."""
    if until is None:
        return 0.0
    end = as_number(until)
    if end is None:
        dropped.append(f"{NAME}.lease_until: not a unix time")
        return 0.0
    return min(max(end - now, 0.0), MAX_TTL_S)
