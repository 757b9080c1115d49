"""The state folder's records: who supervises it, what runs, what a hard kill would leave behind."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import msgspec
import psutil

from kvpilot.config import Config
from kvpilot.link import runtime_dir
from kvpilot.stack import StackError, shm


class ProcessStatus(msgspec.Struct):
    """One supervised process as ``status.json`` shows it."""

    pid: int = 0
    started: float = 0.0
    """Kernel start time of ``pid`` (unix seconds): with it a reused pid is told apart."""
    state: str = "waiting"
    """waiting, starting, ready, restarting or stopped."""
    restarts: int = 0
    ready_s: float | None = None
    """Seconds from the last start to ready."""
    log: str = ""
    last_exit: str = ""


class Status(msgspec.Struct):
    """What ``status.json`` holds, replaced as a whole on each change."""

    pid: int
    started: float
    state: str = "starting"
    error: str = ""
    endpoints: dict[str, str | list[str]] = {}
    processes: dict[str, ProcessStatus] = {}
    shm: dict[str, int] = {}
    """Shared-memory segments (name → inode) the stack's processes use."""
    guard: int = 0
    """Process that cleans up when the supervisor is killed hard."""
    config: Config = Config()
    """As resolved: real ports, the model's path."""


def status_file(state_dir: Path) -> Path:
    return state_dir / "status.json"


def read_status(state_dir: Path) -> Status | None:
    """The last written status; None when there is none or it cannot be read."""
    try:
        return msgspec.json.decode(status_file(state_dir).read_bytes(), type=Status)
    except (OSError, msgspec.MsgspecError):
        return None


def write_status(state_dir: Path, status: Status) -> None:
    target = status_file(state_dir)
    scratch = target.with_suffix(".tmp")
    scratch.write_bytes(msgspec.json.format(msgspec.json.encode(status)))
    scratch.replace(target)


def start_time(pid: int) -> float:
    """Kernel start time of a process, 0.0 when it is gone."""
    try:
        process = psutil.Process(pid)
        return 0.0 if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.Error:
        return 0.0


def is_same(pid: int, started: float) -> bool:
    """Whether ``pid`` still is the process that started then."""
    return pid > 0 and abs(start_time(pid) - started) < 0.05


class Lock:
    """Held by the one supervisor of a state folder; its file names the holder."""

    def __init__(self, state_dir: Path) -> None:
        """Raises StackError when another supervisor holds the folder, or it cannot be written."""
        self._state_dir = state_dir
        self._made_it = not state_dir.exists()
        try:
            state_dir.mkdir(parents=True, exist_ok=True)
            self._handle = (state_dir / "supervisor.pid").open("a+")
        except OSError as error:
            raise StackError(
                f"cannot write to state folder {state_dir} ({error.strerror}): set --state"
            ) from None
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._handle.seek(0)
            pid = (self._handle.read().split() or ["?"])[0]
            self._handle.close()
            raise StackError(
                f"already running in {state_dir} (pid {pid}): `kvpilot down` stops it, "
                "--state starts another one"
            ) from None
        self._handle.truncate(0)
        self._handle.write(f"{os.getpid()} {start_time(os.getpid())}\n")
        self._handle.flush()

    def release(self, *, unused: bool = False) -> None:
        """Give the folder back; one that was made for a stack that was then refused goes away again.

        Otherwise the file stays: removing it would race with the next holder.
        """
        if unused and self._made_it:
            shutil.rmtree(self._state_dir, ignore_errors=True)
        self._handle.truncate(0)
        self._handle.close()


def supervisor_pid(state_dir: Path) -> int | None:
    """Pid of the live supervisor of ``state_dir``, None when there is none."""
    try:
        pid, started = (state_dir / "supervisor.pid").read_text().split()
        return int(pid) if is_same(int(pid), float(started)) else None
    except (OSError, ValueError):
        return None


def kill_groups(groups: Iterable[int], grace_s: float) -> None:
    """SIGTERM to process groups, SIGKILL to what is left of them after ``grace_s`` seconds."""
    left = [group for group in groups if _signal_group(group, signal.SIGTERM)]
    deadline = time.monotonic() + grace_s
    while left and time.monotonic() < deadline:
        time.sleep(0.05)
        left = [group for group in left if group_alive(group)]
    for group in left:
        _signal_group(group, signal.SIGKILL)
    deadline = time.monotonic() + 5
    while any(group_alive(group) for group in left) and time.monotonic() < deadline:
        time.sleep(0.02)


def group_alive(group: int) -> bool:
    """Whether any process of the group is alive (zombies do not count)."""
    if not _signal_group(group, 0):
        return False
    for process in psutil.process_iter(["status"]):
        with suppress(psutil.Error, OSError):
            if os.getpgid(process.pid) == group and process.info["status"] != psutil.STATUS_ZOMBIE:
                return True
    return False


def _signal_group(group: int, number: int) -> bool:
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def remove_runtime(config: Config) -> None:
    """Remove the folder of sockets and the engines' temporary files of a stack that has ended."""
    shutil.rmtree(runtime_dir(config), ignore_errors=True)


def clean_leftovers(state_dir: Path, of_supervisor: int | None = None) -> tuple[list[str], list[str]]:
    """End what a supervisor that was killed hard left running, and remove its shared memory.

    Only for a folder without a live supervisor, or naming a dead one (``of_supervisor``): what a new one
    has started is then left alone. Returns names of ended processes and removed segments.
    """
    status = read_status(state_dir)
    if status is None or of_supervisor not in (None, status.pid):
        return [], []
    # A group outlives its leader: vLLM's children go on when the server process alone is killed. The
    # leader's pid stays taken as long as its group exists, so the number cannot be somebody else's by now
    # unless the leader is alive with another start time.
    orphans = {
        name: process.pid
        for name, process in status.processes.items()
        if process.pid > 0 and start_time(process.pid) in (0.0, process.started) and group_alive(process.pid)
    }
    kill_groups(orphans.values(), grace_s=5)
    removed = shm.remove_orphans(status.shm)
    remove_runtime(status.config)
    if orphans or removed or status.state != "stopped":
        status.state, status.shm = "stopped", {}
        for process in status.processes.values():
            process.pid, process.state = 0, "stopped"
        write_status(state_dir, status)
    return sorted(orphans), removed
