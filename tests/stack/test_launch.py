"""What a command that starts its own stack leaves behind: nothing, or after a failure its logs."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvpilot.stack import StackError
from kvpilot.stack.launch import own_state
from kvpilot.stack.state import Status, write_status

WAITS = """
import asyncio, signal, sys, time
from kvpilot.stack.launch import own_state
if "ignored" in sys.argv:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
with own_state("test") as folder:
    print(folder, flush=True)
    if "asyncio" in sys.argv:
        asyncio.run(asyncio.sleep(60))
    else:
        time.sleep(60)
"""


@pytest.fixture(autouse=True)
def _temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))


@pytest.mark.parametrize(
    ("how", "number"),
    [
        *((how, number) for how in ("plain", "asyncio") for number in (signal.SIGINT, signal.SIGTERM)),
        ("plain", signal.SIGHUP),
        ("ignored", signal.SIGTERM),
    ],
)
def test_an_interrupted_command_removes_its_state(how: str, number: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WAITS, how], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as command:
        assert command.stdout is not None
        folder = Path(command.stdout.readline().strip())
        assert folder.is_dir()
        command.send_signal(number)
        assert command.wait(20) != 0
    assert not folder.exists()


def test_logs_are_kept_when_the_stack_fails(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(StackError), own_state("test") as folder:
        (folder / "logs").mkdir()
        (folder / "disk").mkdir()
        write_status(folder, Status(1, 0.0))
        raise StackError("not ready")
    assert (folder / "logs").is_dir()
    assert not (folder / "disk").exists()
    assert str(folder) in capsys.readouterr().err


def test_nothing_is_kept_when_no_stack_was_started_or_all_went_well(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(StackError), own_state("test") as refused:
        raise StackError("port taken")
    with own_state("test") as fine:
        write_status(fine, Status(1, 0.0))
    assert not refused.exists() and not fine.exists()
    assert not capsys.readouterr().err


def test_a_state_folder_that_was_given_stays(tmp_path: Path) -> None:
    given = tmp_path / "given"
    given.mkdir()
    with own_state("test", given) as folder:
        assert folder == given
    assert given.is_dir()
