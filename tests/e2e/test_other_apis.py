"""Anthropic's Messages and the Responses API on the real engine: KV known, kept apart, released as on chat."""

from __future__ import annotations

import json
import urllib.request
import uuid
from typing import Any

import pytest

from kvpilot.stack.launch import Endpoints
from tests.e2e.peers import Message, chat, control, directory, eventually, http, session_chunks, words

pytestmark = pytest.mark.engine

TOOLS = [
    {"name": "read", "description": "Reads a file.", "input_schema": {"type": "object", "properties": {}}}
]


@pytest.fixture
def tag() -> str:
    return uuid.uuid4().hex[:8]


def ask(stack: Endpoints, messages: list[Message], session: str = "", path: str = "", **extra: Any) -> Any:
    body = {"model": "m16k", "max_tokens": 4, "temperature": 0, "messages": messages, **extra}
    if session:
        body["metadata"] = {"user_id": json.dumps({"device_id": "d", "session_id": session})}
    return http(f"{stack.gateway_url}/v1/messages{path}", body)


def prompt_tokens(usage: Message) -> int:
    return sum(usage[f"{kind}input_tokens"] for kind in ("", "cache_read_", "cache_creation_"))


def events(url: str, body: Message, **headers: str) -> list[Message]:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"content-type": "application/json", **headers}
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        return [json.loads(line[6:]) for line in reply if line.startswith(b"data: {")]


def test_a_messages_session_is_mapped_to_lmcaches_chunks(stack: Endpoints, tag: str) -> None:
    system = [{"type": "text", "text": words(f"{tag}s", 100), "cache_control": {"type": "ephemeral"}}]
    messages: list[Message] = [{"role": "user", "content": words(f"{tag}u", 100)}]
    first = ask(stack, messages, f"m-{tag}", system=system, tools=TOOLS)
    assert first["usage"]["cache_read_input_tokens"] == 0
    counted = ask(stack, messages, path="/count_tokens", system=system, tools=TOOLS)["input_tokens"]
    assert prompt_tokens(first["usage"]) == counted
    chunks = session_chunks(stack, f"m-{tag}")
    assert len(chunks) == counted // 256 >= 3
    eventually(lambda: all(tiers == {"l1", "l2"} for tiers in directory(stack, chunks)))
    shown = control(stack, f"/sessions/m-{tag}")
    kinds = [segment["kind"] for segment in shown["segments"] if segment["kind"] != "template"]
    assert kinds[:2] == ["system", "tools"] and "user" in kinds
    # The same conversation by the other API is known by its content and has the same KV.
    as_chat = [{"role": "system", "content": system[0]["text"]}, *messages]
    functions = [
        {"name": t["name"], "description": t["description"], "parameters": t["input_schema"]} for t in TOOLS
    ]
    same = chat(stack, as_chat, tools=[{"type": "function", "function": f} for f in functions])
    assert same["usage"]["prompt_tokens_details"]["cached_tokens"] >= 256 * len(chunks) - 64
    longer = [
        *messages,
        {"role": "assistant", "content": first["content"]},
        {"role": "user", "content": "go on"},
    ]
    second = ask(stack, longer, f"m-{tag}", system=system, tools=TOOLS)
    assert second["usage"]["cache_read_input_tokens"] >= 256 * len(chunks) - 64
    assert session_chunks(stack, f"m-{tag}")[: len(chunks)] == chunks
    assert control(stack, f"/sessions/m-{tag}")["turns"] == 3


