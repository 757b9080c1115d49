"""The body's own ``session_id``, which vLLM and SGLang take."""

from __future__ import annotations

import msgspec

from kvpilot.domain import SessionRef
from kvpilot.hints.ids import MAX_ID, parse_id
from kvpilot.hints.result import HintRequest, Hints

_decode = msgspec.json.Decoder().decode


def read(request: HintRequest) -> Hints | None:
    return read_text_field(request, "session_id", "engine")


def read_text_field(request: HintRequest, name: str, source: str) -> Hints:
    """A session id that is a field of the body by itself."""
    raw = request.fields.get(name)
    dropped: list[str] = []
    value: object = None
    if raw is not None:
        try:
            # A character is at most 12 bytes of JSON; what is longer than that is too long anyway.
            value = _decode(raw) if len(raw) < 16 * MAX_ID else "x" * (MAX_ID + 1)
        except (ValueError, RecursionError):
            value = ""
    return Hints(session=SessionRef(parse_id(value, name, dropped), None, source), dropped=tuple(dropped))
