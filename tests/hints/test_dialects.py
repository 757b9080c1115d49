"""Every dialect alone and beside the others, whatever JSON arrives; how they are found and joined."""

from __future__ import annotations

import json
import logging
from importlib.metadata import EntryPoint
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvpilot.hints.registry as registry_module
from kvpilot.domain import SessionRef
from kvpilot.hints import BUILT_IN, Dialect, HintRequest, Hints, Registry, read_body, read_hints
from kvpilot.hints.content import MAX_SCAN
from kvpilot.hints.registry import MAX_REASONS
from tests.hints.conformance.rows import ROWS
from tests.hints.conformance.table import Row, in_words, read

FIELDS = sorted({name for dialect in BUILT_IN for name in dialect.fields} | {"is_last_step", "max_tokens"})
HEADERS = sorted({name for dialect in BUILT_IN for name in dialect.headers})
WORDS = sorted(
    {
        word
        for row in ROWS
        for word in json.dumps(row.body or {}).replace("\\", "").split('"')[1::2]
        if len(word) < 40
    }
)

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=6)
    | st.sampled_from(WORDS),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(WORDS) | st.text(max_size=4), inner, max_size=5)
    ),
    max_leaves=20,
)
garbage_fields = st.dictionaries(st.sampled_from(FIELDS), values, max_size=6)
garbage_headers = st.dictionaries(st.sampled_from(HEADERS), st.text(max_size=10), max_size=4)


def request_of(body: dict[str, Any], headers: dict[str, str]) -> HintRequest:
    raw = json.dumps(body).encode()
    return HintRequest(read_body(raw), headers, body=raw)


def mutations(value: Any) -> st.SearchStrategy[Any]:
    """``value`` with one part of it, somewhere, replaced by anything."""
    if isinstance(value, dict) and value:
        return st.sampled_from(sorted(value)).flatmap(
            lambda key: mutations(value[key]).map(lambda new: {**value, key: new})
        )
    if isinstance(value, list) and value:
        return st.integers(0, len(value) - 1).flatmap(
            lambda at: mutations(value[at]).map(lambda new: [*value[:at], new, *value[at + 1 :]])
        )
    return values


@settings(max_examples=200)
@given(garbage_fields, garbage_headers)
def test_no_dialect_raises_on_anything(body: dict[str, Any], headers: dict[str, str]) -> None:
    request = request_of(body, headers)
    for dialect in BUILT_IN:
        dialect.read(request)
    assert_sound(read_hints(request))


@settings(max_examples=200)
@given(
    st.sampled_from([row for row in ROWS if row.body]).flatmap(lambda row: mutations(dict(row.body or {})))
)
def test_no_dialect_raises_on_nearly_valid_hints(body: dict[str, Any]) -> None:
    request = request_of(body, {})
    for dialect in BUILT_IN:
        dialect.read(request)
    assert_sound(read_hints(request))


def assert_sound(hints: Hints) -> None:
    """What holds of every result, and that it can cross to the coordinator."""
    assert hints.session.parent is None or hints.session.parent != hints.session.id
    assert all(command.session.id or command.chunks for command in hints.commands)
    assert all(signal.session.id for signal in hints.signals)
    assert len(hints.dropped) <= MAX_REASONS + 1
    msgspec.msgpack.encode((hints.commands, hints.signals, hints.retention, hints.session))


def speakers(body: dict[str, Any], headers: dict[str, str]) -> set[str]:
    """Names of the dialects that may speak in such a request."""
    return {
        dialect.name
        for dialect in BUILT_IN
        if not body.keys().isdisjoint(dialect.fields) or not headers.keys().isdisjoint(dialect.headers)
    }


SPOKEN = [
    row
    for row in ROWS
    if row.body and not row.dropped and (row.session or row.commands or row.retention or row.edits)
]


@settings(max_examples=200)
@given(st.sampled_from(SPOKEN), garbage_fields)
def test_garbage_of_one_dialect_leaves_the_others_alone(row: Row, garbage: dict[str, Any]) -> None:
    """The garbage has no id, no wish and no command of its own: what the row says is then all there is."""
    own = dict(row.body or {})
    alone = {name: value for name, value in garbage.items() if name not in own and name != "messages"}
    alone = {name: value for name, value in alone.items() if not speakers(own, {}) & speakers({name: 1}, {})}
    noise = read({"messages": [{"role": "user", "content": "hi"}], **alone}, {})
    if noise.session.id or noise.commands or noise.signals or noise.retention or noise.edits or noise.manage:
        return
    if alone.keys() & {"is_last_step", "max_tokens", "input"}:
        return
    joined = Row(row.source, row.rule, {**own, **alone}, row.headers).result()
    assert in_words(joined) == row.expected()


