"""What the inspecting commands print of a coordinator's answers, and where they look for one."""

from __future__ import annotations

import io
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvpilot.cli.output import console, literal
from kvpilot.replay.report import print_report
from tests.answering import answering
from tests.cli.conftest import Run

Refused = Callable[..., str]

AWKWARD = ["[/bold]x", "[red]x[/red]", ":smile:", "[link=http://a]x", "a\\[b]"]
SESSION = {
    "tenant": "[/dim]",
    "state": "idle",
    "since": time.time(),
    "turns": 1,
    "tokens": 256,
    "chunks": 1,
    "resident": {"host": 1, "disk": 0},
    "parent": "[/]",
    "children": ["[/i]"],
    "returns_in_s": None,
    "next": [],
}
CONTEXT = {
    "tokens": 256,
    "segments_method": "template",
    "segments": [{"kind": "tool_result", "name": "[/b]", "message": 0, "start": 0, "end": 256}],
    "chunks": [{"tiers": ["host"], "holders": 1}],
}
ACTION = {
    "id": "a1",
    "created_at": 1.0,
    "finished_at": None,
    "kind": "evict",
    "source": "user",
    "status": "done",
    "planned": 1,
    "confirmed": 1,
    "skipped": 0,
    "reason": "[/reason]",
}


@pytest.fixture
def control() -> Iterator[str]:
    """A control API whose clients chose awkward names."""
    sessions = [{"id": name, **SESSION} for name in AWKWARD]
    pages: dict[str, Any] = {
        "sessions": {"sessions": sessions, "total": len(sessions)},
        "session": {"id": AWKWARD[0], **SESSION, "contexts": [CONTEXT]},
        "actions": {"actions": [{"session": name, **ACTION} for name in AWKWARD]},
    }

    def body(target: str) -> bytes:
        path = target.partition("?")[0].removeprefix("/kvpilot/v1/")
        return json.dumps(pages["session" if path.startswith("sessions/") else path]).encode()

    with answering(body) as url:
        yield url


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        (("sessions",), [*AWKWARD, "[/dim]", "[/]"]),
        (("session", AWKWARD[0]), [AWKWARD[0], "[/dim]", "[/]", "[/i]", "[/b]"]),
        (("actions",), [*AWKWARD, "[/reason]"]),
    ],
)
def test_names_are_printed_as_they_are(
    command: tuple[str, ...], shown: list[str], control: str, kvpilot: Run
) -> None:
    code, printed, _ = kvpilot(*command, "--control", control)
    assert code == 0
    assert all(name in printed for name in shown), printed


def test_names_mean_nothing_to_the_terminal() -> None:
    assert literal("a\x1b[2Jb\nc\ud800") == "a\\x1b[2Jb\\nc\\ud800"
    assert literal("größer 漢字 🙂") == "größer 漢字 🙂"


def test_a_replay_reports_sessions_by_their_names() -> None:
    row = {"session": AWKWARD[0], "agent": "a", "ttft_ms": 1.0, "prompt_tokens": 1, "cached_tokens": 0}
    document = {
        "totals": {"hit_rate": None, "requests": 1, "failed": 0, "ttft_ms": {"p50": 1, "p90": 1}},
        "turns": [{**row, "error": None}],
        "traces": ["[/t]"],
        "mode": "kvpilot",
        "scale": 1,
        "gap_scale": 1,
        "bytes_held": {},
        "tiers": {},
        "compactions": [],
        "notes": ["[/n]"],
    }
    out = io.StringIO()
    print_report(document, console(file=out, width=200))
    assert all(name in out.getvalue() for name in (AWKWARD[0], "[/t]", "note: [/n]"))


@pytest.mark.parametrize("url", ["notaurl", "http://[::1", "http://127.0.0.1:70000", "", "http://"])
@pytest.mark.parametrize("command", ["sessions", "actions"])
def test_a_control_url_that_is_none_is_refused(command: str, url: str, refused: Refused) -> None:
    assert refused(command, "--control", url).startswith(f"--control is {url!r}: it must be a URL")


def test_without_a_stack_and_a_fixed_port_there_is_nobody_to_ask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    monkeypatch.setenv("KVPILOT_COORDINATOR__PORT", "0")
    assert "no stack is up" in refused("sessions", "--state", str(tmp_path))


def test_who_answers_but_is_no_coordinator_is_told_so(refused: Refused) -> None:
    """Anything may listen on a port: here something that does not speak HTTP."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def hang_up() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"SSH-2.0-something\r\n")

        threading.Thread(target=hang_up, daemon=True).start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        assert "no coordinator answers" in refused("sessions", "--control", url)
