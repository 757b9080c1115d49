"""What a request says to the plug-in beside its session id. Pure, fails open.

Either ``kv_transfer_params: {"kvpilot": {...}}``, for engines with a connector, or, for any, a text with the same JSON
in ``vllm_xargs: {"kvpilot": "{...}"}``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from kvpilot.engine.commands import MAX_TTL_S

NAME = "kvpilot"


class RequestHints(msgspec.Struct, frozen=True, omit_defaults=True):
    """``supersedes``: the session's other conversations are gone (compaction); ``last``: it ends with this reply."""

    session: str = ""
    parent: str = ""
    retain_s: float = 0.0
    supersedes: bool = False
    last: bool = False


_NONE = RequestHints()


def _raw(extra: Mapping[str, Any]) -> Any:
    params = extra.get("kv_transfer_params")
    if isinstance(params, Mapping) and NAME in params:
        return params[NAME]
    text = extra.get(NAME)
    if not isinstance(text, str):
        return None
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return None


def read_hints(extra: Mapping[str, Any] | None, session_id: str | None) -> RequestHints:
    """Hints of a request from its sampling parameters' ``extra_args``; ``session_id`` is the engine's own field and
    wins. What makes no sense is left out."""
    if not extra:
        return RequestHints(session=session_id) if session_id else _NONE
    raw = _raw(extra)
    if not isinstance(raw, Mapping):
        return RequestHints(session=session_id) if session_id else _NONE
    found: dict[str, Any] = {}
    for name, kind in RequestHints.__annotations__.items():
        value = raw.get(name)
        if (kind == "float" and isinstance(value, int | float) and not isinstance(value, bool)) or (
            isinstance(value, {"str": str, "bool": bool}.get(kind, ()))
        ):
            found[name] = value
    seconds = found.get("retain_s", 0.0)
    found["retain_s"] = min(MAX_TTL_S, seconds) if seconds > 0 else 0.0
    if session_id:
        found["session"] = session_id
    return RequestHints(**found)
