"""The ``kvpilot`` command in this process, which is quicker than starting one."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from kvpilot.cli import main

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def kvpilot(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command with these arguments; returns exit code, stdout and stderr."""

    def run(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["kvpilot", *args])
        with pytest.raises(SystemExit) as end:
            main()
        return int(end.value.code or 0), *capsys.readouterr()

    return run


@pytest.fixture
def refused(kvpilot: Run) -> Callable[..., str]:
    """Runs the command, which must refuse; returns what it says, which must be one line."""

    def run(*args: str) -> str:
        code, out, said = kvpilot(*args)
        assert (code, out) == (2, "")
        assert said.startswith("kvpilot: ")
        assert said.count("\n") == 1
        return said.removeprefix("kvpilot: ").strip()

    return run
