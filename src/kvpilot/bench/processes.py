"""Processes a gateway benchmark runs: always stopped again, never more than one line of trouble."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from kvpilot.bench.load import PATH
from kvpilot.config import Config, dump_config
from kvpilot.gateway.__main__ import bind
from kvpilot.stack.state import remove_runtime

START_TIMEOUT_S = 180.0
_METRIC = re.compile(r'^kvpilot_gateway_events_(\w+)\{worker="(\d+)"\} (\S+)$', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Child:
    popen: subprocess.Popen[bytes]
    log: Path | None

    def complaint(self) -> str:
        """The last line it wrote."""
        lines = self.log.read_text(errors="replace").split("\n") if self.log else []
        return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")


@contextmanager
def process(command: Sequence[str], log: Path | None = None, pass_fds: Sequence[int] = ()) -> Iterator[Child]:
    """A child with what it starts itself; both are gone afterwards."""
    with ExitStack() as stack:
        output = stack.enter_context(log.open("w")) if log else subprocess.DEVNULL
        child = subprocess.Popen(
            list(command), stdout=output, stderr=subprocess.STDOUT, pass_fds=pass_fds, start_new_session=True
        )
        try:
            yield Child(child, log)
        finally:
            child.terminate()
            with suppress(subprocess.TimeoutExpired):
                child.wait(10)
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def get(url: str, body: bytes | None = None) -> str:
    request = urllib.request.Request(url, body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=10) as reply:
        return str(reply.read().decode())


def until_answering(
    name: str, child: Child, url: str, body: bytes | None = None, timeout_s: float = START_TIMEOUT_S
) -> None:
    """Until ``url`` gives a 200. Raises RuntimeError when it does not in time, or its process has ended."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and child.popen.poll() is None:
        try:
            get(url, body)
            return
        except OSError:
            time.sleep(0.3)
    raise RuntimeError(f"{name} does not answer: {child.complaint()}")


def until_chatting(name: str, child: Child, url: str) -> None:
    until_answering(name, child, url + PATH, b'{"model":"mock","messages":[{"role":"user","content":"hi"}]}')


@contextmanager
def mock_engine() -> Iterator[str]:
    """Its URL."""
    url = f"http://127.0.0.1:{free_port()}"
    with process([sys.executable, "-m", "kvpilot.bench.mock_engine", url.rpartition(":")[2]]) as child:
        until_chatting("the mock engine", child, url)
        yield url


@dataclass(frozen=True)
class GatewayUnderTest:
    """Gateway workers on one socket."""

    url: str
    config: Config
    config_file: Path

    def events(self) -> dict[str, int]:
        """Events of all workers: ``sent`` to the coordinator, ``queued`` for it, ``shed``."""
        seen: dict[tuple[str, str], float] = {}
        for _ in range(200):
            found = _METRIC.findall(get(self.url + "/metrics"))
            seen.update({(name, worker): float(value) for name, worker, value in found})
            if len({worker for _, worker in seen}) == self.config.gateway.workers:
                break
        totals = dict.fromkeys(("sent", "queued", "shed"), 0)
        for (name, _), value in seen.items():
            totals[name] += int(value)
        return totals


@contextmanager
def kvpilot_gateway(folder: Path, engine_url: str, workers: int) -> Iterator[GatewayUnderTest]:
    """kvpilot's gateway as ``kvpilot up`` runs it, without anything that takes its events."""
    with ExitStack() as stack:
        listener = stack.enter_context(bind("127.0.0.1", 0))
        listener.listen(1024)
        port = listener.getsockname()[1]
        nowhere = "http://127.0.0.1:1"
        config = Config().with_overrides(
            gateway={"port": port, "workers": workers},
            engine={"url": engine_url, "model": "mock", "cache_model_name": "mock"},
            coordinator={"port": free_port()},
            lmcache={"nodes": [nowhere], "coordinator": nowhere, "timeout_s": 0.5},
            state={"dir": str(folder / "state")},
        )
        # Whoever takes the events may make it; it goes when they and the workers have ended.
        stack.callback(remove_runtime, config)
        file = folder / "kvpilot.json"
        file.write_bytes(dump_config(config))
        command = [
            sys.executable,
            "-m",
            "kvpilot.gateway",
            "--config",
            str(file),
            "--fd",
            str(listener.fileno()),
        ]
        for number in range(workers):
            log = folder / f"gateway-{number}.log"
            child = stack.enter_context(process(command, log, pass_fds=(listener.fileno(),)))
        url = f"http://127.0.0.1:{port}"
        until_chatting("the gateway", child, url)
        yield GatewayUnderTest(url, config, file)
