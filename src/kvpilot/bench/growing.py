"""Agents whose contexts grow, through gateway and coordinator: how much of it is mapped, and how soon.

Once with a pause before each turn (agents run tools), once without: the coordinator then gets what two gateways
leave it of the machine, and what it cannot take in is shed.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from kvpilot.bench.load import HEADERS, PATH
from kvpilot.bench.processes import get, kvpilot_gateway, process, until_answering
from kvpilot.gateway.http_client import Client

SESSIONS = 16
START_BYTES = 50_000
TURN_BYTES = 2_000
THINK_S = (0.2, 0.0)
"""Pauses before a turn, one measurement each."""
_SETTLE_S = 2.0


@dataclass(frozen=True, slots=True)
class Growth:
    """``mapped``: requests whose tokens the coordinator mapped; the share is of all requests made."""

    sessions: int
    think_s: float
    requests: int
    per_second: float
    mapped: int
    mapped_within_1s_share: float
    events_sent: int
    events_shed: int


def growing_sessions(
    engine_url: str, workers: int, seconds: float, folder: Path, think_s: float
) -> Growth | str:
    """Traffic of 16 sessions that grow by 2 KB a turn; the reason when the coordinator cannot run."""
    with kvpilot_gateway(folder, engine_url, workers) as gateway:
        config = gateway.config.coordinator
        control = f"http://{config.host}:{config.port}"
        command = [sys.executable, "-m", "kvpilot.coordinator", "--config", str(gateway.config_file)]
        with process(command, folder / "coordinator.log") as child:
            try:
                until_answering("the coordinator", child, f"{control}/kvpilot/v1/health", timeout_s=60)
            except RuntimeError as error:
                return f"skipped: {error}"
            requests, took = asyncio.run(_drive(gateway.url, seconds, think_s))
            time.sleep(_SETTLE_S)
            events = gateway.events()
            metrics = get(control + "/metrics")
    return Growth(
        sessions=SESSIONS,
        think_s=think_s,
        requests=requests,
        per_second=requests / took,
        mapped=_metric(metrics, "kvpilot_requests_mapped_total"),
        mapped_within_1s_share=_metric(metrics, "kvpilot_requests_mapped_within_1s_total") / max(1, requests),
        events_sent=events["sent"],
        events_shed=events["shed"],
    )


def _metric(text: str, name: str) -> int:
    found = re.search(rf"^{name} (\S+)$", text, re.MULTILINE)
    return int(float(found[1])) if found else 0


async def _drive(url: str, seconds: float, think_s: float) -> tuple[int, float]:
    client = Client(url, connect_timeout_s=5, read_timeout_s=60)
    began = time.perf_counter()
    until = began + seconds
    counts = await asyncio.gather(*(_session(client, f"agent-{n}", until, think_s) for n in range(SESSIONS)))
    client.close()
    return sum(counts), time.perf_counter() - began


async def _session(client: Client, name: str, until: float, think_s: float) -> int:
    headers = [(key.encode(), value.encode()) for key, value in {**HEADERS, "x-session-id": name}.items()]
    messages = [json.dumps({"role": "user", "content": f"{name} " + "x" * START_BYTES})]
    turn = json.dumps({"role": "user", "content": "y" * TURN_BYTES})
    requests = 0
    while time.perf_counter() < until:
        await asyncio.sleep(think_s)
        body = f'{{"model":"mock","messages":[{",".join(messages)}]}}'.encode()
        async with await client.request("POST", PATH, headers, body) as response:
            await response.read()
        requests += 1
        # An agent starts afresh when its context is full.
        messages = messages[:1] if len(messages) > 50 else [*messages, turn]
    return requests
