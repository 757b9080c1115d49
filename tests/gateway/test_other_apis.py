"""Anthropic's Messages and the Responses API through the gateway."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web

from kvpilot.domain import PromptKnown, RequestFinished, RequestStarted
from kvpilot.gateway import api_exchange
from kvpilot.gateway.edits import PLACEHOLDER
from kvpilot.gateway.other_apis import MessagesReader, ResponsesReader
from tests.gateway.conftest import Rig, StartRig
from tests.gateway.test_edits import USES, history

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
BODY: dict[str, Any] = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
USAGE = {
    "input_tokens": 38,
    "output_tokens": 7,
    "cache_creation_input_tokens": 50,
    "cache_read_input_tokens": 512,
}
CONTENT = [
    {"type": "thinking", "thinking": "hm so"},
    {"type": "text", "text": "I look."},
    {"type": "tool_use", "id": "call_1", "name": "read", "input": {"path": "a"}},
]
CHAT_REPLY = {
    "role": "assistant",
    "reasoning": "hm so",
    "content": "I look.",
    "tool_calls": [
        {"id": "call_1", "type": "function", "function": {"name": "read", "arguments": '{"path": "a"}'}}
    ],
}


def event(**fields: Any) -> bytes:
    return f"event: {fields['type']}\ndata: {json.dumps(fields, separators=(',', ':'))}\n\n".encode()


def message_events() -> list[bytes]:
    """As vLLM 0.32 writes them: what was cached is said at the end."""
    start = {
        "id": "x",
        "type": "message",
        "role": "assistant",
        "content": [],
        "model": "m",
        "stop_reason": None,
    }
    events = [
        event(type="message_start", message={**start, "usage": {"input_tokens": 600, "output_tokens": 0}})
    ]
    blocks: list[tuple[dict[str, Any], list[dict[str, str]]]] = [
        (
            {"type": "thinking", "thinking": ""},
            [{"type": "thinking_delta", "thinking": t} for t in ("hm", " so")],
        ),
        ({"type": "text", "text": ""}, [{"type": "text_delta", "text": t} for t in ("I ", "look.")]),
        (
            {**CONTENT[2], "input": {}},
            [{"type": "input_json_delta", "partial_json": t} for t in ('{"pa', 'th":"a"}')],
        ),
    ]
    for index, (block, deltas) in enumerate(blocks):
        events.append(event(type="content_block_start", index=index, content_block=block))
        events += [event(type="content_block_delta", index=index, delta=delta) for delta in deltas]
        events.append(event(type="content_block_stop", index=index))
    stop = {"stop_reason": "tool_use", "stop_sequence": None}
    return [*events, event(type="message_delta", delta=stop, usage=USAGE), event(type="message_stop")]


class AnthropicEngine:
    """vLLM's endpoint, with words for tokens."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.delay = 0.0
        self.counts = True
        rig.engine.handler = self.answer

    async def answer(self, request: web.Request) -> web.StreamResponse:
        url, _, raw = self.rig.engine.requests[-1]
        body = json.loads(raw)
        if url.endswith("/count_tokens"):
            number = len(json.dumps(body["messages"]).split())
            own = {"original_input_tokens": number}
            if not self.counts:
                return web.json_response({"error": "no"}, status=404)
            return web.json_response({"input_tokens": number, "context_management": own})
        if not body.get("stream"):
            reply = {"id": "x", "type": "message", "role": "assistant", "content": CONTENT, "model": "m"}
            return web.json_response({**reply, "stop_reason": "tool_use", "usage": USAGE})
        response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        for part in message_events():
            await response.write(part)
            await asyncio.sleep(self.delay)
        return response


async def only_counts(request: web.Request) -> web.Response:
    """An engine that knows nothing of edits."""
    return web.json_response({"input_tokens": 7})


