"""Readers of ``text/*``: real prompts with their full text.

``miniswe``: the whole prompt of each call, append-only; what a call adds is one message, and the prompt holds
what was recorded (the recorder left the agent's own replies out of it). ``tau-bench``: whole conversations;
each assistant message is a call, one second apart because the recording has no times.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from kvpilot.traces.errors import TraceError
from kvpilot.traces.lines import open_binary, read_lines
from kvpilot.traces.model import ToolUse, TraceAgent, TraceCall, TraceMessage, TraceSession

CountTokens = Callable[[str], int]


def estimate_tokens(text: str) -> int:
    """About four characters a token: good enough to scale by; a tokenizer's count is better."""
    return max(1, (len(text) + 3) // 4)


class _MiniCall(msgspec.Struct):
    timestamp: int
    input: str
    output: str
    session_id: str


def read_miniswe(path: Path, count: CountTokens = estimate_tokens) -> Iterator[TraceSession]:
    """One session at a time (its calls lie together in the file). Raises TraceError with file and line."""
    rows = read_lines(path, _MiniCall)
    for session_id, group in itertools.groupby(rows, key=lambda row: row[1].session_id):
        yield _miniswe_session(path, session_id, list(group), count)


def _miniswe_session(
    path: Path, session_id: str, rows: list[tuple[int, _MiniCall]], count: CountTokens
) -> TraceSession:
    began = rows[0][1].timestamp
    calls: list[TraceCall] = []
    before = ""
    for index, (number, row) in enumerate(rows):
        if not row.input.startswith(before):
            raise TraceError(f"{path}, line {number}: the prompt does not continue the one before it")
        at = (row.timestamp - began) / 1e6
        added = _text_message("user", row.input[len(before) :], count)
        calls.append(
            TraceCall(
                agent="main",
                t_request=at,
                t_end=at,
                keep=index,
                add=(added,),
                reply=_text_message("assistant", row.output, count),
                events=("human",) if index == 0 else ("tool",),
            )
        )
        before = row.input
    return TraceSession(source="miniswe", id=session_id, agents=(TraceAgent(id="main"),), calls=tuple(calls))


class _Function(msgspec.Struct):
    name: str
    arguments: str = ""


class _ToolCall(msgspec.Struct):
    id: str
    function: _Function


class _TauMessage(msgspec.Struct):
    role: str
    content: str | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None


class _TauRun(msgspec.Struct):
    task_id: int
    traj: list[_TauMessage]
    trial: int = 0


def read_tau_bench(path: Path, count: CountTokens = estimate_tokens) -> Iterator[TraceSession]:
    """The runs of one JSON array, decoded one at a time. Raises TraceError naming the run."""
    source = path.name.removesuffix(".gz").removesuffix(".json")
    with open_binary(path) as file:
        try:
            raw: list[Any] = msgspec.json.decode(file.read(), type=list[msgspec.Raw])
        except (msgspec.DecodeError, OSError, EOFError) as error:
            raise TraceError(f"{path}: {error}") from None
    for index, item in enumerate(raw):
        try:
            yield _tau_session(source, index, msgspec.json.decode(item, type=_TauRun), count)
        except msgspec.DecodeError as error:
            raise TraceError(f"{path}, run {index}: {error}") from None


def _tau_session(source: str, index: int, run: _TauRun, count: CountTokens) -> TraceSession:
    calls: list[TraceCall] = []
    pending: list[TraceMessage] = []
    held = 0
    for raw in run.traj:
        uses = tuple(
            ToolUse(id=use.id, name=use.function.name, arguments=use.function.arguments)
            for use in raw.tool_calls or ()
        )
        results = (raw.tool_call_id,) if raw.tool_call_id else ()
        message = _text_message(raw.role, raw.content or "", count, uses, results)
        if raw.role != "assistant":
            pending.append(message)
            continue
        event = "tool" if any(m.results for m in pending) else "human"
        at = float(len(calls))
        calls.append(
            TraceCall(
                agent="main",
                t_request=at,
                t_end=at,
                keep=held,
                add=tuple(pending),
                reply=message,
                events=(event,),
            )
        )
        held += len(pending) + 1
        pending = []
    return TraceSession(
        source=source,
        id=f"task{run.task_id}-trial{run.trial}-{index}",
        agents=(TraceAgent(id="main"),),
        calls=tuple(calls),
    )


def _text_message(
    role: str,
    text: str,
    count: CountTokens,
    calls: tuple[ToolUse, ...] = (),
    results: tuple[str, ...] = (),
) -> TraceMessage:
    uses = " ".join(f"{use.name} {use.arguments or ''}" for use in calls)
    digest = hashlib.blake2b(f"{role}\0{text}\0{uses}".encode(), digest_size=8).hexdigest()
    return TraceMessage(
        id=digest, role=role, tok=max(1, count(text or uses)), calls=calls, results=results, text=text
    )
