"""ThunderAgent: ``program_id``."""

from __future__ import annotations

from kvpilot.hints.engine import read_text_field
from kvpilot.hints.result import HintRequest, Hints


def read(request: HintRequest) -> Hints | None:
    return read_text_field(request, "program_id", "thunderagent")
