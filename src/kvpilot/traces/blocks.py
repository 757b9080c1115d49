"""Readers of ``blocks/*.jsonl.gz``: prompts as lists of block ids, no text and no tools.

A block becomes a message of role ``block``. ``kv-cache-tester``: one trace a line, sub-agents nested; blocks
are local to a trace, except that the first ``tool_tokens + system_tokens`` of traces with the same two
numbers are taken to be the same. Mooncake: one request a line, shared ids, and no notion of a session: every
request is a session of one call, its ``t_request`` the time since the recording began.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from kvpilot.traces.errors import TraceError
from kvpilot.traces.lines import read_lines
from kvpilot.traces.model import TraceAgent, TraceCall, TraceMessage, TraceSession

MOONCAKE_BLOCK = 512


class _Request(msgspec.Struct):
    t: float
    type: str
    out: int = 0
    stop: str | None = None
    api_time: float | None = None
    ttft: float | None = None
    keep: int = 0
    new: list[tuple[int, int]] = []
    agent_id: str = ""
    requests: list[_Request] = []
    tool_tokens: int = 0
    system_tokens: int = 0


class _Trace(msgspec.Struct):
    id: str
    block_size: int
    requests: list[_Request]
    tool_tokens: int = 0
    system_tokens: int = 0


class _MooncakeRequest(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


def read_kv_cache_tester(path: Path) -> Iterator[TraceSession]:
    """One session a trace, one at a time. Raises TraceError with file and line."""
    for number, trace in read_lines(path, _Trace):
        try:
            yield _kv_trace(trace)
        except ValueError as error:
            raise TraceError(f"{path}, line {number}: {error}") from None


def _kv_trace(trace: _Trace) -> TraceSession:
    agents = [TraceAgent(id="main")]
    context = _BlockContext(trace.id, trace.block_size, trace.tool_tokens, trace.system_tokens)
    calls: list[TraceCall] = []
    for request in trace.requests:
        if request.type != "subagent":
            calls.append(context.call("main", request, 0.0))
            continue
        agent = f"sub{len(agents)}"
        agents.append(TraceAgent(id=agent, parent="main"))
        nested = _BlockContext(trace.id, trace.block_size, request.tool_tokens, request.system_tokens)
        calls += [nested.call(agent, inner, request.t) for inner in request.requests]
    calls.sort(key=lambda call: call.t_request)
    return TraceSession(
        source="kv-cache-tester",
        id=trace.id,
        agents=tuple(agents),
        calls=tuple(calls),
        chunk_tokens=trace.block_size,
    )


class _BlockContext:
    """Turns one agent's block ids into messages; its first prompt decides which ids are the shared head."""

    def __init__(self, trace: str, block_size: int, tool_tokens: int, system_tokens: int) -> None:
        self._trace, self._block_size = trace, block_size
        self._head = f"head:{tool_tokens}:{system_tokens}"
        self._head_blocks = (tool_tokens + system_tokens) // block_size
        self._shared: dict[int, str] | None = None
        self._length = 0

    def call(self, agent: str, request: _Request, offset: float) -> TraceCall:
        if not 0 <= request.keep <= self._length:
            raise ValueError(f"request at {request.t} s keeps {request.keep} of {self._length} blocks")
        ids = [block for start, length in request.new for block in range(start, start + length)]
        if self._shared is None:
            self._shared = {block: f"{self._head}:{i}" for i, block in enumerate(ids[: self._head_blocks])}
        shared = self._shared
        self._length = request.keep + len(ids)
        start = offset + request.t
        add = tuple(
            TraceMessage(id=shared.get(block, f"{self._trace}:{block}"), role="block", tok=self._block_size)
            for block in ids
        )
        return TraceCall(
            agent=agent,
            t_request=start,
            t_first=None if request.ttft is None else start + request.ttft,
            t_end=start + (request.api_time or 0.0),
            keep=request.keep,
            add=add,
            reply=TraceMessage(
                id=f"{self._trace}:{agent}:reply:{start}", role="assistant", tok=max(1, request.out)
            ),
        )


def read_mooncake(path: Path) -> Iterator[TraceSession]:
    """One session of one call a request. Raises TraceError with file and line."""
    source = path.name.removesuffix(".gz").removesuffix(".jsonl")
    for number, row in read_lines(path, _MooncakeRequest):
        full = len(row.hash_ids) - 1
        last = row.input_length - full * MOONCAKE_BLOCK
        if full < 0 or not 0 < last <= MOONCAKE_BLOCK:
            raise TraceError(
                f"{path}, line {number}: {len(row.hash_ids)} blocks do not make {row.input_length} tokens"
            )
        at = row.timestamp / 1000
        add = tuple(
            TraceMessage(id=f"{source}:{block}", role="block", tok=MOONCAKE_BLOCK if i < full else last)
            for i, block in enumerate(row.hash_ids)
        )
        reply = TraceMessage(id=f"{source}:reply:{number}", role="assistant", tok=max(1, row.output_length))
        yield TraceSession(
            source=source,
            id=f"request-{number}",
            agents=(TraceAgent(id="main"),),
            calls=(TraceCall(agent="main", t_request=at, t_end=at, keep=0, add=add, reply=reply),),
            chunk_tokens=MOONCAKE_BLOCK,
        )
