"""DeepSeek Harness's headers."""

from __future__ import annotations

from kvpilot.domain import SignalKind
from kvpilot.hints.ids import read_session
from kvpilot.hints.result import HintRequest, Hints
from kvpilot.hints.values import is_true

_SESSION, _PARENT = "x-deepseek-harness-session-id", "x-deepseek-harness-parent-session-id"
_COMPACT = "x-deepseek-harness-compact"
HEADERS = (_SESSION, _PARENT, _COMPACT)


def read(request: HintRequest) -> Hints | None:
    dropped: list[str] = []
    session = read_session(request.headers, "deepseek", _SESSION, _PARENT, dropped)
    compacts = is_true(request.headers.get(_COMPACT))
    return Hints(
        session=session,
        signals=(request.signal(SignalKind.COMPACTED),) if compacts else (),
        dropped=tuple(dropped),
    )
