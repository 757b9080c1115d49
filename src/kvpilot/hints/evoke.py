"""evoke: ``kv_transfer_params.evoke``."""

from __future__ import annotations

from kvpilot.domain import Retention
from kvpilot.hints.ids import read_session
from kvpilot.hints.result import HintRequest, Hints
from kvpilot.hints.values import as_object, read_field, read_priority

NAME = "kv_transfer_params.evoke"


def read(request: HintRequest) -> Hints | None:
    dropped: list[str] = []
    params = read_field(request, "kv_transfer_params", dropped) or {}
    hint = as_object(params.get("evoke"), NAME, dropped)
    if hint is None:
        return Hints(dropped=tuple(dropped)) if dropped else None
    priority = read_priority(hint.get("priority"), f"{NAME}.priority", dropped)
    return Hints(
        session=read_session(hint, NAME, "evoke_session", None, dropped),
        retention=Retention(priority=priority) if priority else None,
        dropped=tuple(dropped),
    )
