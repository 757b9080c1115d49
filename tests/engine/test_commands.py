"""The envelope of commands, and the hints that come with a request: what makes no sense is refused or left out."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpilot.engine.commands import CommandError, Kind, parse_command
from kvpilot.engine.hints import read_hints
from kvpilot.engine.plugin import VERSIONS, refusal
from kvpilot.engine.port import endpoint

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def test_a_command_says_what_it_says() -> None:
    command = parse_command(b'{"v": 1, "kind": "retain", "session": "s", "ttl_s": 5, "id": "x"}')
    assert (command.kind, command.session, command.ttl_s, command.id) == (Kind.RETAIN, "s", 5.0, "x")


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ({"kind": "explode", "session": "s"}, "kind"),
        ({"kind": "evict"}, "names a session"),
        ({"kind": "evict", "session": "s", "v": 2}, "version 1"),
        ({"kind": "evict", "session": "s", "sesion": "t"}, "sesion"),
        ({"kind": "evict", "blocks": ["zz"]}, "hexadecimal"),
        ({"kind": "evict", "session": "s", "start": 5, "end": 5}, "empty"),
        ({"kind": "evict", "blocks": ["ab"], "start": 5}, "name the session"),
        ({"kind": "evict", "blocks": ["ab"], "tokens": [1]}, "two targets"),
        ({"kind": "prefetch", "tokens": [2**32]}, "tokens"),
        ({"kind": "evict", "session": "s", "start": -1}, "start"),
        ({"kind": "prefetch", "blocks": ["ab"]}, "hashes do not tell"),
        ({"kind": "retain", "session": "s", "ttl_s": 1e9}, "ttl_s"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_one_line(command: dict[str, Any], said: str) -> None:
    with pytest.raises(CommandError, match=said) as refused:
        parse_command(json.dumps(command).encode())
    assert "\n" not in str(refused.value)


@given(st.binary(max_size=60) | JSON.map(lambda value: json.dumps(value).encode()))
def test_nothing_but_a_command_error_comes_of_nonsense(raw: bytes) -> None:
    with pytest.raises(CommandError):
        parse_command(raw)


def test_hints_come_by_either_way_and_the_engines_own_session_id_wins() -> None:
    told = {"session": "s", "parent": "p", "retain_s": 3, "last": True}
    for extra in ({"kv_transfer_params": {"kvpilot": told}}, {"kvpilot": json.dumps(told)}):
        hints = read_hints(extra, None)
        assert (hints.session, hints.parent, hints.retain_s, hints.last) == ("s", "p", 3.0, True)
        assert read_hints(extra, "header").session == "header"
    assert read_hints(None, None).session == ""


@given(JSON)
def test_hints_never_fail(value: Any) -> None:
    for extra in (
        {"kv_transfer_params": value},
        {"kv_transfer_params": {"kvpilot": value}},
        {"kvpilot": value},
    ):
        hints = read_hints(extra, "s")
        assert hints.session == "s" and 0 <= hints.retain_s <= 86400
    if isinstance(value, dict):
        read_hints(value, None)


def test_only_versions_that_were_tried_are_touched() -> None:
    assert not any(refusal(version) for version in VERSIONS)
    assert refusal("0.32.0+cpu") == ""
    assert "0.33.0" in refusal("0.33.0")


def test_ports_count_up_by_engine_and_behind_each_by_its_ranks() -> None:
    first = "tcp://127.0.0.1:7000"

    def parallel(engine: int, ranks: int) -> SimpleNamespace:
        return SimpleNamespace(data_parallel_index=engine, world_size=ranks)

    assert endpoint(first, parallel(2, 1)) == "tcp://127.0.0.1:7002"
    assert endpoint(first, parallel(1, 2)) == "tcp://127.0.0.1:7003"
    assert endpoint(first, parallel(1, 2), 1) == "tcp://127.0.0.1:7005"
    with pytest.raises(ValueError, match="must be like"):
        endpoint("7000", parallel(0, 1))
