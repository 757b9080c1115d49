"""The top level of a body is the same however it was read; a marked one is gone through once."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpilot.bench.hints import variants
from kvpilot.gateway.request import prepare
from kvpilot.hints import BUILT_IN, HintRequest, read_body, read_hints
from kvpilot.hints.body import FIELDS, LISTS, Marked, Unmarked
from kvpilot.tenants import DEFAULT_TENANT

MARK = {"type": "ephemeral"}

blocks = st.fixed_dictionaries(
    {"type": st.just("text"), "text": st.text(max_size=5) | st.just('"cache_control"')},
    optional={
        "cache_control": st.just(MARK) | st.none() | st.integers(),
        "prompt_cache_breakpoint": st.just({"mode": "explicit"}),
        "content": st.just([{"cache_control": MARK}]),
    },
)
items = st.one_of(
    st.fixed_dictionaries(
        {"role": st.just("user"), "content": st.lists(blocks, max_size=3) | st.text(max_size=5) | blocks},
        optional={"cache_control": st.just(MARK)},
    ),
    st.integers(),
    st.lists(blocks, max_size=2),
)
bodies = st.fixed_dictionaries(
    {},
    optional={
        **{name: st.lists(items, max_size=6) | st.text(max_size=3) | st.none() | items for name in LISTS},
        "model": st.text(max_size=3),
        "cache_control": st.just(MARK),
        "agent_hint": st.just({"session_id": "s", "cache_control": {"msg_offset": 1}}),
        "temperature": st.floats(0, 1),
    },
)


@given(bodies, st.sampled_from([None, 2]))
def test_hints_are_the_same_as_from_a_dict(body: dict[str, Any], indent: int | None) -> None:
    raw = json.dumps(body, indent=indent).encode()
    plain = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    fields = read_body(raw)
    assert read_hints(HintRequest(fields, {}, body=raw, now=1.0)) == read_hints(
        HintRequest(plain, {}, body=raw, now=1.0)
    )
    assert HintRequest(fields, {}).has_content == HintRequest(plain, {}).has_content
    for name in (*LISTS, *body, "no such field"):
        assert (name in fields, bytes(fields.get(name, b""))) == (name in plain, bytes(plain.get(name, b"")))
    assert {name: bytes(value) for name, value in fields.items()} == {
        name: bytes(value) for name, value in plain.items()
    }


def test_fields_of_all_dialects_are_found_at_once() -> None:
    assert {name for dialect in BUILT_IN for name in dialect.fields} <= FIELDS


@pytest.mark.parametrize("case", variants(4), ids=lambda case: case.name)
def test_no_body_is_gone_through_twice(case: Any) -> None:
    fields = read_body(case.body)
    read_hints(HintRequest(fields, case.headers, body=case.body))
    assert isinstance(fields, Unmarked) or (isinstance(fields, Marked) and "_whole" not in vars(fields))


@pytest.mark.parametrize("text", [b"[1]", b"null", b"", b'{"messages": [{"cache_control": 1}', b"1 2"])
def test_what_is_no_object_is_told(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_body(text)


def test_a_marked_body_that_is_written_anew_keeps_all_its_fields() -> None:
    body = {
        "messages": [{"role": "user", "content": "hi", "cache_control": MARK}],
        "kv_transfer_params": {"chunk_hashes": True},
        "temperature": 0.5,
    }
    forwarded = json.loads(prepare(json.dumps(body).encode(), {}, DEFAULT_TENANT, ask=()).body)
    del body["kv_transfer_params"]
    assert forwarded == body


def test_a_marked_body_with_a_name_that_is_no_text_is_forwarded_as_it_came() -> None:
    raw = b'{"messages": [{"cache_control": {}}], "\xff": 1}'
    prepared = prepare(raw, {}, DEFAULT_TENANT)
    assert (prepared.body, prepared.parsed) == (raw, False)


def test_a_marked_body_with_a_number_for_a_list_is_read_nevertheless() -> None:
    fields = read_body(b'{"messages": 1e999, "model": "m", "cache_control": {"type": "ephemeral"}}')
    assert bytes(fields["messages"]) == b"1e999"
    assert read_hints(HintRequest(fields, {})).retention is not None
