"""The main job on the real engine: requests in, KV where it should be."""

from __future__ import annotations

import itertools
import json
import time
import uuid
from collections.abc import Callable

import openai
import pytest

from kvpilot.stack.launch import Endpoints
from tests.e2e.peers import (
    Message,
    chat,
    control,
    directory,
    engine_requests,
    eventually,
    http,
    session_chunks,
    words,
)

pytestmark = pytest.mark.engine


@pytest.fixture
def tag() -> str:
    return uuid.uuid4().hex[:8]


def stored(stack: Endpoints, chunks: list[str]) -> None:
    try:
        eventually(lambda: all(tiers == {"l1", "l2"} for tiers in directory(stack, chunks)))
    except AssertionError:
        raise AssertionError(f"in {directory(stack, chunks)}") from None


def manage(stack: Endpoints, session: str, edit: Message, messages: list[Message]) -> Message:
    """An openJiuwen management call; returns the first action of the answer."""
    hint = {"manage_request": True, "edits": [edit]}
    body = {
        "model": "m16k",
        "messages": messages,
        "agent_hint": {"session_id": session, "parent_session_id": session, "context_management": hint},
    }
    answer = http(f"{stack.gateway_url}/v1/chat/completions", body)
    assert answer["choices"][0]["message"]["content"] == ""
    action: Message = answer["kvpilot"]["actions"][0]
    return action


def outcome(stack: Endpoints, action_id: str) -> Message:
    found: Message = control(stack, f"/actions/{action_id}?wait=20")
    return found


def test_chunk_hashes_are_lmcaches_own_streaming_or_not(stack: Endpoints, tag: str) -> None:
    messages = [{"role": "user", "content": words(tag, 400)}]
    reply = chat(stack, messages, f"h-{tag}", kv_transfer_params={"chunk_hashes": True})
    hashes = reply["kv_transfer_params"]["chunk_hashes"]
    assert len(hashes) == (reply["usage"]["prompt_tokens"] + 3) // 256
    assert session_chunks(stack, f"h-{tag}") == hashes
    stored(stack, hashes)
    client = openai.OpenAI(base_url=f"{stack.gateway_url}/v1", api_key="-")
    with client.chat.completions.create(
        model="m16k",
        messages=messages,  # type: ignore[arg-type]
        max_tokens=4,
        temperature=0,
        stream=True,
        extra_headers={"X-Session-ID": f"s-{tag}"},
        extra_body={"kv_transfer_params": {"chunk_hashes": True}},
    ) as stream:
        parts = list(stream)
    assert "".join(part.choices[0].delta.content or "" for part in parts)
    assert parts[-1].choices[0].finish_reason
    assert (parts[-1].model_extra or {})["kv_transfer_params"] == {"chunk_hashes": hashes}
    assert session_chunks(stack, f"s-{tag}") == hashes


def test_evicting_messages_removes_exactly_what_no_live_session_holds(stack: Endpoints, tag: str) -> None:
    system = {"role": "system", "content": words(f"{tag}sys", 300)}
    ours = [system, {"role": "user", "content": words(f"{tag}a", 350)}]
    theirs = [system, {"role": "user", "content": words(f"{tag}b", 350)}]
    chat(stack, ours, f"a-{tag}")
    chat(stack, theirs, f"b-{tag}")
    a, b = session_chunks(stack, f"a-{tag}"), session_chunks(stack, f"b-{tag}")
    shared = [chunk for chunk in a if chunk in b]
    assert len(shared) >= 2 and len(a) > len(shared)
    stored(stack, a)
    stored(stack, b)
    action = manage(stack, f"a-{tag}", {"type": "evict", "target": "messages", "start": 1, "end": 2}, ours)
    assert (action["status"], action["planned"]) == ("accepted", len(a) - len(shared))
    done = outcome(stack, action["id"])
    assert (done["status"], done["confirmed"]) == ("done", len(a) - len(shared))
    for _ in range(4):
        time.sleep(1.0)
        assert [bool(tiers) for tiers in directory(stack, a)] == [chunk in shared for chunk in a]
    assert all(tiers == {"l1", "l2"} for tiers in directory(stack, b))
    assert (
        chat(stack, theirs, f"b-{tag}")["usage"]["prompt_tokens_details"]["cached_tokens"]
        >= 256 * len(b) - 64
    )