def test_a_context_edit_is_applied_and_what_it_cleared_is_dropped(stack: Endpoints, tag: str) -> None:
    def step(number: int) -> list[Message]:
        use = f"toolu_{tag}{number:08}"
        result = {"type": "tool_result", "tool_use_id": use, "content": words(f"{tag}{number}r", 60)}
        return [
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": use, "name": "read", "input": {"n": number}}],
            },
            {"role": "user", "content": [result]},
        ]

    messages: list[Message] = [{"role": "user", "content": f"{tag} read the files"}]
    for number in range(3):
        messages += step(number)
    ask(stack, messages, f"e-{tag}", tools=TOOLS)
    before = session_chunks(stack, f"e-{tag}")
    eventually(lambda: all(tiers == {"l1", "l2"} for tiers in directory(stack, before)))
    edit = {
        "type": "clear_tool_uses_20250919",
        "trigger": {"type": "input_tokens", "value": 500},
        "keep": {"type": "tool_uses", "value": 1},
    }
    management = {"context_management": {"edits": [edit]}}
    messages += step(3)
    plain = ask(stack, messages, path="/count_tokens", tools=TOOLS)["input_tokens"]
    edited = ask(stack, messages, path="/count_tokens", tools=TOOLS, **management)
    assert edited["context_management"] == {"original_input_tokens": plain}
    body = {
        "model": "m16k",
        "max_tokens": 4,
        "messages": messages,
        "tools": TOOLS,
        "stream": True,
        **management,
    }
    stream = events(f"{stack.gateway_url}/v1/messages", body, **{"x-claude-code-session-id": f"e-{tag}"})
    (delta,) = [event for event in stream if event["type"] == "message_delta"]
    (applied,) = delta["context_management"]["applied_edits"]
    assert applied == {
        "type": "clear_tool_uses_20250919",
        "cleared_tool_uses": 3,
        "cleared_input_tokens": plain - edited["input_tokens"],
    }
    assert prompt_tokens(delta["usage"]) == edited["input_tokens"]
    now = eventually(lambda: _other(session_chunks(stack, f"e-{tag}"), before))
    dead = [chunk for chunk in before if chunk not in now]
    assert dead
    eventually(lambda: not any(directory(stack, dead)), within_s=5.0)


def _other(now: list[str], before: list[str]) -> list[str] | None:
    return now if now != before else None


def test_salts_keep_messages_apart(stack: Endpoints, tag: str) -> None:
    messages: list[Message] = [{"role": "user", "content": words(tag, 100)}]
    ask(stack, messages, f"x-{tag}", cache_salt=f"x{tag}")
    chunks = session_chunks(stack, f"x-{tag}")
    assert chunks
    eventually(lambda: all(directory(stack, chunks, f"x{tag}")))
    assert not any(directory(stack, chunks))
    other = ask(stack, messages, cache_salt=f"y{tag}")
    assert other["usage"]["cache_read_input_tokens"] == 0
    assert (
        ask(stack, messages, cache_salt=f"x{tag}")["usage"]["cache_read_input_tokens"]
        >= 256 * len(chunks) - 64
    )


def test_a_responses_session_is_mapped_too(stack: Endpoints, tag: str) -> None:
    url = f"{stack.gateway_url}/v1/responses"
    items: list[Message] = [
        {"role": "user", "content": [{"type": "input_text", "text": words(f"{tag}u", 60)}]}
    ]
    body = {"model": "m16k", "max_output_tokens": 4, "instructions": words(f"{tag}s", 60), "input": items}
    first = http(url, {**body, "session_id": f"r-{tag}"})
    chunks = session_chunks(stack, f"r-{tag}")
    assert len(chunks) == first["usage"]["input_tokens"] // 256 >= 2
    eventually(lambda: all(directory(stack, chunks)))
    items = [*items, *first["output"], {"role": "user", "content": "go on"}]
    stream = events(url, {**body, "input": items, "stream": True}, **{"x-session-id": f"r-{tag}"})
    done = stream[-1]["response"]
    assert stream[-1]["type"] == "response.completed"
    assert done["usage"]["input_tokens_details"]["cached_tokens"] >= 256 * len(chunks) - 64
    assert session_chunks(stack, f"r-{tag}")[: len(chunks)] == chunks
    assert control(stack, f"/sessions/r-{tag}")["turns"] == 2
