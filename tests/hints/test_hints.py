"""What commands carry to the coordinator. Which hint means what is in the conformance table."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvpilot.domain import ActionKind, SessionRef, TargetKind
from kvpilot.hints import Hints
from tests.hints.conformance.table import MESSAGES, NOW, read

IDS = {"session_id": "s1", "parent_session_id": "s0"}


def managed(*edits: Any, messages: Any = MESSAGES) -> Hints:
    hint = {**IDS, "context_management": {"manage_request": True, "edits": list(edits)}}
    return read({"messages": messages, "agent_hint": hint}, {})


def test_a_command_has_the_tenant_and_the_salt_of_its_request() -> None:
    (command,) = managed({"type": "offload", "target": "session"}, messages=[]).commands
    assert (command.kind, command.target) == (ActionKind.DEMOTE, TargetKind.SESSION)
    assert command.session == SessionRef("s1", "s0", "agent_hint")
    assert (command.tenant, command.salt, command.body) == ("t", "s", b"")


def test_a_signal_has_the_tenant_and_the_time_of_its_request() -> None:
    headers = {"x-dynamo-session-id": "d", "x-dynamo-session-final": "true"}
    (signal,) = read({"messages": MESSAGES}, headers).signals
    assert (signal.at, signal.tenant, signal.session) == (NOW, "t", SessionRef("d", None, "dynamo"))


@pytest.mark.parametrize(
    "edit",
    [
        {"type": "evict", "target": "messages", "start": 1, "end": 2},
        {"type": "evict", "target": "tools", "start": 0, "end": 1},
        {"type": "evict", "block_start": 0, "block_end": 1},
    ],
)
def test_a_range_takes_the_body_along_that_it_counts_in(edit: Any) -> None:
    (command,) = managed(edit).commands
    assert json.loads(command.body)["messages"] == MESSAGES


def test_an_action_of_an_envelope_is_named_in_its_source() -> None:
    action = {"action_id": "a-7", "action_type": "kv.demote"}
    body = {"messages": [], "kv_hints": {"protocol_version": "0.1", "actions": [action]}}
    (command,) = read(body, {"x-session-id": "h"}).commands
    assert command.source == "kv_hints:a-7"


def test_who_named_the_session_is_told() -> None:
    assert read({}, {}).session == SessionRef()
    assert read({}, {"x-session-id": "h"}).session.source == "headers"
    assert read({"agent_hint": IDS}, {"x-session-id": "h"}).session.source == "agent_hint"
    assert read({"job_id": "j"}, {}).session.source == "continuum"
