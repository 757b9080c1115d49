"""The worker process: inherited sockets, and a clean end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpilot.config import Config, dump_config
from kvpilot.gateway.__main__ import bind


def start(folder: Path, *arguments: str, port: int = 0, fds: tuple[int, ...] = ()) -> subprocess.Popen[str]:
    config = Config().with_overrides(
        gateway={"port": port}, engine={"url": "http://127.0.0.1:1"}, state={"dir": str(folder)}
    )
    file = folder / "config.json"
    file.write_bytes(dump_config(config))
    return subprocess.Popen(
        [sys.executable, "-m", "kvpilot.gateway", "--config", str(file), *arguments],
        pass_fds=fds,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "XDG_RUNTIME_DIR": str(folder)},
    )


@pytest.fixture
def port() -> Iterator[tuple[int, int]]:
    """An open listening socket's file descriptor and port."""
    with bind("127.0.0.1", 0) as listener:
        listener.listen()
        yield listener.fileno(), listener.getsockname()[1]


def ask(port: int) -> int:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/models")
    try:
        with urllib.request.urlopen(request, timeout=30) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as error:
        assert json.load(error)["error"]["type"] == "api_connection_error"
        return error.code


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_killed_worker_is_replaced_without_refused_connections(
    tmp_path: Path, port: tuple[int, int], number: signal.Signals
) -> None:
    descriptor, address = port
    first = start(tmp_path, "--fd", str(descriptor), fds=(descriptor,))
    assert ask(address) == 502
    first.kill()
    first.wait(10)
    second = start(tmp_path, "--fd", str(descriptor), fds=(descriptor,))
    assert ask(address) == 502
    began = time.monotonic()
    second.send_signal(number)
    assert second.wait(10) == 0
    assert time.monotonic() - began < 5


def test_a_taken_port_is_one_clear_line(tmp_path: Path, port: tuple[int, int]) -> None:
    worker = start(tmp_path, port=port[1])
    _, errors = worker.communicate(timeout=30)
    assert worker.returncode == 1
    assert len(errors.splitlines()) == 1
    assert str(port[1]) in errors