@pytest.mark.parametrize("stream", [False, True])
async def test_the_story_of_a_messages_request(rig: Rig, stream: bool) -> None:
    AnthropicEngine(rig)
    body = {
        **BODY,
        "stream": stream,
        "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
    }
    raw = json.dumps(body).encode()
    headers = {"X_Claude_Code_Session_Id": "main", "X_Claude_Code_Agent_Id": "sub"}
    status, got, text = await rig.post(MESSAGES, raw, **headers)
    async with rig.client.post(rig.config.engine.url + MESSAGES, data=raw) as direct:
        assert (status, text) == (direct.status, await direct.read())
    assert got["x-kvpilot-session"] == "sub"
    assert rig.engine.requests[0][2] == raw
    assert rig.coordinator
    (started,) = await rig.coordinator.until(RequestStarted)
    (finished,) = await rig.coordinator.until(RequestFinished)
    assert (started.path, started.body) == (MESSAGES, raw)
    assert (started.session.id, started.session.parent) == ("sub", "main")
    assert started.retention.ttl_s == 300
    assert (finished.status, finished.finish_reason, finished.aborted) == (200, "tool_use", False)
    assert json.loads(finished.message) == CHAT_REPLY
    counts = finished.prompt_token_count, finished.cached_token_count, finished.completion_token_count
    assert counts == (600, 512, 7)
    assert (finished.prompt_ids, finished.output_ids) == (b"", b"")
    assert bool(finished.first_token_at) == stream


async def test_of_a_long_stream_the_prompts_length_is_told_before_its_end(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api_exchange, "LONG_REPLY_S", 0.05)
    AnthropicEngine(rig).delay = 0.03
    await rig.post(MESSAGES, {**BODY, "stream": True})
    assert rig.coordinator
    (prompt,) = await rig.coordinator.until(PromptKnown)
    (finished,) = await rig.coordinator.until(RequestFinished)
    assert (prompt.request_id, prompt.prompt_token_count) == (finished.request_id, 600)
    assert prompt.at < finished.at


@pytest.mark.parametrize("size", [1, 7, 100_000])
def test_events_may_arrive_cut_anywhere(size: int) -> None:
    whole = b"".join(message_events())
    reader = MessagesReader(b'{"applied_edits":[]}')
    out = b"".join(reader.feed(whole[i : i + size]) for i in range(0, len(whole), size)) + reader.close()
    reader.finish()
    assert json.loads(reader.facts.message) == CHAT_REPLY
    added = b',"context_management":{"applied_edits":[]}'
    assert out.replace(added, b"") == whole
    assert out.count(added) == 1


def deep(levels: int) -> str:
    return '{"a":' * levels + "1" + "}" * levels


@pytest.mark.parametrize("levels", [900, 1200, 50_000])
async def test_a_deeply_nested_tool_input_harms_nobody(
    rig: Rig, caplog: pytest.LogCaptureFixture, levels: int
) -> None:
    delta = {"type": "input_json_delta", "partial_json": deep(levels)}
    parts = message_events()
    parts[-4] = event(type="content_block_delta", index=2, delta=delta)
    del parts[-5]

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"".join(parts))
        return response

    rig.engine.handler = answer
    status, _, text = await rig.post(MESSAGES, {**BODY, "stream": True})
    assert (status, text) == (200, b"".join(parts))
    assert rig.coordinator
    (finished,) = await rig.coordinator.until(RequestFinished)
    assert (finished.aborted, finished.prompt_token_count) == (False, 600)
    if levels > 1000:
        function = json.loads(finished.message)["tool_calls"][0]["function"]
        assert function == {"name": "read", "arguments": "{}"}
    assert not caplog.records


@pytest.mark.parametrize("levels", [900, 1200, 50_000])
def test_a_whole_reply_may_be_as_deep(levels: int) -> None:
    use = f'{{"type":"tool_use","id":"t","name":"n","input":{deep(levels)}}}'
    text = f'{{"content":[{use}],"usage":{{"input_tokens":5}}}}'.encode()
    assert MessagesReader().whole(text) == text


