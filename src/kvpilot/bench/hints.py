"""What reading hints costs on a request's way: parsing the body's top level and asking all dialects.

The body is read already, as in the gateway; no network, one thread. What is measured is the thread's CPU time:
nothing here waits for anything, so that is what it takes on a core of its own, whatever else the machine does.
Requests of all kinds take turns, so that code and data are as cold as in a gateway.

Variants: a client that says nothing, each dialect alone, all of them at once, and hints on every message (the
dearest: such messages are decoded).
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from kvpilot.bench.stats import quantile
from kvpilot.hints import HintRequest, Hints, read_body, read_hints

BUDGET_MS = {"p50": 0.3, "p99": 1.0}

_EPHEMERAL = {"type": "ephemeral"}
_BROWSER = {
    "host": "127.0.0.1:8000",
    "user-agent": "agent/1.0",
    "accept": "application/json",
    "accept-encoding": "gzip, deflate",
    "authorization": "Bearer key",
    "content-type": "application/json",
    "content-length": "102400",
    "connection": "keep-alive",
    "x-stainless-lang": "python",
    "x-stainless-retry-count": "0",
}
_IDS = {"session_id": "s1", "parent_session_id": "s0"}
_EDIT = {"type": "evict", "target": "messages", "start": 1, "end": 2}
_ACTION = {"action_id": "a", "action_type": "kv.retain", "action_version": "1.0", "payload": {"ttl": 60}}

DIALECTS: dict[str, dict[str, Any]] = {
    "openJiuwen": {
        "agent_hint": {
            **_IDS,
            "cache_control": {"ttl": 300, "msg_offset": 3},
            "context_management": {"manage_request": False, "edits": [_EDIT]},
        }
    },
    "KV-hint envelope": {"kv_hints": {"protocol_version": "0.1", "message_id": "m", "actions": [_ACTION]}},
    "SGLang": {"agent_hints": {"workflow_id": "w", "agent_id": "a", "cache_ttl_ms": 30000}},
    "agent-infer": {"vllm_xargs": {"agentic_context": {"program_id": "p", "parent_program_id": "q"}}},
    "verl, evoke": {
        "kv_transfer_params": {
            "agent_hint": {"schema_version": 1, "trajectory_id": "t", "kv_priority": 65},
            "evoke": {"evoke_session": "e", "priority": 1},
        }
    },
    "Continuum, ThunderAgent": {"job_id": "j", "is_last_step": False, "program_id": "p"},
    "Dynamo": {"nvext": {"agent_hints": {"priority": 5}}},
    "Anthropic": {
        "cache_control": _EPHEMERAL,
        "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]},
    },
    "OpenAI": {"prompt_cache_key": "k", "prompt_cache_options": {"mode": "explicit", "ttl": "30m"}},
}
HEADERS = {
    "x-dynamo-session-id": "d",
    "x-dynamo-parent-session-id": "p",
    "x-claude-code-session-id": "c",
    "thread-id": "t",
    "x-codex-turn-metadata": '{"request_kind": "turn"}',
    "x-deepseek-harness-session-id": "k",
    "x-session-id": "o",
}


@dataclass(frozen=True, slots=True)
class Variant:
    name: str
    body: bytes
    headers: Mapping[str, str]


def variants(body_kb: int) -> list[Variant]:
    """Requests of about ``body_kb`` KB."""
    quiet = _body(body_kb, {})
    everything = {key: value for fields in DIALECTS.values() for key, value in fields.items()}
    marks = {0: _EPHEMERAL, 1: _EPHEMERAL, -2: _EPHEMERAL, -1: _EPHEMERAL}
    every = dict.fromkeys(range(body_kb), _EPHEMERAL)
    return [
        Variant("nothing said", quiet, _BROWSER),
        Variant("headers of every harness", quiet, {**_BROWSER, **HEADERS}),
        *[Variant(name, _body(body_kb, fields), _BROWSER) for name, fields in DIALECTS.items()],
        Variant("Anthropic, 4 marks", _body(body_kb, {}, marks), _BROWSER),
        Variant("all at once, 4 marks", _body(body_kb, everything, marks), {**_BROWSER, **HEADERS}),
        Variant(
            "all at once, every message marked", _body(body_kb, everything, every), {**_BROWSER, **HEADERS}
        ),
    ]


def run_bench(body_kb: int, rounds: int, clock: Callable[[], float] = time.thread_time) -> dict[str, Any]:
    """Rounds go over all variants in turn, so that drift hits every one alike."""
    cases = variants(body_kb)
    for case in cases:
        for _ in range(20):
            identify(case)
    times: dict[str, list[float]] = {case.name: [] for case in cases}
    gc.collect()
    for _ in range(rounds):
        for case in cases:
            arrived = _arrived(case)
            began = clock()
            identify(arrived)
            times[case.name].append(1000 * (clock() - began))
    rows = {
        case.name: {
            "body_bytes": len(case.body),
            "p50_ms": round(quantile(times[case.name], 0.5), 4),
            "p99_ms": round(quantile(times[case.name], 0.99), 4),
        }
        for case in cases
    }
    return {"body_kb": body_kb, "rounds": rounds, "budget_ms": BUDGET_MS, "variants": rows}


def _arrived(case: Variant) -> Variant:
    """The body put together from its parts, as the gateway has just done."""
    half = len(case.body) // 2
    return Variant(case.name, b"".join((case.body[:half], case.body[half:])), case.headers)


def identify(case: Variant) -> Hints:
    """What the gateway does with a body before anything else."""
    return read_hints(HintRequest(read_body(case.body), case.headers, body=case.body))


def print_table(document: Mapping[str, Any], console: Console) -> None:
    """The document for people."""
    budget = document["budget_ms"]
    table = Table(
        title=f"Reading hints, {document['body_kb']} KB bodies, {document['rounds']} rounds (ms of CPU)"
    )
    for column in ("request", f"p50 (≤ {budget['p50']})", f"p99 (≤ {budget['p99']})"):
        table.add_column(column, justify="left" if column == "request" else "right")
    for name, row in document["variants"].items():
        table.add_row(name, f"{row['p50_ms']:.3f}", f"{row['p99_ms']:.3f}")
    console.print(table)


def _body(body_kb: int, fields: Mapping[str, Any], marks: Mapping[int, Any] | None = None) -> bytes:
    text = 'a tool wrote this line\\n and "quoted" it. ' * 22
    messages: list[dict[str, Any]] = []
    while len(messages) < body_kb:
        messages.append({"role": "user", "content": [{"type": "text", "text": text}]})
    for number, mark in (marks or {}).items():
        messages[number]["content"][0]["cache_control"] = mark
    return json.dumps(
        {"model": "m", "stream": True, "max_tokens": 512, "messages": messages, **fields}
    ).encode()
