"""Stopping a stack from outside."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from kvpilot.stack.state import clean_leftovers, supervisor_pid


def stop(state_dir: Path, patience_s: float = 60.0) -> str:
    """Stop the stack of ``state_dir``, remove what a hard kill left; returns what was done, in a line."""
    pid = supervisor_pid(state_dir)
    if pid is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + patience_s
        while supervisor_pid(state_dir) == pid and time.monotonic() < deadline:
            time.sleep(0.05)
        if supervisor_pid(state_dir) == pid:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    ended, removed = clean_leftovers(state_dir)
    if pid is not None:
        return f"stopped (pid {pid})"
    if ended or removed:
        return f"cleaned up after a stack that was killed: {len(ended)} processes, {len(removed)} segments"
    return f"nothing is running in {state_dir}"