def test_a_dialect_that_is_not_spoken_is_not_asked() -> None:
    asked: list[str] = []

    def spy(name: str) -> Dialect:
        def reading(request: HintRequest) -> None:
            asked.append(name)

        return Dialect(name, reading, fields=(f"{name}-field",), headers=(f"{name}-header",))

    registry = Registry([spy("a"), spy("b"), spy("c")])
    registry.read(request_of({"a-field": 1, "other": 2}, {"c-header": "x", "host": "y"}))
    assert asked == ["a", "c"]


def test_a_dialect_that_answers_with_anything_else_fails_nothing() -> None:
    odd = Dialect("odd", lambda request: "session", fields=("x",))  # type: ignore[arg-type, return-value]
    assert Registry([odd]).read(request_of({"x": 1}, {})).dropped == ("odd: could not be read",)


def names(session: str, parent: str | None = None) -> Hints:
    return Hints(session=SessionRef(session, parent, session))


def test_body_dialects_come_before_those_of_headers_in_any_order_of_registration() -> None:
    registry = Registry(
        [
            Dialect("h", lambda request: names("header"), headers=("x-h",)),
            Dialect("b", lambda request: names("body"), fields=("b",)),
        ]
    )
    assert registry.read(request_of({"b": 1}, {"x-h": "1"})).session.id == "body"


def test_a_dialect_that_raises_fails_nothing_and_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    def broken(request: HintRequest) -> Hints:
        raise RuntimeError("boom")

    registry = Registry(
        [
            Dialect("broken", broken, fields=("x",)),
            Dialect("fine", lambda request: names("s"), fields=("x",)),
        ]
    )
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            hints = registry.read(request_of({"x": 1}, {}))
            assert (hints.session.id, hints.dropped) == ("s", ("broken: could not be read",))
    assert len(caplog.records) == 1


PLUG_IN = Dialect("mine", lambda request: names("mine"), fields=("my_field",))
NO_PLUG_IN = "text"


def test_dialects_of_other_packages(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    entries = [
        EntryPoint("mine", "tests.hints.test_dialects:PLUG_IN", registry_module.ENTRY_POINTS),
        EntryPoint("gone", "tests.hints.no_such_module:X", registry_module.ENTRY_POINTS),
        EntryPoint("wrong", "tests.hints.test_dialects:NO_PLUG_IN", registry_module.ENTRY_POINTS),
    ]
    monkeypatch.setattr(registry_module, "entry_points", lambda group: entries)
    registry_module.installed.cache_clear()
    try:
        with caplog.at_level(logging.ERROR):
            assert read_hints(request_of({"my_field": 1}, {})).session.id == "mine"
            assert read_hints(request_of({"my_field": 1, "job_id": "j"}, {})).session.id == "j"
        assert [record.args for record in caplog.records] == [("gone",), ("wrong",)]
    finally:
        registry_module.installed.cache_clear()


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("text", [b"[" * 30_000 + b"]" * 30_000, b'{"a":' * 9_000 + b"1" + b"}" * 9_000])
def test_deep_nesting_is_dropped(field: str, text: bytes) -> None:
    marked = b'"cache_control" "prompt_cache_breakpoint"'
    read_hints(HintRequest({field: msgspec.Raw(text)}, {}, body=text + marked))


@pytest.mark.parametrize("field", ["agent_hint", "kv_hints", "kv_transfer_params", "vllm_xargs", "nvext"])
def test_a_huge_hint_is_not_decoded(field: str) -> None:
    huge = msgspec.Raw(b'{"a": "' + b"x" * 100_000 + b'"}')
    assert "larger" in read_hints(HintRequest({field: huge}, {})).dropped[0]


def test_a_huge_body_is_not_searched_for_marks() -> None:
    messages = json.dumps([{"content": [{"text": "x" * MAX_SCAN, "cache_control": {}}]}]).encode()
    hints = read_hints(HintRequest({"messages": msgspec.Raw(messages)}, {}, body=messages))
    assert hints.retention is None
    assert any("not looked for" in reason for reason in hints.dropped)


def test_reasons_are_bounded() -> None:
    actions = [{"action_type": "x"}] * 16
    edits = [{"type": "x"}] * 16
    body = {
        "kv_hints": {"protocol_version": "0.1", "actions": actions},
        "agent_hint": {"context_management": {"manage_request": True, "edits": edits}},
        "context_management": {"edits": [{"type": "x"}] * 8},
    }
    dropped = read_hints(request_of(body, {})).dropped
    assert len(dropped) == MAX_REASONS + 1
    assert dropped[-1].startswith("and ")
