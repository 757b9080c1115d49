"""What a client sees through the gateway is what it would see without it."""

from __future__ import annotations

import asyncio
import gzip
import json

import aiohttp
import numpy as np
import pytest
from aiohttp import web
from openai import AsyncOpenAI
from yarl import URL

from kvpilot.context.chunks import ChunkHasher
from kvpilot.domain import RequestStarted
from tests.gateway.conftest import PROMPT_IDS, Rig, StartRig, stream_events

CHAT = "/v1/chat/completions"
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "unknown_field": {"kept": [1.50, "é"]}}


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"stream": True},
        {"stream": True, "stream_options": {"include_usage": True}},
        {"stream": True, "stream_options": {"include_usage": False, "other": 1}},
        {"return_token_ids": True},
        {"return_token_ids": True, "stream": True},
        {"return_token_ids": True, "stream": True, "stream_options": {"include_usage": True}},
        {"n": 2, "stream": True},
    ],
)
async def test_replies_are_the_same_with_and_without_the_gateway(rig: Rig, extra: dict[str, object]) -> None:
    body = {**BODY, **extra}
    async with rig.client.post(rig.config.engine.url + CHAT, json=body) as direct:
        expected = direct.status, direct.content_type, await direct.read()
    status, headers, text = await rig.post(CHAT, body)
    assert (status, headers["content-type"], text) == expected


async def test_unknown_fields_and_headers_reach_the_engine_and_the_questions_are_added(rig: Rig) -> None:
    raw = b'{ "model":"m", "messages" : [], "x": 1.50e1, "stream":true, "stream_options":{"other":1} }'
    await rig.post(CHAT, raw, X_Mine="1", Connection="keep-alive, X-Hop", X_Hop="2", Authorization="Bearer k")
    _, headers, body = rig.engine.requests[0]
    assert b'"x":1.50e1' in body
    sent = json.loads(body)
    assert sent["return_token_ids"] is True
    assert sent["stream_options"] == {"other": 1, "include_usage": True}
    assert headers["x-mine"] == "1"
    assert headers["authorization"] == "Bearer k"
    assert "x-hop" not in headers
    assert headers["host"] == rig.config.engine.url.removeprefix("http://")


async def test_the_session_travels_to_the_engine_and_back(rig: Rig) -> None:
    hint = {"agent_hint": {"session_id": "s é", "parent_session_id": "p"}}
    _, headers, _ = await rig.post(CHAT, {**BODY, **hint}, X_Session_ID="other")
    assert headers["x-kvpilot-session"] == "s %C3%A9"
    assert rig.engine.requests[0][1]["x-session-id"] == "s %C3%A9"
    assert rig.engine.bodies[0]["agent_hint"] == hint["agent_hint"]
    _, headers, _ = await rig.post(CHAT, BODY)
    assert "x-kvpilot-session" not in headers


@pytest.mark.parametrize("status", [400, 404, 429, 500, 503])
async def test_errors_of_the_engine_are_relayed_unchanged(rig: Rig, status: int) -> None:
    async def fail(request: web.Request) -> web.Response:
        return web.Response(
            status=status, text='{"error": "as is"}', headers={"retry-after": "7", "x-e": "1"}
        )

    rig.engine.handler = fail
    got, headers, text = await rig.post(CHAT, BODY)
    assert (got, text, headers["retry-after"], headers["x-e"]) == (status, b'{"error": "as is"}', "7", "1")


async def test_invalid_json_is_the_engines_business(rig: Rig) -> None:
    async def fail(request: web.Request) -> web.Response:
        return web.Response(status=400, text="bad json")

    rig.engine.handler = fail
    status, _, text = await rig.post(CHAT, b'{"model": ')
    assert (status, text, rig.engine.requests[0][2]) == (400, b"bad json", b'{"model": ')