def test_a_compaction_frees_what_it_replaced_within_five_seconds(stack: Endpoints, tag: str) -> None:
    system = {"role": "system", "content": words(f"{tag}sys", 300)}
    old = [system, {"role": "user", "content": words(f"{tag}u", 400)}]
    chat(stack, old, f"c-{tag}")
    before = session_chunks(stack, f"c-{tag}")
    stored(stack, before)
    compacted = [system, {"role": "user", "content": "summary: " + words(f"{tag}s", 60)}]
    chat(stack, compacted, f"c-{tag}")
    begun = time.monotonic()
    kept = set(eventually(lambda: _after(session_chunks(stack, f"c-{tag}"), before)))
    dead = [chunk for chunk in before if chunk not in kept]
    assert dead
    eventually(lambda: not any(directory(stack, dead)), within_s=5.0)
    assert time.monotonic() - begun < 5.0
    again = [*compacted, {"role": "assistant", "content": "ok"}, {"role": "user", "content": "go on"}]
    assert chat(stack, again, f"c-{tag}")["usage"]["prompt_tokens_details"]["cached_tokens"] >= 256


def _after(now: list[str], before: list[str]) -> list[str] | None:
    return now if now != before else None


def test_a_session_wide_management_call_never_reaches_the_engine(stack: Endpoints, tag: str) -> None:
    messages: list[Message] = [{"role": "user", "content": words(tag, 600)}]
    session = f"m-{tag}"
    chat(stack, messages, session)
    chunks = session_chunks(stack, session)
    stored(stack, chunks)
    taken = engine_requests(stack)
    client = openai.OpenAI(base_url=f"{stack.gateway_url}/v1", api_key="-")

    def call(kind: str) -> Message:
        hint = {"manage_request": True, "edits": [{"type": kind, "target": "session"}]}
        answer = client.chat.completions.create(
            model="m16k",
            messages=[],
            extra_body={
                "agent_hint": {
                    "session_id": session,
                    "parent_session_id": session,
                    "context_management": hint,
                }
            },
        )
        assert answer.choices[0].message.content == ""
        action = (answer.model_extra or {})["kvpilot"]["actions"][0]
        return outcome(stack, action["id"])

    done = call("offload")
    assert (done["status"], done["confirmed"]) == ("done", len(chunks))
    eventually(lambda: all(tiers == {"l2"} for tiers in directory(stack, chunks)))
    done = call("prefetch")
    assert (done["status"], done["confirmed"]) == ("done", len(chunks))
    eventually(lambda: all(tiers == {"l1", "l2"} for tiers in directory(stack, chunks)))
    done = call("evict")
    assert (done["status"], done["confirmed"]) == ("done", len(chunks))
    assert not any(directory(stack, chunks))
    assert call("prefetch")["status"] in ("done", "missing", "clipped")
    assert engine_requests(stack) == taken


@pytest.mark.parametrize("kind", ["evict", "offload", "prefetch"])
def test_management_of_what_nobody_knows_is_answered_missing(stack: Endpoints, tag: str, kind: str) -> None:
    action = manage(stack, f"nobody-{tag}", {"type": kind, "target": "session"}, [])
    assert action["status"] == "missing"
    assert action["reason"]


def test_a_range_that_no_longer_matches_is_missing_not_guessed(stack: Endpoints, tag: str) -> None:
    messages = [{"role": "user", "content": words(tag, 400)}]
    chat(stack, messages, f"r-{tag}")
    chunks = session_chunks(stack, f"r-{tag}")
    stored(stack, chunks)
    other = [{"role": "user", "content": "something else"}]
    action = manage(stack, f"r-{tag}", {"type": "evict", "target": "messages", "start": 0, "end": 1}, other)
    assert action["status"] == "missing"
    assert all(directory(stack, chunks))


def test_segments_cover_the_context_and_name_its_parts(stack: Endpoints, tag: str) -> None:
    messages: list[Message] = [
        {"role": "system", "content": f"You are {tag}."},
        {"role": "user", "content": words(tag, 300)},
    ]
    chat(stack, messages, f"g-{tag}")
    session_chunks(stack, f"g-{tag}")
    eventually(lambda: control(stack, f"/sessions/g-{tag}")["segments"][-1]["kind"] == "assistant")
    shown = control(stack, f"/sessions/g-{tag}")
    segments = shown["segments"]
    assert [s["kind"] for s in segments] == ["system", "user", "template", "assistant"]
    assert segments[0]["start"] == 0
    assert all(a["end"] == b["start"] for a, b in itertools.pairwise(segments))
    assert segments[-1]["end"] == shown["tokens"]
    text = http(
        f"{stack.engine_url}/tokenize",
        {"model": "m16k", "messages": messages[:1], "add_generation_prompt": False},
    )
    assert segments[0]["end"] == text["count"]


