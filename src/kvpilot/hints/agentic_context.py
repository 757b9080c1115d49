"""agent-infer: ``vllm_xargs.agentic_context``, an object or the JSON text of one."""

from __future__ import annotations

from kvpilot.domain import SessionRef
from kvpilot.hints.ids import read_id
from kvpilot.hints.result import HintRequest, Hints
from kvpilot.hints.values import as_object, read_object

NAME = "vllm_xargs.agentic_context"
MAX_BYTES = 16 * 1024


def read(request: HintRequest) -> Hints | None:
    dropped: list[str] = []
    arguments = read_object(request.fields.get("vllm_xargs"), "vllm_xargs", dropped) or {}
    value = arguments.get("agentic_context")
    if isinstance(value, str):
        context = read_object(value.encode("utf-8", "replace"), NAME, dropped, MAX_BYTES)
    else:
        context = as_object(value, NAME, dropped)
    if context is None:
        return Hints(dropped=tuple(dropped)) if dropped else None
    program = read_id(context, "program_id", NAME, dropped)
    session = read_id(context, "session_id", NAME, dropped)
    parent = read_id(context, "parent_program_id", NAME, dropped)
    # A program is one agent's run, and parents are told of programs: so it is what a session is here.
    return Hints(session=SessionRef(program or session, parent, "agent-infer"), dropped=tuple(dropped))
