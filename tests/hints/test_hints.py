"""Dialects in, one vocabulary out; whatever arrives, the request goes on."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpilot.domain import ActionKind, SessionRef, SignalKind, TargetKind
from kvpilot.hints import HintRequest, Hints, Retention, read_hints

MESSAGES = [{"role": "user", "content": "hi"}] * 4


def read(hint: Any = None, headers: dict[str, str] | None = None, messages: Any = MESSAGES) -> Hints:
    body: dict[str, Any] = {"model": "m", "messages": messages}
    if hint is not None:
        body["agent_hint"] = hint
    raw = json.dumps(body).encode()
    fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    return read_hints(HintRequest(fields=fields, headers=headers or {}, tenant="t", salt="s", body=raw))


IDS = {"session_id": "s1", "parent_session_id": "s0"}


@pytest.mark.parametrize(
    ("hint", "headers", "session"),
    [
        (IDS, {}, SessionRef("s1", "s0", "agent_hint")),
        ({"session_id": "s1", "parent_session_id": "s1"}, {}, SessionRef("s1", None, "agent_hint")),
        ({"session_id": "s1"}, {}, SessionRef("s1", None, "agent_hint")),
        ({"parent_session_id": "s0"}, {}, SessionRef("s0", None, "agent_hint")),
        ({"session_id": "s1", "parent_task_id": "s0"}, {}, SessionRef("s1", "s0", "agent_hint")),
        (IDS, {"x-session-id": "h1", "x-parent-session-id": "h0"}, SessionRef("s1", "s0", "agent_hint")),
        (None, {"x-session-id": "h1", "x-parent-session-id": "h0"}, SessionRef("h1", "h0", "headers")),
        (None, {"x-session-id": "h1"}, SessionRef("h1", None, "headers")),
        (None, {}, SessionRef()),
        ({"session_id": ""}, {"x-session-id": "h1"}, SessionRef("h1", None, "headers")),
        ({"session_id": 7}, {}, SessionRef()),
        ({"session_id": "x" * 257}, {}, SessionRef()),
        ({"session_id": "a\r\nset-cookie: b"}, {}, SessionRef()),
        ("text", {"x-session-id": "h1"}, SessionRef("h1", None, "headers")),
    ],
)
def test_the_session_is_found(hint: Any, headers: dict[str, str], session: SessionRef) -> None:
    hints = read(hint, headers)
    assert hints.session == session
    assert not hints.manage
    assert not hints.commands


def managed(*edits: Any, manage: Any = True, **more: Any) -> Any:
    return {**IDS, "context_management": {"manage_request": manage, "edits": list(edits)}, **more}


def test_a_session_edit_is_a_command_the_gateway_answers() -> None:
    hints = read(managed({"type": "offload", "target": "session"}), messages=[])
    assert hints.manage
    (command,) = hints.commands
    assert (command.kind, command.target, command.session.id) == (ActionKind.DEMOTE, TargetKind.SESSION, "s1")
    assert (command.tenant, command.salt, command.body) == ("t", "s", b"")


def test_range_edits_carry_the_body_their_ranges_refer_to() -> None:
    hints = read(
        managed(
            {"type": "evict", "target": "messages", "start": 3, "end": 9},
            {"type": "evict", "target": "tools", "start": 0, "end": 2},
        )
    )
    assert [(c.target, c.start, c.end) for c in hints.commands] == [
        (TargetKind.MESSAGES, 3, 9),
        (TargetKind.TOOLS, 0, 2),
    ]
    assert json.loads(hints.commands[0].body)["messages"] == MESSAGES


def test_an_edit_beside_an_ordinary_request_does_not_stop_it() -> None:
    hints = read(managed({"type": "prefetch"}, manage=False))
    assert not hints.manage
    assert [c.kind for c in hints.commands] == [ActionKind.PREFETCH]


@pytest.mark.parametrize(
    "edit",
    [
        {"type": "delete", "target": "session"},
        {"type": ["evict"], "target": "session"},
        {"type": "evict", "target": "messages", "start": 3, "end": 3},
        {"type": "evict", "target": "messages", "start": -1, "end": 3},
        {"type": "evict", "target": "messages", "start": True, "end": 3},
        {"type": "evict", "target": "messages", "start": 0.0, "end": 3},
        {"type": "evict", "target": "messages"},
        {"type": "evict", "target": "blocks", "start": 0, "end": 1},
        {"type": "offload", "target": "messages", "block_start": 4, "block_end": 9},
        {"type": "evict", "target": {"a": 1}},
        "evict",
        None,
    ],
)
def test_a_bad_edit_is_dropped_alone(edit: Any) -> None:
    hints = read(managed(edit, {"type": "prefetch"}))
    assert [c.kind for c in hints.commands] == [ActionKind.PREFETCH]
    assert len(hints.dropped) == 1
    assert hints.manage


@pytest.mark.parametrize("manage", [None, "true", 1])
def test_edits_need_a_boolean_manage_request(manage: Any) -> None:
    hints = read(managed({"type": "evict"}, manage=manage))
    assert not hints.commands
    assert not hints.manage
    assert hints.dropped


@pytest.mark.parametrize(
    ("control", "kinds", "signals"),
    [
        ("pause", [ActionKind.DEMOTE], [SignalKind.SUSPEND]),
        ("resume", [ActionKind.PREFETCH], [SignalKind.RESUME]),
        ("stop", [ActionKind.EVICT], [SignalKind.END]),
        ("compact", [ActionKind.EVICT], [SignalKind.COMPACTED]),
    ],
)
def test_session_control(control: str, kinds: list[ActionKind], signals: list[SignalKind]) -> None:
    hints = read({**IDS, "session_control": {"type": control}}, messages=[])
    assert [c.kind for c in hints.commands] == kinds
    assert [(signal.kind, signal.session.id) for signal in hints.signals] == [
        (kind, "s1") for kind in signals
    ]
    assert hints.manage


def test_start_only_declares() -> None:
    hints = read({**IDS, "session_control": {"type": "start"}})
    assert (hints.commands, hints.signals, hints.manage) == ((), (), False)
    assert read({**IDS, "session_control": {"type": "start"}}, messages=[]).manage


def test_a_session_edit_wins_over_session_control() -> None:
    hints = read(managed({"type": "prefetch"}, session_control={"type": "stop"}))
    assert [c.kind for c in hints.commands] == [ActionKind.PREFETCH]
    assert not hints.signals
    assert hints.dropped


def test_broken_context_management_does_not_block_session_control() -> None:
    hints = read({**IDS, "context_management": 5, "session_control": {"type": "stop"}})
    assert [c.kind for c in hints.commands] == [ActionKind.EVICT]


def test_the_short_form() -> None:
    hint = {"session_id": "s", "parent_task_id": "t", "action": "prefetch"}
    beside = read(hint)
    assert (beside.session, beside.manage) == (SessionRef("s", "t", "agent_hint"), False)
    assert [c.kind for c in beside.commands] == [ActionKind.PREFETCH]
    assert read(hint, messages=[]).manage


def test_commands_need_a_session() -> None:
    hint = {"context_management": {"manage_request": True, "edits": [{"type": "evict"}]}}
    assert not read(hint).commands
    assert read(hint).manage
    assert read(hint, {"x-session-id": "h"}).commands[0].session.id == "h"


@pytest.mark.parametrize(
    ("control", "retention"),
    [
        ({"ttl": 120}, Retention(120)),
        ({"ttl": 7}, Retention(60)),
        ({"ttl": 1e9}, Retention(3600)),
        ({"ttl": 90.7}, Retention(90)),
        ({"ttl": "90"}, Retention(300)),
        ({"ttl": True}, Retention(300)),
        ({}, Retention(300)),
        ({"msg_offset": 3, "block_offset": 99}, Retention(300, 3)),
        ({"msg_offset": 4}, None),
        ({"msg_offset": -1}, None),
        ({"msg_offset": "1"}, None),
        ("ephemeral", None),
    ],
)
def test_cache_control(control: Any, retention: Retention | None) -> None:
    assert read({**IDS, "cache_control": control}).retention == retention


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
likely = st.sampled_from(["evict", "offload", "session", "messages", "tools", "stop", 0, 1, 3, True, ""])
edits = st.fixed_dictionaries(
    {}, optional=dict.fromkeys(("type", "target", "start", "end", "block_start"), likely | json_values)
)
near_hints = st.fixed_dictionaries(
    {},
    optional={
        "session_id": st.text(max_size=4) | json_values,
        "parent_session_id": st.text(max_size=4) | json_values,
        "action": likely | json_values,
        "cache_control": json_values
        | st.fixed_dictionaries({}, optional={"ttl": json_values, "msg_offset": json_values}),
        "session_control": json_values | st.fixed_dictionaries({"type": likely | json_values}),
        "context_management": json_values
        | st.fixed_dictionaries(
            {},
            optional={"manage_request": st.booleans() | json_values, "edits": st.lists(edits | json_values)},
        ),
    },
)


@given(
    near_hints | json_values,
    st.dictionaries(st.sampled_from(["x-session-id", "x-parent-session-id"]), st.text(max_size=8)),
    json_values,
)
def test_nothing_a_client_sends_raises(hint: Any, headers: dict[str, str], messages: Any) -> None:
    hints = read(hint, headers, messages)
    for command in hints.commands:
        assert command.session.id
        assert command.target is TargetKind.SESSION or 0 <= command.start < command.end
    assert hints.session.parent is None or hints.session.parent != hints.session.id


def test_a_hint_nested_too_deeply_is_dropped() -> None:
    deep = msgspec.Raw(b"[" * 30_000 + b"]" * 30_000)
    assert read_hints(HintRequest(fields={"agent_hint": deep}, headers={})).dropped
