"""Rules of what is forwarded, for any body a client may send."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpilot.bench.fuzz.rules import wrong_body
from kvpilot.gateway.errors import GatewayError
from kvpilot.gateway.request import prepare

WORDS = (
    *(
        "model",
        "messages",
        "stream",
        "stream_options",
        "include_usage",
        "continuous_usage_stats",
        "n",
        "echo",
    ),
    *(
        "return_token_ids",
        "kv_transfer_params",
        "chunk_hashes",
        "cache_salt",
        "prompt",
        "agent_hint",
        "tools",
    ),
)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(WORDS) | st.text(max_size=3), inner, max_size=4)
    ),
    max_leaves=12,
)
bodies = st.dictionaries(st.sampled_from(WORDS) | st.text(max_size=3), values, max_size=8)
layouts = st.sampled_from(({}, {"indent": 1}, {"separators": (",", ":")}, {"ensure_ascii": False}))


@settings(max_examples=300)
@given(bodies, layouts)
def test_an_object_is_forwarded_up_to_the_documented_changes(
    body: dict[str, Any], layout: dict[str, Any]
) -> None:
    raw = json.dumps(body, **layout).encode("utf-8", "surrogatepass")
    assert wrong_body(raw, prepare(raw, {}, "default").body) == ""


@settings(max_examples=200)
@given(bodies)
def test_a_named_tenants_object_is_salted_or_refused(body: dict[str, Any]) -> None:
    raw = json.dumps(body).encode()
    salt = body.get("cache_salt")
    try:
        prepared = prepare(raw, {}, "acme")
    except GatewayError as error:
        assert error.status == 400
        assert salt is not None and not (isinstance(salt, str) and salt)
        return
    assert wrong_body(raw, prepared.body, "acme") == ""


@settings(max_examples=300)
@given(
    st.binary(max_size=60)
    | st.text(max_size=30).map(str.encode)
    | values.map(lambda v: json.dumps(v).encode())
)
def test_what_is_no_object_is_forwarded_as_it_is(raw: bytes) -> None:
    prepared = prepare(raw, {}, "default")
    if not prepared.parsed:
        assert prepared.body == raw
        with pytest.raises(GatewayError):
            prepare(raw, {}, "acme")


def test_an_engine_with_the_plug_in_is_told_what_hints_say_of_its_pool() -> None:
    hint = {"session_id": "s", "parent_session_id": "p"}
    body = {"model": "m", "messages": [], "kv_transfer_params": {"mine": 1}, "agent_hint": hint}
    raw = json.dumps(body).encode()
    told = json.loads(prepare(raw, {}, "default", plugin=True).body)
    assert told["kv_transfer_params"] == {"mine": 1, "kvpilot": {"parent": "p"}}
    assert prepare(raw, {}, "default").body == prepare(raw, {}, "default", plugin=False).body
    assert b'"kvpilot"' not in prepare(raw, {}, "default").body


@given(bodies)
def test_telling_the_plug_in_changes_nothing_else(body: dict[str, Any]) -> None:
    raw = json.dumps(body).encode("utf-8", "surrogatepass")
    without, told = (json.loads(prepare(raw, {}, "default", plugin=p).body) for p in (False, True))
    params = told.get("kv_transfer_params")
    if isinstance(params, dict) and "kvpilot" in params:
        del params["kvpilot"]
        if not params and "kv_transfer_params" not in without:
            del told["kv_transfer_params"]
    if not without.get("kv_transfer_params") and not told.get("kv_transfer_params"):
        without.pop("kv_transfer_params", None)
        told.pop("kv_transfer_params", None)
    assert told == without or "kvpilot" in (without.get("kv_transfer_params") or {})
