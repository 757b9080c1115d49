"""What the inspecting commands print of a coordinator's answers, and where they look for one."""

from __future__ import annotations

import io
import json
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from kvpilot.cli import main
from kvpilot.cli.output import console, literal
from kvpilot.replay.report import print_report

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

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0].removeprefix("/kvpilot/v1/")
            body = json.dumps(pages["session" if path.startswith("sessions/") else path]).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def kvpilot(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    monkeypatch.setattr(sys, "argv", ["kvpilot", *args])
    with pytest.raises(SystemExit) as end:
        main()
    return int(end.value.code or 0)


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        (("sessions",), [*AWKWARD, "[/dim]", "[/]"]),
        (("session", AWKWARD[0]), [AWKWARD[0], "[/dim]", "[/]", "[/i]", "[/b]"]),
        (("actions",), [*AWKWARD, "[/reason]"]),
    ],
)
def test_names_are_printed_as_they_are(
    command: tuple[str, ...],
    shown: list[str],
    control: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert kvpilot(monkeypatch, *command, "--control", control) == 0
    printed = capsys.readouterr().out
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
def test_a_control_url_that_is_none_is_refused(
    command: str, url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert kvpilot(monkeypatch, command, "--control", url) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"kvpilot: --control is {url!r}: it must be a URL")
    assert len(said.splitlines()) == 1


def test_without_a_stack_and_a_fixed_port_there_is_nobody_to_ask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVPILOT_COORDINATOR__PORT", "0")
    assert kvpilot(monkeypatch, "sessions", "--state", str(tmp_path)) == 2
    assert "no stack is up" in capsys.readouterr().err


def test_an_empty_state_folder_is_not_the_current_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert kvpilot(monkeypatch, "down", "--state", "") == 2
    assert capsys.readouterr().err == "kvpilot: --state is empty: name a folder\n"
