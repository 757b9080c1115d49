"""Continuum: ``job_id``, and ``is_last_step`` with the last request of a job."""

from __future__ import annotations

from kvpilot.domain import SignalKind
from kvpilot.hints.engine import read_text_field
from kvpilot.hints.result import HintRequest, Hints


def read(request: HintRequest) -> Hints | None:
    hints = read_text_field(request, "job_id", "continuum")
    last = request.fields.get("is_last_step")
    if last is None or bytes(last) != b"true":
        return hints
    return Hints(session=hints.session, signals=(request.signal(SignalKind.END),), dropped=hints.dropped)
