"""The stack as a context manager, for tests, replays, benchmarks and the demo."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from kvpilot.config import Config, dump_config
from kvpilot.stack import StackError
from kvpilot.stack.state import Status, clean_leftovers, read_status, status_file, supervisor_pid
from kvpilot.stack.supervisor import endpoints

START_TIMEOUT_S = 600.0
"""Measured: a first start on a slow machine takes more than six minutes."""


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Where a running stack answers. ``config`` is resolved: real ports, the model's path."""

    gateway_url: str
    control_url: str
    engine_url: str
    lmcache_urls: tuple[str, ...]
    lmcache_coordinator_url: str
    kv_events: str
    state_dir: Path
    config: Config

    @property
    def status(self) -> Status:
        """The stack's processes and their restarts as of now. Raises StackError when it is gone."""
        status = read_status(self.state_dir)
        if status is None:
            raise StackError(f"no stack has run in {self.state_dir}")
        return status

    @property
    def pids(self) -> dict[str, int]:
        """Live pids by name: lmcache-coordinator, lmcache, vllm, coordinator, gateway-0, …"""
        return {name: process.pid for name, process in self.status.processes.items() if process.pid}

    @property
    def restarts(self) -> dict[str, int]:
        return {name: process.restarts for name, process in self.status.processes.items()}


def running(config: Config) -> Endpoints | None:
    """The stack that is up and ready in the state folder of ``config``, if any."""
    status = read_status(config.state_dir)
    if status is None or status.state != "ready" or supervisor_pid(config.state_dir) != status.pid:
        return None
    return _endpoints(status)


def with_free_ports(config: Config) -> Config:
    """``config`` with every port left to chance, so that stacks can run side by side."""
    return config.with_overrides(
        gateway={"port": 0},
        coordinator={"port": 0},
        engine={"url": "http://127.0.0.1:0"},
        lmcache={
            "nodes": ["http://127.0.0.1:0"],
            "coordinator": "http://127.0.0.1:0",
            "mq_port": 0,
            "metrics_port": 0,
        },
    )


@contextmanager
def own_state(name: str, given: Path | None = None) -> Iterator[Path]:
    """A state folder for stacks that end with this block: ``given``, else a temporary one.

    The temporary one is removed at the end; after an error its logs are kept, and where is said. SIGTERM and
    SIGHUP end the block as Ctrl-C does, so that they leave nothing behind either.
    """
    before = {
        number: signal.signal(number, _as_ctrl_c)
        for number in (signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) is not signal.SIG_IGN  # nohup means it.
    }
    folder = given or Path(tempfile.mkdtemp(prefix=f"kvpilot-{name}-"))
    keep = given is not None
    try:
        yield folder
    except Exception:
        if given is None and any(folder.rglob(status_file(Path()).name)):
            keep = True
            for disk in [*folder.rglob("disk")]:
                shutil.rmtree(disk, ignore_errors=True)
            print(f"logs are kept below {folder}", file=sys.stderr, flush=True)
        raise
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
        for number, handler in before.items():
            signal.signal(number, handler)


def _as_ctrl_c(_number: int, frame: FrameType | None) -> None:
    # asyncio puts a handler of its own there; where SIGINT is ignored (background jobs) there is none.
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler):
        raise KeyboardInterrupt
    handler(signal.SIGINT, frame)


@contextmanager
def launch(
    config: Config, *, echo: bool = False, wait_s: float = START_TIMEOUT_S, embedded: bool = True
) -> Iterator[Endpoints]:
    """Start a stack, yield its endpoints once everything answers, stop it at the end.

    The stack ends with the calling process, however that ends. ``echo`` shows progress on stderr;
    ``embedded=False`` is ``kvpilot serve``: gateway and coordinator for engines that are already up.
    Raises StackError when it cannot be started or is not ready after ``wait_s`` seconds.
    """
    with tempfile.TemporaryFile() as said:
        supervisor = subprocess.Popen(
            [sys.executable, "-m", "kvpilot.stack", *(() if embedded else ("--serve",))],
            stdin=subprocess.PIPE,
            stderr=None if echo else said,
            stdout=subprocess.DEVNULL,
            # Ctrl-C reaches it through the closing pipe, in order, not as a signal beside ours.
            process_group=0,
        )
        try:
            assert supervisor.stdin is not None
            with suppress(BrokenPipeError):  # It ended already; why, is said below.
                supervisor.stdin.write(dump_config(config) + b"\n")
                supervisor.stdin.flush()
            status = _until_ready(config.state_dir, supervisor, wait_s)
            if status is None:
                said.seek(0)
                lines = said.read().decode(errors="replace").strip().splitlines()
                why = lines[-1].removeprefix("kvpilot: ") if lines else "the stack did not start: see above"
                raise StackError(why)
            yield _endpoints(status)
        finally:
            _stop(supervisor, config.state_dir)


def _until_ready(state_dir: Path, supervisor: subprocess.Popen[bytes], wait_s: float) -> Status | None:
    deadline = time.monotonic() + wait_s
    while supervisor.poll() is None:
        status = read_status(state_dir)
        if status is not None and status.pid == supervisor.pid and status.state == "ready":
            return status
        if time.monotonic() > deadline:
            raise StackError(f"the stack was not ready after {wait_s:.0f} s (logs: {state_dir / 'logs'})")
        time.sleep(0.05)
    return None


def _stop(supervisor: subprocess.Popen[bytes], state_dir: Path) -> None:
    with suppress(OSError):
        if supervisor.stdin is not None:
            supervisor.stdin.close()
    try:
        supervisor.wait(60)
    except subprocess.TimeoutExpired:
        supervisor.kill()
        supervisor.wait()
        clean_leftovers(state_dir, of_supervisor=supervisor.pid)


def _endpoints(status: Status) -> Endpoints:
    config = status.config
    where = endpoints(config)
    return Endpoints(
        gateway_url=str(where["gateway"]),
        control_url=str(where["control"]),
        engine_url=config.engine.url,
        lmcache_urls=config.lmcache.nodes,
        lmcache_coordinator_url=config.lmcache.coordinator,
        kv_events=config.engine.kv_events,
        state_dir=config.state_dir,
        config=config,
    )
