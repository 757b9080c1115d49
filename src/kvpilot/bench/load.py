"""Load on an HTTP endpoint: wrk when it is installed, else a generator of our own (which takes more of the CPU)."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from kvpilot.gateway.http_client import Client

PATH = "/v1/chat/completions"
HEADERS = {
    "content-type": "application/json",
    "x-session-id": "bench-session",
    "authorization": "Bearer bench",
}

_DONE = """
done = function(summary, latency, requests)
  io.write(string.format("RESULT %d %d %d %d %d %d\\n", summary.requests, summary.duration,
    latency:percentile(50), latency:percentile(99),
    summary.errors.status, summary.errors.connect + summary.errors.read + summary.errors.timeout))
end
"""


@dataclass(frozen=True, slots=True)
class LoadResult:
    """Latencies in milliseconds; ``failed`` counts replies that were not 2xx or did not come."""

    requests: int
    per_second: float
    p50_ms: float
    p99_ms: float
    failed: int


def generator_name() -> str:
    return "wrk" if shutil.which("wrk") else "asyncio"


def request_body(size: int, *, stream: bool, session: str = "bench-session") -> bytes:
    """A chat request of about ``size`` bytes: a system text, then turns; with openJiuwen's ids."""
    turn = "The quick brown fox jumps over the lazy dog.\\n" * 60
    messages = [{"role": "system", "content": "You are a coding agent."}]
    while len(messages) * (len(turn) + 60) < size:
        messages.append({"role": ("user", "assistant")[len(messages) % 2], "content": turn})
    body = {
        "model": "mock",
        "stream": stream,
        "max_tokens": 64,
        "agent_hint": {"session_id": session, "parent_session_id": session},
        "messages": messages,
    }
    return json.dumps(body).encode()


def measure(url: str, body: bytes, connections: int, seconds: float) -> LoadResult:
    """Closed-loop load with ``connections`` at once."""
    if generator_name() == "wrk":
        return _wrk(url, body, connections, seconds)
    return asyncio.run(_own(url, body, connections, seconds))


def _wrk(url: str, body: bytes, connections: int, seconds: float) -> LoadResult:
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "post.lua"
        headers = "".join(f'wrk.headers["{name}"]="{value}"\n' for name, value in HEADERS.items())
        script.write_bytes(
            b'wrk.method="POST"\n' + headers.encode() + b"wrk.body=[==[" + body + b"]==]\n" + _DONE.encode()
        )
        command = ["wrk", "-t1", f"-c{connections}", f"-d{max(1, round(seconds))}s", "--timeout", "30s"]
        done = subprocess.run(
            [*command, "-s", str(script), url + PATH], capture_output=True, text=True, timeout=seconds + 60
        )
    found = re.search(r"RESULT (\d+) (\d+) (\d+) (\d+) (\d+) (\d+)", done.stdout)
    if not found:
        raise RuntimeError(f"wrk failed: {(done.stderr or done.stdout).strip()[:300]}")
    requests, duration, p50, p99, bad, broken = map(int, found.groups())
    return LoadResult(requests, requests / (duration / 1e6), p50 / 1000, p99 / 1000, bad + broken)


async def _own(url: str, body: bytes, connections: int, seconds: float) -> LoadResult:
    client = Client(url, connect_timeout_s=5, read_timeout_s=60)
    headers = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
    latencies: list[float] = []
    failed = 0
    began = time.perf_counter()

    async def one() -> None:
        nonlocal failed
        while (start := time.perf_counter()) - began < seconds:
            async with await client.request("POST", PATH, headers, body) as response:
                await response.read()
                failed += response.status != 200
            latencies.append((time.perf_counter() - start) * 1000)

    await asyncio.gather(*(one() for _ in range(connections)))
    client.close()
    took = time.perf_counter() - began
    ordered = sorted(latencies)
    return LoadResult(
        requests=len(ordered),
        per_second=len(ordered) / took,
        p50_ms=ordered[len(ordered) // 2],
        p99_ms=ordered[int(len(ordered) * 0.99)],
        failed=failed,
    )
