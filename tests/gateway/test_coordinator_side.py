"""What the coordinator is told, what it is asked, and that nobody waits for it."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest
from openai import AsyncOpenAI

from kvpilot.domain import (
    ActionKind,
    PromptKnown,
    RequestFinished,
    RequestStarted,
    Retention,
    SessionRef,
    Signal,
    SignalKind,
)
from kvpilot.gateway import exchange
from tests.gateway.conftest import OUTPUT_IDS, PROMPT_IDS, FakeCoordinator, Rig, StartRig

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
OFFLOAD = {
    "model": "m",
    "messages": [],
    "agent_hint": {
        "session_id": "s1",
        "parent_session_id": "s0",
        "context_management": {"manage_request": True, "edits": [{"type": "offload", "target": "session"}]},
    },
}


@pytest.mark.parametrize("stream", [False, True])
async def test_the_story_of_a_request(rig: Rig, stream: bool) -> None:
    raw = json.dumps({**BODY, "stream": stream, "agent_hint": {"session_id": "s", "parent_session_id": "p"}})
    before = time.time()
    await rig.post(CHAT, raw.encode())
    assert rig.coordinator
    (started,) = await rig.coordinator.until(RequestStarted)
    (finished,) = await rig.coordinator.until(RequestFinished)
    assert started.body == raw.encode()
    assert (started.session, started.tenant, started.salt) == (
        SessionRef("s", "p", "agent_hint"),
        "default",
        "",
    )
    assert started.request_id == finished.request_id
    assert json.loads(finished.prompt_ids) == PROMPT_IDS
    assert json.loads(finished.output_ids) == ([7, 99, 8, 9] if stream else OUTPUT_IDS)
    assert json.loads(finished.message) == {"role": "assistant", "content": "Hello there!"}
    assert (finished.status, finished.finish_reason, finished.aborted) == (200, "stop", False)
    assert (finished.prompt_token_count, finished.cached_token_count) == (600, 512)
    if stream:
        assert before <= finished.first_token_at <= finished.at


async def test_the_prompt_of_a_long_stream_is_told_before_its_end(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "LONG_REPLY_S", 0.1)
    rig.engine.chunk_delay = 0.08
    await rig.post(CHAT, {**BODY, "stream": True})
    assert rig.coordinator
    (prompt,) = await rig.coordinator.until(PromptKnown)
    (finished,) = await rig.coordinator.until(RequestFinished)
    assert json.loads(prompt.prompt_ids) == PROMPT_IDS
    assert finished.prompt_ids == b""
    assert prompt.at < finished.at
    assert json.loads(finished.output_ids) == [7, 99, 8, 9]


async def test_a_management_request_is_answered_here_and_quickly(rig: Rig) -> None:
    client = AsyncOpenAI(base_url=rig.url + "/v1", api_key="k", max_retries=0)
    body = dict(OFFLOAD)
    hint = body.pop("agent_hint")
    limit = took = 0.05
    for _ in range(50):  # Once is enough: whatever else the machine does is not what is measured.
        began = time.perf_counter()
        raw = await client.chat.completions.with_raw_response.create(**body, extra_body={"agent_hint": hint})  # type: ignore[call-overload]
        took = time.perf_counter() - began
        if took < limit:
            break
    await client.close()
    reply = raw.parse()
    assert reply.choices[0].message.content == ""
    assert reply.choices[0].finish_reason == "stop"
    assert reply.model_extra["kvpilot"]["actions"] == [
        {"id": "a-0", "kind": "demote", "status": "accepted", "planned": 2, "reason": ""}
    ]
    assert raw.headers["x-kvpilot-actions"] == "a-0"
    assert raw.headers["x-kvpilot-session"] == "s1"
    assert took < limit
    assert not rig.engine.requests
    assert rig.coordinator
    (command,) = rig.coordinator.batches[0].commands
    assert (command.kind, command.session) == (ActionKind.DEMOTE, SessionRef("s1", "s0", "agent_hint"))


@pytest.mark.parametrize("away", [True, False])
async def test_a_management_request_without_a_coordinator_is_answered_too(
    start: StartRig, away: bool
) -> None:
    rig = await start(coordinator=not away, gateway={"command_timeout_s": 0.2})
    if rig.coordinator:
        rig.coordinator.silent = True
    began = time.perf_counter()
    status, headers, text = await rig.post(CHAT, OFFLOAD)
    assert time.perf_counter() - began < 0.5
    reply = json.loads(text)
    assert (status, reply["object"], reply["kvpilot"]["actions"]) == (200, "chat.completion", [])
    assert "coordinator" in reply["kvpilot"]["reason"]
    assert "x-kvpilot-actions" not in headers
    assert not rig.engine.requests


async def test_a_streamed_management_request_is_a_stream(rig: Rig) -> None:
    _, headers, text = await rig.post(CHAT, {**OFFLOAD, "stream": True})
    assert headers["content-type"] == "text/event-stream"
    first, done = text.removesuffix(b"\n\n").split(b"\n\n")
    assert done == b"data: [DONE]"
    assert json.loads(first.removeprefix(b"data: "))["choices"][0]["delta"]["content"] == ""


async def test_an_edit_beside_a_request_is_carried_out_and_the_request_too(rig: Rig) -> None:
    hint = json.loads(json.dumps(OFFLOAD["agent_hint"]))
    hint["context_management"]["manage_request"] = False
    rig.engine.delay = 0.1
    _, headers, text = await rig.post(CHAT, {**BODY, "agent_hint": hint})
    assert json.loads(text)["choices"][0]["message"]["content"] == "Hello there!"
    assert headers["x-kvpilot-actions"] == "a-0"


async def test_session_control_is_a_signal_and_an_action(rig: Rig) -> None:
    hint = {"session_id": "s1", "parent_session_id": "s1", "session_control": {"type": "stop"}}
    await rig.post(CHAT, {"model": "m", "messages": [], "agent_hint": hint})
    assert rig.coordinator
    (signal,) = await rig.coordinator.until(Signal)
    assert (signal.kind, signal.session.id) == (SignalKind.END, "s1")
    assert rig.coordinator.batches[0].commands[0].kind is ActionKind.EVICT


async def test_events_are_bounded_and_counted_when_the_coordinator_is_away(start: StartRig) -> None:
    rig = await start(coordinator=False, gateway={"event_queue": 4})
    for _ in range(5):
        assert (await rig.post(CHAT, BODY))[0] == 200
    link = rig.gateway.link
    assert (link.queued, link.sent) == (4, 0)
    assert link.shed == 10 - 4


async def test_a_coordinator_that_comes_late_gets_what_was_kept(start: StartRig) -> None:
    rig = await start(coordinator=False)
    await rig.post(CHAT, BODY)
    late = FakeCoordinator(rig.config)
    try:
        assert len(await late.until(RequestStarted)) == 1
        await late.until(RequestFinished)
        await asyncio.sleep(0)
        assert rig.gateway.link.queued == 0
    finally:
        await late.stop()


async def test_the_end_of_a_session_is_told_after_its_last_request(rig: Rig) -> None:
    await rig.post(CHAT, BODY, **{"x-dynamo-session-id": "d", "x-dynamo-session-final": "true"})
    assert rig.coordinator
    (signal,) = await rig.coordinator.until(Signal)
    (finished,) = await rig.coordinator.until(RequestFinished)
    assert (signal.kind, signal.session.id) == (SignalKind.END, "d")
    kinds = [type(event) for event in rig.coordinator.events]
    assert kinds.index(RequestStarted) < kinds.index(RequestFinished) < kinds.index(Signal)
    assert signal.at >= finished.at


async def test_a_wish_to_keep_a_context_travels_with_its_request(rig: Rig) -> None:
    await rig.post(CHAT, {**BODY, "cache_control": {"type": "ephemeral", "ttl": "1h"}})
    assert rig.coordinator
    (started,) = await rig.coordinator.until(RequestStarted)
    assert started.retention == Retention(ttl_s=3600.0)


async def test_a_wish_without_a_request_is_a_signal(rig: Rig) -> None:
    action = {"action_type": "kv.retain", "payload": {"ttl": 60}}
    envelope = {"protocol_version": "0.1", "actions": [action]}
    status, _, _ = await rig.post(CHAT, {"messages": [], "kv_hints": envelope}, **{"x-session-id": "h"})
    assert rig.coordinator
    (signal,) = await rig.coordinator.until(Signal)
    assert (status, signal.kind, signal.retention) == (200, SignalKind.RETAIN, Retention(ttl_s=60.0))
    assert not rig.engine.requests


@pytest.mark.parametrize("messages", [{"messages": []}, {}])
async def test_hints_of_which_nothing_was_understood_are_answered_with_the_reasons(
    rig: Rig, messages: dict[str, Any]
) -> None:
    envelope = {"protocol_version": "0.1", "actions": [{"action_type": "kv.teleport"}]}
    status, _, text = await rig.post(CHAT, {"model": "m", **messages, "kv_hints": envelope})
    reply = json.loads(text)
    assert (status, reply["kvpilot"]["actions"]) == (200, [])
    assert "action_type is not known" in reply["kvpilot"]["reason"]
    assert not rig.engine.requests


async def test_a_management_request_with_broken_edits_does_not_have_its_old_messages_answered(
    rig: Rig,
) -> None:
    hint = {"session_id": "s1", "context_management": {"manage_request": True, "edits": "x"}}
    status, _, text = await rig.post(CHAT, {**BODY, "agent_hint": hint})
    assert (status, "not a list" in json.loads(text)["kvpilot"]["reason"]) == (200, True)
    assert not rig.engine.requests


async def test_what_cannot_be_done_is_said(rig: Rig) -> None:
    action = {"action_type": "kv.retain", "payload": {"chunk_hashes": ["ab"]}}
    body = {"messages": [], "kv_hints": {"protocol_version": "0.1", "actions": [action]}}
    prefetch = {"session_id": "s1", "action": "prefetch"}
    _, _, text = await rig.post(CHAT, {**body, "agent_hint": prefetch})
    assert "rejected: not supported yet" in json.loads(text)["kvpilot"]["reason"]
