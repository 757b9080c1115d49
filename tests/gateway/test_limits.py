"""Clients that leave, engines that fail, and more than there is room for."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest
from aiohttp import web

from kvpilot.domain import RequestFinished
from kvpilot.gateway.asgi import Body
from tests.gateway.conftest import Rig, StartRig

CHAT = "/v1/chat/completions"
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, "/v1/responses"])
async def test_a_client_that_leaves_cancels_the_engine(rig: Rig, stream: bool, path: str) -> None:
    rig.engine.delay, rig.engine.chunk_delay = (0, 5) if stream else (30, 0)
    request = asyncio.create_task(rig.post(path, {**BODY, "stream": stream}))
    await rig.engine.asked()
    await asyncio.sleep(0.1)
    request.cancel()
    async with asyncio.timeout(1):
        await rig.engine.gone.wait()
    if path == CHAT:
        assert rig.coordinator
        (finished,) = await rig.coordinator.until(RequestFinished)
        assert finished.aborted


async def error(rig: Rig, body: object = BODY) -> tuple[int, str, dict[str, str]]:
    status, headers, text = await rig.post(CHAT, body)
    return status, json.loads(text)["error"]["type"], headers


async def test_a_body_over_the_limit_is_refused(start: StartRig) -> None:
    rig = await start(gateway={"max_body_mb": 1})
    big = b"x" * (1024 * 1024 + 1)
    assert (await error(rig, big))[0] == 413

    async def parts() -> object:
        for start in range(0, len(big), 65536):
            yield big[start : start + 65536]

    for path in (CHAT, "/v1/files"):
        async with rig.client.post(rig.url + path, data=parts()) as reply:
            assert reply.status == 413
    assert not [body for _, _, body in rig.engine.requests if len(body) >= len(big)]
    assert (await rig.post(CHAT, BODY))[0] == 200


@pytest.mark.parametrize("length", ["²", "٣", "9" * 5000, "-1", "", "1e9"])
async def test_a_length_that_is_no_number_leaves_the_body_to_be_measured(length: str) -> None:
    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": b"{}"}

    assert await Body(receive, length, 1).whole() == b"{}"


async def test_too_many_at_once_are_sent_away_and_told_when_to_return(start: StartRig) -> None:
    rig = await start(gateway={"max_in_flight": 1})
    rig.engine.delay = 0.3
    first = asyncio.create_task(rig.post(CHAT, BODY))
    await rig.engine.asked()
    status, kind, headers = await error(rig)
    assert (status, kind, headers["retry-after"]) == (503, "overloaded_error", "1")
    assert (await first)[0] == 200
    assert (await rig.post(CHAT, BODY))[0] == 200


async def test_an_engine_that_is_not_there(start: StartRig) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    rig = await start(engine_url=f"http://127.0.0.1:{port}")
    status, kind, _ = await error(rig)
    assert (status, kind) == (502, "api_connection_error")
    assert rig.coordinator
    assert (await rig.coordinator.until(RequestFinished))[0].status == 502


async def test_an_engine_that_is_silent(start: StartRig) -> None:
    rig = await start(gateway={"read_timeout_s": 0.2})
    rig.engine.delay = 30
    assert (await error(rig))[:2] == (504, "timeout_error")
    async with asyncio.timeout(1):
        await rig.engine.gone.wait()


async def test_an_engine_that_breaks_off_breaks_the_reply_off(rig: Rig) -> None:
    async def breaking(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b'data: {"choices":[]}\n\n')
        assert request.transport
        request.transport.abort()
        return response

    rig.engine.handler = breaking
    with pytest.raises(Exception, match=r"payload|[Dd]isconnect|closed"):
        await rig.post(CHAT, {**BODY, "stream": True})
    assert rig.coordinator
    assert (await rig.coordinator.until(RequestFinished))[0].aborted


async def test_an_idle_connection_the_engine_closed_costs_nobody_a_request(rig: Rig) -> None:
    async def closing(request: web.Request) -> web.Response:
        assert request.transport
        asyncio.get_running_loop().call_later(0.02, request.transport.close)
        return web.json_response({"choices": []})

    rig.engine.handler = closing
    for _ in range(20):
        assert (await rig.post(CHAT, BODY))[0] == 200
        await asyncio.sleep(0.02)


async def test_a_reply_without_length_ends_with_its_connection(start: StartRig) -> None:
    async def old_server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.0 200 OK\r\ncontent-type: text/plain\r\n\r\nall of it")
        writer.close()

    server = await asyncio.start_server(old_server, "127.0.0.1", 0)
    async with server:
        rig = await start(engine_url=f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        async with rig.client.get(rig.url + "/v1/x") as reply:
            assert await reply.text() == "all of it"


async def test_nonsense_instead_of_http_is_a_502(start: StartRig) -> None:
    async def nonsense(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"\x00\x01 nonsense\r\n\r\n")
        await writer.drain()
        await asyncio.sleep(1)
        writer.close()

    server = await asyncio.start_server(nonsense, "127.0.0.1", 0)
    async with server:
        rig = await start(engine_url=f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        assert (await error(rig))[0] == 502


@pytest.mark.parametrize(
    "reply", ["[]", '{"choices": 5}', '{"usage": "x"}', "nonsense", '{"choices":[{"token_ids":[1,']
)
async def test_a_reply_that_is_no_completion_passes_untouched(rig: Rig, reply: str) -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(text=reply, content_type="application/json")

    rig.engine.handler = handler
    assert (await rig.post(CHAT, BODY))[2] == reply.encode()
