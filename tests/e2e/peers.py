"""What the end-to-end tests ask the real engine and the real LMCache, past kvpilot."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import psutil

from kvpilot.stack.launch import Endpoints

Message = dict[str, Any]


def http(url: str, body: Any = None, *, method: str | None = None, timeout: float = 120.0) -> Any:
    data = json.dumps(body).encode() if body is not None else None
    request = urllib.request.Request(url, data, {"content-type": "application/json"}, method=method)
    with urllib.request.urlopen(request, timeout=timeout) as reply:
        return json.load(reply)


def chat(stack: Endpoints, messages: Sequence[Message], session: str | None = None, **extra: Any) -> Any:
    body: dict[str, Any] = {"model": "m16k", "messages": list(messages), "max_tokens": 4, "temperature": 0}
    if session:
        body["agent_hint"] = {"session_id": session, "parent_session_id": session}
    return http(f"{stack.gateway_url}/v1/chat/completions", {**body, **extra})


def control(stack: Endpoints, path: str, body: Any = None, method: str | None = None) -> Any:
    return http(f"{stack.control_url}/kvpilot/v1{path}", body, method=method)


def session_chunks(stack: Endpoints, session: str) -> list[str]:
    """Hashes of the session's context, head first, once it is mapped."""
    shown = eventually(lambda: _context(stack, session))
    return [chunk["hash"] for chunk in shown["chunks"]]


def _context(stack: Endpoints, session: str) -> Any:
    try:
        shown = control(stack, f"/sessions/{session}")
    except urllib.error.HTTPError:
        return None
    settled = (
        shown["contexts"] and not shown["requests_in_flight"] and shown["contexts"][0]["segments_method"]
    )
    return shown["contexts"][0] if settled else None


def directory(stack: Endpoints, chunks: Sequence[str], salt: str = "") -> list[set[str]]:
    """Tiers of each chunk, by LMCache's own directory."""
    model, world = stack.config.engine.cache_model_name, 1
    rank = world << 24 | world << 8
    keys = [
        {
            "chunk_hash_hex": chunk,
            "model_name": model,
            "kv_rank": rank,
            "object_group_id": 0,
            "cache_salt": salt,
        }
        for chunk in chunks
    ]
    if not keys:
        return []
    found = http(f"{stack.lmcache_coordinator_url}/directory/lookup", {"keys": keys})
    return [{place["tier"] for place in row["placements"]} for row in found["results"]]


def engine_requests(stack: Endpoints) -> float:
    """How many requests vLLM has taken so far."""
    with urllib.request.urlopen(f"{stack.engine_url}/metrics", timeout=30) as reply:
        lines = reply.read().decode().splitlines()
    return sum(
        float(line.rpartition(" ")[2]) for line in lines if line.startswith("vllm:request_success_total")
    )


def eventually(ask: Callable[[], Any], within_s: float = 30.0) -> Any:
    """The first truthy answer; fails when there is none in time."""
    until = time.monotonic() + within_s
    while True:
        answer = ask()
        if answer:
            return answer
        assert time.monotonic() < until, "did not happen in time"
        time.sleep(0.1)


def alive(pids: Iterable[int]) -> set[int]:
    return {p for p in pids if psutil.pid_exists(p) and psutil.Process(p).status() != psutil.STATUS_ZOMBIE}


def words(tag: str, n: int) -> str:
    """A text of ``9 n`` tokens (whatever the tag: random letters differ in tokens) that no other tag shares."""
    return f"{tag}: " + ", ".join(f"entry {i % 97:02d} of the list stays" for i in range(n))
