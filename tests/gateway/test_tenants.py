"""API keys, tenants, salts."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpilot.domain import RequestStarted
from kvpilot.gateway.tenants import MAX_SALT, tenant_salt
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
    await rig.post("/v1/responses", {**BODY, "cache_salt": 5}, Authorization="bearer key-b")
    assert [body["cache_salt"] for body in rig.engine.bodies] == ["team%2Fa", "team%2Fa:mine", "b"]
    assert not any("authorization" in headers for _, headers, _ in rig.engine.requests)
    assert rig.coordinator
    started = await rig.coordinator.until(RequestStarted, 2)
    assert [(event.tenant, event.salt) for event in started] == [
        ("team/a", "team%2Fa"),
        ("team/a", "team%2Fa:mine"),
    ]


async def test_what_cannot_be_salted_is_not_forwarded(start: StartRig) -> None:
    rig = await start(tenants=TENANTS)
    status, _, _ = await rig.post(CHAT, b'{"temperature": NaN}', Authorization="Bearer key-a")
    assert status == 400
    assert not rig.engine.requests


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
