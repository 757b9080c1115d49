"""What `kvpilot sessions` shows of more sessions than fit on one page."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from kvpilot.cli import inspect

SESSION = {
    "tenant": "default",
    "state": "running",
    "since": time.time(),
    "turns": 1,
    "tokens": 0,
    "chunks": 0,
    "resident": {"host": 0, "disk": 0},
    "parent": None,
}


@pytest.mark.parametrize(("total", "said"), [(9000, True), (5, False)])
def test_it_is_said_when_there_are_more_sessions(
    total: int, said: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(control: str, config: Path, state: Path, path: str) -> dict[str, Any]:
        assert path == "/sessions?limit=5"
        return {"sessions": [{"id": f"s{n}", **SESSION} for n in range(5)], "total": total}

    monkeypatch.setattr(inspect, "_get", answer)
    inspect.sessions(limit=5)
    shown = capsys.readouterr().out
    assert all(f"s{n}" in shown for n in range(5))
    assert ("the latest 5 of 9000 sessions" in shown) is said
