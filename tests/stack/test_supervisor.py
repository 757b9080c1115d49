"""A supervisor with small real processes in place of the engines: what dies, comes back, is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvpilot.stack import shm
from kvpilot.stack.down import stop
from kvpilot.stack.state import Status, clean_leftovers, read_status, supervisor_pid
from tests.e2e.peers import alive

SERVICE = """
import http.server, multiprocessing.shared_memory as m, subprocess, sys, threading
port = int(sys.argv[1])
segment = m.SharedMemory(create=True, size=4096)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("Content-Length", "0"); self.end_headers()
    def log_message(self, *a): pass
http.server.HTTPServer(("127.0.0.1", port), Answer).serve_forever()
"""
"""Answers its ready check, holds a shared-memory segment and has a child, as vLLM does."""

RUNNER = """
import asyncio, json, signal, socket, sys
from pathlib import Path
from kvpilot.config import Config
from kvpilot.stack.plan import ProcessSpec
from kvpilot.stack.prepare import Prepared
from kvpilot.stack.report import Reporter
from kvpilot.stack.state import Lock
from kvpilot.stack.supervisor import Supervisor
wanted = json.loads(sys.argv[1])
config = Config().with_overrides(state={"dir": wanted["state"]})
(config.state_dir / "logs").mkdir(parents=True)
lock = Lock(config.state_dir)
specs = [ProcessSpec(name, tuple(argv), url, own=own) for name, argv, url, own in wanted["specs"]]
async def main():
    with Reporter(config.state_dir / "logs" / "supervisor.log") as reporter:
        supervisor = Supervisor(Prepared(config, specs, socket.socket()), reporter)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, supervisor.stop)
        await supervisor.run()
asyncio.run(main())
"""

Start = Callable[..., tuple[subprocess.Popen[str], Path]]


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    script = tmp_path / "service.py"
    script.write_text(SERVICE)
    started: list[tuple[subprocess.Popen[str], Path]] = []

    def begin(**own_by_name: bool) -> tuple[subprocess.Popen[str], Path]:
        state = tmp_path / "state"
        specs = []
        for name, own in own_by_name.items():
            port = free_port()
            specs.append((name, [sys.executable, str(script), str(port)], f"http://127.0.0.1:{port}", own))
        wanted = json.dumps({"state": str(state), "specs": specs})
        process = subprocess.Popen([sys.executable, "-c", RUNNER, wanted], stderr=subprocess.PIPE, text=True)
        started.append((process, state))
        return process, state

    yield begin
    for process, state in started:
        process.kill()
        process.communicate()
        clean_leftovers(state)


def until(condition: Callable[[], object], within_s: float = 20) -> float:
    """Seconds until ``condition`` held."""
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() - begun < within_s, "did not happen in time"
        time.sleep(0.02)
    return time.monotonic() - begun


def status_of(state: Path) -> Status:
    status = read_status(state)
    assert status is not None
    return status


def is_ready(state: Path) -> bool:
    status = read_status(state)
    return status is not None and status.state == "ready" and len(status.shm) >= len(status.processes)


def everything(state: Path) -> tuple[set[int], set[str]]:
    """Pids (grandchildren included) and shared-memory segments of a running stack."""
    status = status_of(state)
    return shm.family(process.pid for process in status.processes.values()), set(status.shm)


def segments_left(names: set[str]) -> set[str]:
    return {name for name in names if (Path("/dev/shm") / name).exists()}


def test_a_clean_stop_leaves_nothing(start: Start) -> None:
    process, state = start(engine=False, worker=True)
    until(lambda: is_ready(state))
    pids, segments = everything(state)
    assert len(pids) >= 4, "two services with a child each"
    assert supervisor_pid(state) == process.pid
    assert stop(state) == f"stopped (pid {process.pid})"
    process.wait(10)
    assert not alive(pids)
    assert not segments_left(segments)
    assert status_of(state).state == "stopped"


def test_a_supervisor_killed_hard_takes_everything_with_it(start: Start) -> None:
    process, state = start(engine=False, worker=True)
    until(lambda: is_ready(state))
    pids, segments = everything(state)
    process.kill()
    until(lambda: not alive(pids) and not segments_left(segments))


def test_down_cleans_up_when_even_the_guard_was_killed(start: Start) -> None:
    process, state = start(engine=False)
    until(lambda: is_ready(state))
    pids, segments = everything(state)
    status = status_of(state)
    # Stopped first and killed hard as well, so that nobody tidies up after the others.
    os.kill(process.pid, signal.SIGSTOP)
    for pid in status.guard, status.processes["engine"].pid, process.pid:
        os.kill(pid, signal.SIGKILL)
    process.wait()
    assert alive(pids), "the grandchild goes on"
    assert "cleaned up" in stop(state)
    assert not alive(pids)
    assert not segments_left(segments)
    assert "nothing is running" in stop(state)


def test_a_killed_worker_is_back_within_two_seconds(start: Start) -> None:
    _, state = start(worker=True, engine=False)
    until(lambda: is_ready(state))
    before = status_of(state).processes["worker"].pid
    os.kill(before, signal.SIGKILL)

    def back() -> bool:
        worker = status_of(state).processes["worker"]
        return worker.state == "ready" and worker.pid != before

    assert until(back) < 2
    assert status_of(state).processes["worker"].restarts == 1
    assert "SIGKILL" in (state / "logs" / "supervisor.log").read_text()


def test_a_killed_engine_is_restarted_without_the_old_ones_children(start: Start) -> None:
    _, state = start(engine=False)
    until(lambda: is_ready(state))
    pids, _ = everything(state)
    os.kill(status_of(state).processes["engine"].pid, signal.SIGKILL)
    until(lambda: status_of(state).processes["engine"].restarts == 1 and is_ready(state))
    until(lambda: status_of(state).processes["engine"].state == "ready")
    assert not alive(pids)


def test_a_process_that_dies_during_start_ends_the_start_with_its_last_words(
    start: Start, tmp_path: Path
) -> None:
    (tmp_path / "service.py").write_text(
        textwrap.dedent("""
        print("loading")
        raise RuntimeError("no such weights")
        """)
    )
    process, state = start(engine=False)
    _, said = process.communicate(timeout=20)
    assert process.returncode != 0
    assert "engine stopped during start (exit code 1): RuntimeError: no such weights" in said
    assert str(state / "logs" / "engine.log") in said


def test_a_second_supervisor_of_the_same_folder_is_refused(start: Start) -> None:
    process, state = start(engine=False)
    until(lambda: is_ready(state))
    up = [sys.executable, "-m", "kvpilot.cli", "up", "--any-ports", "--state", str(state)]
    done = subprocess.run(up, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2
    assert f"already running in {state} (pid {process.pid})" in done.stderr
    assert "kvpilot down" in done.stderr
    assert is_ready(state), "the first one is not disturbed"


def test_shared_memory_of_others_is_never_removed() -> None:
    from multiprocessing.shared_memory import SharedMemory

    used, other = SharedMemory(create=True, size=64), SharedMemory(create=True, size=64)
    try:
        noted = shm.segments_of([os.getpid()])
        assert {used.name, other.name} <= set(noted)
        assert shm.remove_orphans(noted) == [], "still mapped"
        wrong_inode = {used.name: noted[used.name] + 1}
        used.close()
        assert shm.remove_orphans(wrong_inode) == [], "the name was taken over by somebody else's"
        assert shm.remove_orphans(noted) == [used.name]
    finally:
        other.close()
        other.unlink()