async def test_a_reader_that_fails_fails_no_request(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("boom")

    AnthropicEngine(rig)
    monkeypatch.setattr(MessagesReader, "_say", broken)
    status, _, text = await rig.post(MESSAGES, {**BODY, "stream": True})
    assert (status, text) == (200, b"".join(message_events()))
    assert rig.coordinator
    (finished,) = await rig.coordinator.until(RequestFinished)
    assert (finished.aborted, finished.message, finished.prompt_token_count) == (False, b"", 600)
    assert "its reply could not be read" in caplog.text


NAMED_INSIDE = b'{"content":[{"type":"tool_use","id":"t","name":"n","input":{"context_management":{}}}]}'


@pytest.mark.parametrize("text", [b"{}", b" { } ", b'{"a":{}}', b'{"content":[]}\n', NAMED_INSIDE])
def test_a_reply_with_edits_reported_stays_json(text: bytes) -> None:
    reply = json.loads(MessagesReader(b'{"applied_edits":[]}').whole(text))
    assert reply == {**json.loads(text), "context_management": {"applied_edits": []}}


def test_an_engines_own_report_is_left_alone() -> None:
    text = b'{"content":[],"context_management":null}'
    assert MessagesReader(b'{"applied_edits":[]}').whole(text) == text


@pytest.mark.parametrize("stream", [False, True])
async def test_edits_are_applied_before_the_engine_sees_the_request(rig: Rig, stream: bool) -> None:
    AnthropicEngine(rig)
    trigger = {"type": "input_tokens", "value": 3000}
    body = {**BODY, "messages": history(5), "stream": stream}
    body["context_management"] = {"edits": [{"type": USES, "trigger": trigger}]}
    _, _, text = await rig.post(MESSAGES, body)
    *counted, (_, _, sent) = rig.engine.requests
    assert [url for url, _, _ in counted] == [f"{MESSAGES}/count_tokens"] * 2
    assert all(headers["accept-encoding"] == "identity" for _, headers, _ in counted)
    forwarded = json.loads(sent)
    assert forwarded["messages"][2]["content"][0]["content"] == PLACEHOLDER
    assert "context_management" not in forwarded
    if stream:
        lines = [
            line for line in text.splitlines() if b'"message_delta"' in line and line.startswith(b"data:")
        ]
        (reply,) = [json.loads(line[5:]) for line in lines]
    else:
        reply = json.loads(text)
    (done,) = reply["context_management"]["applied_edits"]
    assert (done["type"], done["cleared_tool_uses"]) == (USES, 2)
    assert done["cleared_input_tokens"] > 1900
    assert rig.coordinator
    (started,) = await rig.coordinator.until(RequestStarted)
    assert json.loads(started.body)["messages"] == forwarded["messages"]


async def test_edits_that_do_not_apply_are_reported_as_none(rig: Rig) -> None:
    engine = AnthropicEngine(rig)
    trigger = {"type": "tool_uses", "value": 1}
    body = {
        **BODY,
        "messages": history(5),
        "context_management": {"edits": [{"type": USES, "trigger": trigger}]},
    }
    engine.counts = False
    status, _, text = await rig.post(MESSAGES, body)
    assert (status, json.loads(text)["context_management"]) == (200, {"applied_edits": []})
    assert json.loads(rig.engine.requests[-1][2])["messages"] == history(5)


async def test_an_engine_that_does_not_count_is_told_of_once(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    AnthropicEngine(rig).counts = False
    edits = [{"type": USES, "trigger": {"type": "tool_uses", "value": 1}}]
    body = {**BODY, "messages": history(5), "context_management": {"edits": edits}}
    for _ in range(3):
        await rig.post(MESSAGES, body)
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "context edits were not applied"
    ]


@pytest.mark.parametrize("edits", [[], [{"type": USES, "trigger": {"type": "tool_uses", "value": 1}}]])
async def test_the_question_for_chunk_hashes_does_not_reach_the_engine(rig: Rig, edits: list[Any]) -> None:
    AnthropicEngine(rig)
    body = {**BODY, "messages": history(5), "context_management": {"edits": edits}}
    await rig.post(MESSAGES, {**body, "kv_transfer_params": {"chunk_hashes": True}})
    assert not any(b"chunk_hashes" in raw for _, _, raw in rig.engine.requests)


async def test_tokens_are_counted_as_they_would_be_after_the_edits(rig: Rig) -> None:
    AnthropicEngine(rig)
    count = f"{MESSAGES}/count_tokens"
    plain = {"model": "m", "messages": history(5)}
    _, _, text = await rig.post(count, plain)
    before = json.loads(text)
    assert before["context_management"]["original_input_tokens"] == before["input_tokens"]
    trigger = {"type": "tool_uses", "value": 1}
    _, _, text = await rig.post(
        count, {**plain, "context_management": {"edits": [{"type": USES, "trigger": trigger}]}}
    )
    after = json.loads(text)
    assert after["context_management"] == {"original_input_tokens": before["input_tokens"]}
    assert after["input_tokens"] < before["input_tokens"] - 1900
    for below in ({"type": USES}, {"type": USES, "trigger": {"type": "tool_uses", "value": 5}}):
        rig.engine.handler = only_counts
        _, _, text = await rig.post(count, {**plain, "context_management": {"edits": [below]}})
        assert json.loads(text) == {
            "input_tokens": 7,
            "context_management": {"original_input_tokens": 7},
        }
    assert rig.coordinator
    assert not rig.coordinator.events


@pytest.mark.parametrize("edits", [False, True])
async def test_anthropics_key_header_names_the_tenant_whose_salt_the_request_gets(
    start: StartRig, edits: bool
) -> None:
    rig = await start(tenants={"key-a": "team/a", "key-b": "b"})
    AnthropicEngine(rig)
    body = {**BODY, "messages": history(5), "cache_salt": "mine"}
    if edits:
        trigger = {"type": "tool_uses", "value": 1}
        body["context_management"] = {"edits": [{"type": USES, "trigger": trigger}]}
    for key in ("key-a", "key-b"):
        status, _, _ = await rig.post(MESSAGES, body, X_Api_Key=key)
        assert status == 200
    salts = [json.loads(raw)["cache_salt"] for url, _, raw in rig.engine.requests if url == MESSAGES]
    assert salts == ["team%2Fa:mine", "b:mine"]
    assert not any("x-api-key" in headers for _, headers, _ in rig.engine.requests)
    assert rig.coordinator
    assert [event.salt for event in await rig.coordinator.until(RequestStarted, 2)] == salts


@pytest.mark.parametrize(
    "headers", [{}, {"X_Api_Key": "nobody"}, {"Authorization": "Bearer no", "X_Api_Key": "key-a"}]
)
async def test_errors_of_the_gateway_are_anthropics_there(start: StartRig, headers: dict[str, str]) -> None:
    rig = await start(tenants={"key-a": "a"})
    status, _, text = await rig.post(MESSAGES, BODY, **headers)
    assert status == 401
    error = {"type": "authentication_error", "message": "unknown or missing API key"}
    assert json.loads(text) == {"type": "error", "error": error}
    assert not rig.engine.requests


async def test_an_engine_that_is_away_is_anthropics_api_error(start: StartRig) -> None:
    rig = await start(engine_url="http://127.0.0.1:9")
    for path in (MESSAGES, f"{MESSAGES}/count_tokens"):
        status, _, text = await rig.post(path, BODY)
        reply = json.loads(text)
        assert (status, reply["type"], reply["error"]["type"]) == (502, "error", "api_error")


@pytest.mark.parametrize("path", [MESSAGES, f"{MESSAGES}/count_tokens"])
@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, "invalid_request_error"), (404, "not_found_error"), (429, "rate_limit_error"), (500, "api_error")],
)
async def test_errors_of_the_engine_are_anthropics_there(rig: Rig, path: str, status: int, kind: str) -> None:
    for said in (  # vLLM's own errors on this API, and those of whatever stands before it
        {"type": "error", "error": {"type": "BadRequestError", "message": "no \u00e9"}},
        {"error": {"message": "no \u00e9", "type": "Bad Request", "param": None, "code": status}},
    ):

        async def refuse(request: web.Request, said: Any = said) -> web.Response:
            return web.json_response(said, status=status, headers={"retry-after": "7"})

        rig.engine.handler = refuse
        got, headers, text = await rig.post(path, BODY)
        assert (got, headers["retry-after"]) == (status, "7")
        assert json.loads(text) == {"type": "error", "error": {"type": kind, "message": "no \u00e9"}}