async def test_an_engine_that_refuses_the_questions_is_not_asked_again(rig: Rig) -> None:
    async def strict(request: web.Request) -> web.StreamResponse:
        if "return_token_ids" in rig.engine.bodies[-1]:
            return web.Response(status=400, text='{"error":"unknown field return_token_ids"}')
        return await rig.engine.answer(request)

    rig.engine.handler = strict
    for _ in range(2):
        status, _, text = await rig.post(CHAT, BODY)
        assert (status, json.loads(text)["choices"][0]["finish_reason"]) == (200, "stop")
    assert ["return_token_ids" in body for body in rig.engine.bodies] == [True, False, False]


async def test_an_error_does_not_show_what_the_gateway_added(rig: Rig) -> None:
    async def echo(request: web.Request) -> web.Response:
        return web.Response(status=400, text="wrong input: " + rig.engine.requests[-1][2].decode())

    rig.engine.handler = echo
    _, _, text = await rig.post(CHAT, {**BODY, "stream": True})
    assert b"return_token_ids" not in text
    assert b"include_usage" not in text
    rig.engine.handler = rig.engine.answer
    await rig.post(CHAT, BODY)
    assert rig.engine.bodies[-1]["return_token_ids"] is True


async def test_compressed_replies_pass_untouched(rig: Rig) -> None:
    packed = gzip.compress(b'{"choices":[]}')

    async def zipped(request: web.Request) -> web.Response:
        return web.Response(
            body=packed, headers={"content-encoding": "gzip", "content-type": "application/json"}
        )

    rig.engine.handler = zipped
    client = aiohttp.ClientSession(auto_decompress=False)
    async with client, client.post(rig.url + CHAT, json=BODY) as reply:
        assert (await reply.read(), reply.headers["content-encoding"]) == (packed, "gzip")


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH"])
async def test_everything_else_under_v1_passes_through(rig: Rig, method: str) -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(status=207, text=f"{request.method} {request.rel_url}", headers={"x-e": "1"})

    rig.engine.handler = handler
    async with rig.client.request(
        method, rig.url + "/v1/some/thing%20x?a=b%26c&d", data=b"x" * 100_000
    ) as reply:
        assert (reply.status, reply.headers["x-e"]) == (207, "1")
        if method != "HEAD":
            assert await reply.text() == f"{method} /v1/some/thing%20x?a=b%26c&d"
    assert rig.engine.requests[0][2] == b"x" * 100_000


async def test_a_body_of_unknown_length_is_streamed_on(rig: Rig) -> None:
    async def parts() -> object:
        for _ in range(10):
            yield b"y" * 1000
            await asyncio.sleep(0)

    async def handler(request: web.Request) -> web.Response:
        return web.Response(text=request.headers.get("transfer-encoding", "none"))

    rig.engine.handler = handler
    async with rig.client.put(rig.url + "/v1/files", data=parts()) as reply:
        assert await reply.text() == "chunked"
    assert rig.engine.requests[0][2] == b"y" * 10_000


@pytest.mark.parametrize(
    "path", ["/", "/metrics2", "/tokenize", "/v1/../reset_prefix_cache", "/v1/%2e%2e/x", "/v12"]
)
async def test_nothing_outside_v1_is_reachable(rig: Rig, path: str) -> None:
    async with rig.client.post(URL(rig.url + path, encoded=True), data=b"{}") as reply:
        assert reply.status == 404
        assert (await reply.json())["error"]["type"] == "not_found_error"
    assert not rig.engine.requests


async def test_the_first_chunk_is_not_held_back(rig: Rig) -> None:
    rig.engine.chunk_delay = 5
    async with rig.client.post(rig.url + CHAT, json={**BODY, "stream": True}) as reply:
        async with asyncio.timeout(4):
            first = await reply.content.readuntil(b"\n\n")
    assert first == stream_events({})[0]


