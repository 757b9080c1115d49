"""The real engines under the supervisor."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvpilot.config import Config
from kvpilot.stack.launch import Endpoints, launch, running
from tests.e2e.peers import alive

pytestmark = pytest.mark.engine


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=30) as reply:
        return json.load(reply)


def ask(base: str, text: str, **extra: Any) -> Any:
    body = {"model": "m16k", "messages": [{"role": "user", "content": text}], "max_tokens": 4, **extra}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{base}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as reply:
        return json.load(reply)


def until(condition: Callable[[], object], within_s: float) -> float:
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() - begun < within_s, "did not happen in time"
        time.sleep(0.05)
    return time.monotonic() - begun


def test_everything_answers_once_it_is_up(stack: Endpoints) -> None:
    assert set(stack.pids) == {
        "lmcache-coordinator",
        "lmcache",
        "vllm",
        "coordinator",
        "gateway-0",
        "gateway-1",
    }
    assert get(f"{stack.gateway_url}/health")["status"] == "ok"
    assert get(f"{stack.control_url}/kvpilot/v1/health")["status"] == "ok"
    assert get(f"{stack.gateway_url}/v1/models")["data"][0]["id"] == "m16k"
    tiers = get(f"{stack.lmcache_urls[0]}/status")
    assert tiers["chunk_size"] == stack.config.lmcache.chunk_size
    assert get(f"{stack.lmcache_coordinator_url}/instances")["instances"], "the node is registered"
    assert running(stack.config) == stack


def test_requests_with_tools_are_accepted(stack: Endpoints) -> None:
    function = {"name": "ls", "description": "list files", "parameters": {"type": "object", "properties": {}}}
    reply = ask(stack.gateway_url, "list the files", tools=[{"type": "function", "function": function}])
    assert reply["choices"][0]["message"]["role"] == "assistant"


def test_killed_gateway_workers_are_back_within_two_seconds_and_connections_wait(stack: Endpoints) -> None:
    before = {name: pid for name, pid in stack.pids.items() if name.startswith("gateway-")}
    for pid in before.values():
        os.kill(pid, signal.SIGKILL)
    begun = time.monotonic()
    # No retry: the connection waits in the supervisor's socket until the next worker takes it.
    assert get(f"{stack.gateway_url}/health")["status"] == "ok"
    until(lambda: all(stack.pids[name] not in (0, pid) for name, pid in before.items()), 2)
    assert time.monotonic() - begun < 2
    assert all(stack.restarts[name] >= 1 for name in before)


def test_serve_uses_engines_that_are_up_and_leaves_them_alone(stack: Endpoints, tmp_path: Path) -> None:
    config = Config().with_overrides(
        engine={"url": stack.engine_url, "kv_events": stack.kv_events},
        lmcache={"nodes": list(stack.lmcache_urls), "coordinator": stack.lmcache_coordinator_url},
        gateway={"port": 0, "workers": 2},
        coordinator={"port": 0, "mode": "passive"},
        state={"dir": str(tmp_path)},
    )
    with launch(config, embedded=False, wait_s=60) as served:
        assert set(served.pids) == {"coordinator", "gateway-0", "gateway-1"}
        assert get(f"{served.control_url}/kvpilot/v1/health")["mode"] == "passive"
        assert ask(served.gateway_url, "hello there")["usage"]["completion_tokens"] > 0
        pids = set(served.pids.values())
    assert not alive(pids)
    assert get(f"{stack.gateway_url}/health")["status"] == "ok"


def test_doctor_finds_a_running_stack_healthy(stack: Endpoints) -> None:
    doctor = [sys.executable, "-m", "kvpilot.cli", "doctor", "--json", "--state", str(stack.state_dir)]
    done = subprocess.run(doctor, capture_output=True, text=True, timeout=60, check=False)
    report = json.loads(done.stdout)
    assert done.returncode == 0, report
    assert report["healthy"]
    checks = {finding["check"]: finding["verdict"] for finding in report["findings"]}
    assert checks["engine"] == checks["LMCache"] == checks["LMCache coordinator"] == "ok"