async def test_a_stream_that_the_engine_breaks_off_ends_with_anthropics_error(rig: Rig) -> None:
    async def break_off(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for part in message_events()[:3]:
            await response.write(part)
        await response.write(b"event: content_block_delta\ndata: {")
        assert request.transport is not None
        request.transport.close()
        return response

    rig.engine.handler = break_off
    status, _, text = await rig.post(MESSAGES, {**BODY, "stream": True})
    *_, last = text.removesuffix(b"\n\n").split(b"\n\n")
    name, data = last.split(b"\n")
    assert (status, name) == (200, b"event: error")
    error = json.loads(data.removeprefix(b"data: "))
    assert (error["type"], error["error"]["type"]) == ("error", "api_error")
    assert rig.coordinator
    (finished,) = await rig.coordinator.until(RequestFinished)
    assert finished.aborted


async def test_what_the_engine_refuses_is_relayed(rig: Rig) -> None:
    async def refuse(request: web.Request) -> web.Response:
        return web.Response(text="not in JSON", status=400)

    rig.engine.handler = refuse
    status, _, text = await rig.post(MESSAGES, BODY)
    assert (status, text) == (400, b"not in JSON")
    assert rig.coordinator
    (finished,) = await rig.coordinator.until(RequestFinished)
    assert (finished.status, finished.prompt_token_count) == (400, 0)


RESPONSE = {
    "id": "resp_1",
    "object": "response",
    "status": "completed",
    "output": [
        {
            "type": "reasoning",
            "id": "rs",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "hm so"}],
        },
        {
            "type": "message",
            "id": "m",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "I look."}],
        },
        {
            "type": "function_call",
            "id": "f",
            "call_id": "call_1",
            "name": "read",
            "arguments": '{"path": "a"}',
        },
    ],
    "usage": {"input_tokens": 600, "input_tokens_details": {"cached_tokens": 512}, "output_tokens": 7},
}


