"""DeepSeek Harness's headers."""

from __future__ import annotations

from kvpilot.domain import SignalKind
from kvpilot.hints.headers import read_flagged
from kvpilot.hints.result import HintRequest, Hints

HEADERS = (
    "x-deepseek-harness-session-id",
    "x-deepseek-harness-parent-session-id",
    "x-deepseek-harness-compact",
)


def read(request: HintRequest) -> Hints | None:
    return read_flagged(request, "deepseek", HEADERS, SignalKind.COMPACTED)
