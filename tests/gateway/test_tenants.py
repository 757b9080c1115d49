"""API keys, tenants, salts."""

from __future__ import annotations

import json

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from kvpilot.domain import RequestStarted
from kvpilot.tenants import MAX_SALT, tenant_salt
from tests.gateway.conftest import Rig, StartRig

CHAT = "/v1/chat/completions"
BODY = {"model": "m", "messages": []}
TENANTS = {"key-a": "team/a", "key-b": "b"}


@given(st.text(max_size=200), st.text(max_size=200), st.text(max_size=200), st.text(max_size=200))
def test_no_two_tenants_ever_share_a_salt(tenant: str, salt: str, other: str, other_salt: str) -> None:
    mine, theirs = tenant_salt(tenant or "t", salt), tenant_salt(other or "t", other_salt)
    assert len(mine) <= MAX_SALT
    assert not set(mine) & set("@/\\\0")
    assert (mine == theirs) == ((tenant or "t", salt) == (other or "t", other_salt))


@pytest.mark.parametrize("key", [None, "Bearer nobody", "key-a", "Basic key-a", "Bearer"])
async def test_unknown_keys_are_refused(start: StartRig, key: str | None) -> None:
    rig = await start(tenants=TENANTS)
    headers = {"Authorization": key} if key else {}
    for path in (CHAT, "/v1/models"):
        status, _, text = await rig.post(path, BODY, **headers)
        assert (status, json.loads(text)["error"]["type"]) == (401, "authentication_error")
    assert not rig.engine.requests


async def test_a_tenants_requests_carry_its_salt_and_not_its_key(start: StartRig) -> None:
    rig = await start(tenants=TENANTS)
    await rig.post(CHAT, BODY, Authorization="Bearer key-a")
    await rig.post(CHAT, {**BODY, "cache_salt": "mine"}, Authorization="Bearer key-a")
    await rig.post("/v1/responses", BODY, Authorization="bearer key-b")
    assert [body["cache_salt"] for body in rig.engine.bodies] == ["team%2Fa", "team%2Fa:mine", "b"]
    assert not any("authorization" in headers for _, headers, _ in rig.engine.requests)
    assert rig.coordinator
    started = await rig.coordinator.until(RequestStarted, 3)
    assert [(event.tenant, event.salt) for event in started] == [
        ("team/a", "team%2Fa"),
        ("team/a", "team%2Fa:mine"),
        ("b", "b"),
    ]


@pytest.mark.parametrize(
    "body",
    [
        b'{"temperature": NaN}',
        b"[1]",
        '{"model": "m"}'.encode("utf-16"),
        b'{"cache_salt": 5}',
        b'{"cache_salt": ""}',
        b"--x\r\n\r\n--x--",
    ],
)
@pytest.mark.parametrize("path", [CHAT, "/v1/responses", "/v1/audio/transcriptions"])
async def test_what_cannot_be_salted_is_not_forwarded(start: StartRig, path: str, body: bytes) -> None:
    rig = await start(tenants=TENANTS)
    status, _, _ = await rig.post(path, body, Authorization="Bearer key-a")
    assert status == 400
    assert not rig.engine.requests


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON", "text/plain", ""])
@pytest.mark.parametrize("path", ["/v1/responses", "/v1/responses/", "/v1/messages", "/v1/embeddings"])
async def test_a_tenants_body_is_salted_whatever_it_claims_to_be(
    start: StartRig, path: str, kind: str
) -> None:
    rig = await start(tenants=TENANTS)
    headers = {"Authorization": "Bearer key-b", "Content-Type": kind}
    await rig.post(path, {**BODY, "cache_salt": "team%2Fa"}, **headers)
    assert rig.engine.bodies[0]["cache_salt"] == "b:team%252Fa"


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_a_tenants_request_without_a_body_needs_none(start: StartRig, method: str) -> None:
    async def fine(request: web.Request) -> web.Response:
        return web.Response()

    rig = await start(tenants=TENANTS)
    rig.engine.handler = fine
    headers = {"Authorization": "Bearer key-b", "Content-Type": "application/json", "Content-Length": "0"}
    async with rig.client.request(method, rig.url + "/v1/responses/r1/cancel", headers=headers) as reply:
        assert reply.status == 200
    assert len(rig.engine.requests) == 1


async def test_without_keys_a_clients_salt_is_its_own(rig: Rig) -> None:
    await rig.post(CHAT, {**BODY, "cache_salt": "mine"})
    await rig.post(CHAT, BODY)
    assert rig.engine.bodies[0]["cache_salt"] == "mine"
    assert "cache_salt" not in rig.engine.bodies[1]
    assert rig.coordinator
    assert [event.salt for event in await rig.coordinator.until(RequestStarted, 2)] == ["mine", ""]


async def test_the_engines_key_replaces_the_clients(start: StartRig) -> None:
    rig = await start(engine={"api_key": "engine-key"})
    await rig.post(CHAT, BODY, Authorization="Bearer client-key")
    assert rig.engine.requests[0][1]["authorization"] == "Bearer engine-key"