@pytest.mark.parametrize("stream", [False, True])
async def test_the_story_of_a_responses_request(rig: Rig, stream: bool) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        if not stream:
            return web.json_response(RESPONSE)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        begun = {**RESPONSE, "status": "in_progress", "output": [], "usage": None}
        await response.write(event(type="response.created", response=begun))
        await response.write(event(type="response.output_text.delta", delta="I look."))
        await response.write(event(type="response.completed", response=RESPONSE))
        return response

    rig.engine.handler = answer
    raw = json.dumps(
        {"model": "m", "input": "hi", "stream": stream, "prompt_cache_retention": "24h"}
    ).encode()
    _, headers, text = await rig.post(RESPONSES, raw, X_Session_ID="s1")
    assert rig.engine.requests[0][2] == raw
    assert headers["x-kvpilot-session"] == "s1"
    assert b"I look." in text
    assert rig.coordinator
    (started,) = await rig.coordinator.until(RequestStarted)
    (finished,) = await rig.coordinator.until(RequestFinished)
    assert (started.path, started.session.id, started.retention.ttl_s) == (RESPONSES, "s1", 86_400)
    assert json.loads(finished.message) == CHAT_REPLY
    assert (finished.prompt_token_count, finished.cached_token_count) == (600, 512)
    assert (finished.finish_reason, bool(finished.first_token_at)) == ("completed", stream)


def test_a_response_that_broke_off_says_nothing() -> None:
    reader = ResponsesReader()
    part = event(type="response.output_text.delta", delta="I l")
    assert reader.feed(part[:9]) + reader.feed(part[9:]) + reader.close() == part
    reader.finish()
    assert (reader.has_output, reader.facts.message, reader.facts.usage) == (True, b"", None)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
async def test_a_management_request_is_answered_in_the_apis_own_shape(
    rig: Rig, path: str, stream: bool
) -> None:
    edits = [{"type": "offload", "target": "session"}]
    hint = {"session_id": "s1", "context_management": {"manage_request": True, "edits": edits}}
    status, _, text = await rig.post(path, {"model": "m", "stream": stream, "agent_hint": hint})
    assert status == 200
    last = text.strip().rpartition(b"data: ")[2] if stream else text
    assert json.loads(last)
    assert (b"message_stop" if path == MESSAGES else b"response.completed") in text or not stream
    assert b'"actions":[{"id":"a-0"' in text
    assert not rig.engine.requests
