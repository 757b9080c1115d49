"""Codex's headers: a thread is a session; its turn metadata tells when a request compacts the context."""

from __future__ import annotations

from kvpilot.domain import SessionRef, SignalKind
from kvpilot.hints.ids import read_id
from kvpilot.hints.result import HintRequest, Hints
from kvpilot.hints.values import read_object

METADATA = "x-codex-turn-metadata"
HEADERS = ("thread-id", "session-id", "x-codex-parent-thread-id", METADATA)


def read(request: HintRequest) -> Hints | None:
    dropped: list[str] = []
    thread, session, parent = [read_id(request.headers, name, "", dropped) for name in HEADERS[:3]]
    compacts = METADATA in request.headers and _compacts(request.headers[METADATA], dropped)
    return Hints(
        session=SessionRef(thread or session, parent, "codex"),
        signals=(request.signal(SignalKind.COMPACTED),) if compacts else (),
        dropped=tuple(dropped),
    )


def _compacts(metadata: str, dropped: list[str]) -> bool:
    turn = read_object(metadata.encode("utf-8", "replace"), METADATA, dropped)
    return turn is not None and turn.get("request_kind") == "compaction"