async def test_chunks_that_come_close_together_do_not_wait_for_the_end(rig: Rig) -> None:
    chunks = [b": %d\n\n" % number for number in range(100)]

    async def then_silent(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for chunk in chunks:
            await response.write(chunk)
        await asyncio.sleep(30)
        return response

    rig.engine.handler = then_silent
    async with rig.client.post(rig.url + CHAT, json={**BODY, "stream": True}) as reply:
        async with asyncio.timeout(4):
            assert await reply.content.readexactly(len(b"".join(chunks))) == b"".join(chunks)


async def test_chunk_hashes_come_with_the_reply_when_asked_for(rig: Rig) -> None:
    params = {"chunk_hashes": True, "other": 1}
    _, _, text = await rig.post(CHAT, {**BODY, "kv_transfer_params": params})
    tokens = np.array([*PROMPT_IDS, 7, 8], dtype="<u4")
    expected = [value.hex() for value in ChunkHasher(256).hashes(tokens)]
    assert json.loads(text)["kv_transfer_params"] == {"chunk_hashes": expected}
    assert len(expected) == 2
    assert rig.engine.bodies[0]["kv_transfer_params"] == {"other": 1}
    await rig.post(CHAT, {**BODY, "kv_transfer_params": {"chunk_hashes": True}})
    assert "kv_transfer_params" not in rig.engine.bodies[1]


async def test_chunk_hashes_come_with_the_last_chunk_of_a_stream(rig: Rig) -> None:
    asked = {**BODY, "stream": True, "kv_transfer_params": {"chunk_hashes": True}}
    _, _, text = await rig.post(CHAT, asked)
    _, _, plain = await rig.post(CHAT, {**BODY, "stream": True})
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith(b"data: {")]
    tokens = np.array([*PROMPT_IDS, 7, 99, 8], dtype="<u4")
    expected = [value.hex() for value in ChunkHasher(256).hashes(tokens)]
    assert [chunk.pop("kv_transfer_params", None) for chunk in chunks][-1] == {"chunk_hashes": expected}
    assert chunks == [json.loads(line[6:]) for line in plain.splitlines() if line.startswith(b"data: {")]


async def test_the_openai_client_is_at_home(rig: Rig) -> None:
    client = AsyncOpenAI(base_url=rig.url + "/v1", api_key="k", max_retries=0)
    reply = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
    assert reply.choices[0].message.content == "Hello there!"
    stream = await client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": "hi"}], stream=True
    )
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert text == "Hello there!"
    await client.close()


async def test_health_and_metrics(rig: Rig) -> None:
    async with rig.client.get(rig.url + "/health") as reply:
        assert (reply.status, await reply.json()) == (
            200,
            {"status": "ok", "engine": True, "coordinator": True},
        )
    await rig.post(CHAT, BODY)
    async with rig.client.get(rig.url + "/metrics") as reply:
        text = await reply.text()
    assert 'path="/v1/chat/completions",status="200"' in text


async def test_health_without_engine_and_coordinator(start: StartRig) -> None:
    alone = await start(coordinator=False, engine_url="http://127.0.0.1:1")
    async with alone.client.get(alone.url + "/health") as reply:
        assert reply.status == 503
        assert (await reply.json())["coordinator"] is False


async def test_a_redirect_does_not_lead_clients_past_the_gateway(rig: Rig) -> None:
    async def redirect(request: web.Request) -> web.Response:
        return web.Response(status=307, headers={"location": str(request.url.with_path("/v1/elsewhere"))})

    rig.engine.handler = redirect
    async with rig.client.get(rig.url + "/v1/somewhere", allow_redirects=False) as reply:
        assert (reply.status, reply.headers["location"]) == (307, "/v1/elsewhere")


async def test_a_slash_behind_the_path_changes_nothing(rig: Rig) -> None:
    status, _, _ = await rig.post(CHAT + "/?a=b", BODY)
    assert status == 200
    assert rig.engine.requests[0][0] == CHAT + "?a=b"
    assert rig.coordinator
    assert await rig.coordinator.until(RequestStarted)
