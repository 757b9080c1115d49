"""``kvpilot explain`` asks for what its argument is, and prints what clients named as text."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from kvpilot.cli import inspect
from tests.answering import answering
from tests.cli.conftest import Run

CONVERSATION: dict[str, Any] = {
    "conversation": "t/[red]x[/red]#1",
    "session": "[red]x[/red]",
    "tenant": "t",
    "requests_in_flight": 0,
    "kept": True,
    "priority": 3,
    "chunks": 12,
    "shared_chunks": 2,
    "resident": {"host": 12},
    "forecast": {
        "waits_for": "tool",
        "since": time.time() - 4,
        "returns_in_s": {"p10": 0.5, "p50": 3.0, "p90": 200.0},
        "within": {"10s": 0.8, "60s": 0.9},
        "interval_80_s": [0.4, 300.0],
        "features": [{"feature": "program:\x1b[31mpytest", "effect": -0.7}],
    },
    "worth": 0.25,
    "place": {"rank": 2, "of": 9},
    "next": [{"action": "demote", "at": time.time() + 5, "chunks": 3, "reason": "room"}],
    "last": {
        "action": "prefetch",
        "at": time.time() - 100,
        "chunks": 4,
        "reason": "due",
        "worth": 0.5,
        "place": None,
        "instead_of": None,
        "instead_of_worth": None,
    },
}
SESSION: dict[str, Any] = {
    "session": "[red]x[/red]",
    "tenant": "t",
    "state": "waiting_tool",
    "since": time.time() - 4,
    "waiting_for": ["Bash"],
    "expected_at": None,
    "mode": "kvpilot",
    "conversations": [CONVERSATION],
}
CHUNK: dict[str, Any] = {
    "chunk": "ab" * 32,
    "model": "m",
    "salt": "",
    "tiers": ["host"],
    "position": 3,
    "worth": 0.25,
    "holders": 60,
    "held_by": [CONVERSATION],
}


@pytest.mark.parametrize(
    ("target", "path", "answer", "shown"),
    [
        (
            "a/b c",
            "/explain/sessions/a/b%20c",
            SESSION,
            ["[red]x[/red]", "a return every 4.0 s", "80 % in 0.4 s to"],
        ),
        (
            "AB" * 32,
            f"/explain/chunks/{'AB' * 32}",
            {"spaces": [CHUNK]},
            ["chunk 3 of 60 live", "and 59 more"],
        ),
        (
            "ab" * 31,
            f"/explain/sessions/{'ab' * 31}",
            SESSION,
            ["2. to go of 9", "-0.70 program:\\x1b[31mpytest"],
        ),
    ],
)
def test_a_session_or_a_chunk_is_explained(
    target: str, path: str, answer: dict[str, Any], shown: list[str], kvpilot: Run
) -> None:
    asked: list[str] = []

    def body(found: str) -> bytes:
        asked.append(found)
        return json.dumps(answer).encode()

    with answering(body) as url:
        code, out, _ = kvpilot("explain", target, "--control", url)
        assert (code, asked) == (0, ["/kvpilot/v1" + path])
        assert all(part in out for part in shown), out
        code, out, _ = kvpilot("explain", target, "--control", url, "--json")
    assert json.loads(out) == answer


def test_what_is_not_known_is_one_line(refused: Any) -> None:
    with answering(lambda path: b'{"detail": "session \'x\' is not known"}', 404) as url:
        assert refused("explain", "x", "--control", url) == "session 'x' is not known"


def test_the_command_is_listed_with_the_others(kvpilot: Run) -> None:
    assert inspect.explain.__doc__ is not None
    assert "explain" in kvpilot("--help")[1]