def test_conversations_without_ids_are_told_apart(stack: Endpoints, tag: str) -> None:
    one: list[Message] = [{"role": "user", "content": words(f"{tag}x", 300)}]
    two: list[Message] = [{"role": "user", "content": words(f"{tag}y", 300)}]
    for _ in range(2):
        for messages in (one, two):
            reply = chat(stack, messages)
            messages += [reply["choices"][0]["message"], {"role": "user", "content": "go on"}]

    def found() -> list[Message]:
        listed = control(stack, "/sessions")["sessions"]
        return [s for s in listed if s["identified_by"] == "content" and s["turns"] == 2]

    assert len(eventually(lambda: found() if len(found()) >= 2 else None)) >= 2


def test_passive_mode_leaves_everything_in_place(stack: Endpoints, tag: str) -> None:
    messages = [{"role": "user", "content": words(tag, 400)}]
    chat(stack, messages, f"p-{tag}")
    chunks = session_chunks(stack, f"p-{tag}")
    stored(stack, chunks)
    control(stack, "/mode", {"mode": "passive"}, "PUT")
    try:
        action = manage(stack, f"p-{tag}", {"type": "evict", "target": "session"}, [])
        assert action["status"] == "rejected"
        assert all(directory(stack, chunks))
    finally:
        control(stack, "/mode", {"mode": "kvpilot"}, "PUT")


def test_tenants_get_their_own_name_space(
    stack: Endpoints, tag: str, salted: Callable[[str, str], Message]
) -> None:
    left, right = salted(f"l-{tag}", "left"), salted(f"l-{tag}", "right")
    assert left["kv_transfer_params"] == right["kv_transfer_params"]
    hashes = left["kv_transfer_params"]["chunk_hashes"]
    assert right["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    eventually(lambda: all(directory(stack, hashes, "left")) and all(directory(stack, hashes, "right")))


@pytest.fixture
def salted(stack: Endpoints) -> Callable[[str, str], Message]:
    def ask(session: str, salt: str) -> Message:
        messages = [{"role": "user", "content": words(session, 400)}]
        reply: Message = chat(
            stack, messages, session, cache_salt=salt, kv_transfer_params={"chunk_hashes": True}
        )
        return reply

    return ask


def test_the_control_api_document_lists_what_it_does(stack: Endpoints) -> None:
    document = control(stack, "/openapi.json")
    assert {"/kvpilot/v1/sessions", "/kvpilot/v1/actions", "/kvpilot/v1/mode"} <= set(document["paths"])
    assert json.dumps(document)


def test_the_memory_protocol_of_lmcache_ascend(stack: Endpoints, tag: str) -> None:
    system = {"role": "system", "content": words(f"{tag}sys", 200)}
    ours, theirs = (
        [system, {"role": "user", "content": words(f"{tag}{name}", 200)}] for name in ("ours", "theirs")
    )
    asked = chat(stack, ours, f"seed-{tag}", kv_transfer_params={"chunk_hashes": True})
    hashes = asked["kv_transfer_params"]["chunk_hashes"]
    chat(stack, theirs, f"other-{tag}")
    shared = [chunk for chunk in hashes if chunk in session_chunks(stack, f"other-{tag}")]
    own = [chunk for chunk in hashes if chunk not in shared]
    assert own and shared and session_chunks(stack, f"seed-{tag}")
    stored(stack, hashes)

    def memory(what: str, **body: object) -> Message:
        return http(f"{stack.control_url}/memory/{what}", {"chunk_hashes": hashes[::-1], **body})

    assert memory("evict", locations=["LocalCPUBackend"]) == {"status": "success", "num_evicted": len(own)}
    eventually(lambda: all(tiers == {"l2"} for tiers in directory(stack, own)))
    begun = memory("prefetch", lookup_id=tag)
    assert begun == {"status": "prefetch_started", "lookup_id": tag, "num_chunks": len(hashes)}
    eventually(lambda: http(f"{stack.control_url}/memory/prefetch/{tag}")["status"] == "completed")
    eventually(lambda: all(tiers == {"l1", "l2"} for tiers in directory(stack, hashes)))
    assert memory("evict") == {"status": "success", "num_evicted": len(own)}
    assert not any(directory(stack, own))
    assert all(directory(stack, shared))
