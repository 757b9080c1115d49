"""A whole stack whose vLLM runs the plug-in: commands, prefetch into the device pool, and what is told of it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from kvpilot.bench.processes import free_port
from kvpilot.config import Config
from kvpilot.engine.commands import PATH
from kvpilot.engine.port import VARIABLE
from kvpilot.stack import shm
from kvpilot.stack.doctor import diagnose
from kvpilot.stack.launch import Endpoints, running
from kvpilot.stack.state import read_status
from tests.e2e.peers import alive, chat, control, eventually, http, words

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1000)]

_HITS = re.compile(r"^vllm:(external_)?prefix_cache_hits_total(?:\{[^}]*\})? ([0-9.e+]+)$", re.MULTILINE)


CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "pytest"}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]
LONG = 2816
"""Tokens of the whole chunks of a session's context here."""


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plugged")


@pytest.fixture(scope="module")
def command(engine_config: Config, port: int, state: Path) -> Iterator[subprocess.Popen[bytes]]:
    """``kvpilot up`` as users start it."""
    sizes = ["--max-model-len", "8192", "--host-gb", "3", "--disk-gb", "5"]
    options = [
        "--any-ports",
        "--plugin",
        "--model",
        engine_config.engine.model,
        "--state",
        str(state),
        *sizes,
    ]
    up = subprocess.Popen(
        [sys.executable, "-m", "kvpilot.cli", "up", *options],
        env={**os.environ, VARIABLE: f"tcp://127.0.0.1:{port}"},
    )
    yield up
    up.terminate()
    up.wait(60)


@pytest.fixture(scope="module")
def plugged(command: subprocess.Popen[bytes], engine_config: Config, state: Path) -> Endpoints:
    config = engine_config.with_overrides(state={"dir": str(state)})

    def ready() -> Endpoints | None:
        assert command.poll() is None, "it ended; why, it said"
        return running(config)

    stack = eventually(ready, 900)
    assert isinstance(stack, Endpoints)
    return stack


@pytest.fixture(autouse=True)
def nobody_else(plugged: Endpoints) -> None:
    """Sessions of other tests are over: for one that waits, the plan would fill the pool in the middle of a test."""
    for session in control(plugged, "/sessions?limit=1000")["sessions"]:
        control(plugged, f"/sessions/{session['id']}", method="DELETE")


def engine(stack: Endpoints, **command: Any) -> Any:
    return http(f"{stack.engine_url}{PATH}", command or None)


def hits(stack: Endpoints) -> dict[str, float]:
    with urllib.request.urlopen(f"{stack.engine_url}/metrics", timeout=30) as reply:
        found = dict(_HITS.findall(reply.read().decode()))
    return {"device": float(found.get("", 0)), "below": float(found.get("external_", 0))}


def a_session(stack: Endpoints, tag: str) -> list[dict[str, str]]:
    """A context of some 3,000 tokens, pushed out of the device pool by other sessions' contexts."""
    messages = [{"role": "user", "content": words(tag, 330)}]
    chat(stack, messages, tag)
    for i in range(3):
        chat(stack, [{"role": "user", "content": words(f"{tag}-other-{i}", 700)}], f"{tag}-other-{i}")
    return [*messages, {"role": "assistant", "content": "ok"}, {"role": "user", "content": "go on"}]


def test_doctor_says_what_is_active(plugged: Endpoints) -> None:
    [finding] = [f for f in diagnose(plugged.config) if f.check == "plug-in"]
    assert finding.verdict == "ok"
    assert "SessionAware" in finding.detail and "prefetch through LMCacheMPConnector" in finding.detail


def test_a_prefetched_session_is_found_in_the_device_pool(plugged: Endpoints) -> None:
    tag = uuid.uuid4().hex[:8]
    messages = a_session(plugged, tag)
    outcome = engine(plugged, kind="prefetch", session=tag, id="mine")
    assert (outcome["id"], outcome["status"]) == ("mine", "done"), outcome
    assert outcome["confirmed"] == outcome["planned"] >= 40
    before = hits(plugged)
    usage = chat(plugged, messages, tag)["usage"]
    after = hits(plugged)
    assert after["device"] - before["device"] >= 64 * outcome["confirmed"]
    assert after["below"] == before["below"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 64 * outcome["confirmed"]


def test_tokens_alone_can_be_prefetched_for_a_session_the_engine_does_not_know(plugged: Endpoints) -> None:
    tag = uuid.uuid4().hex[:8]
    a_session(plugged, tag)
    prompt = [{"role": "user", "content": words(tag, 330)}]
    tokens = http(f"{plugged.engine_url}/tokenize", {"model": "m16k", "messages": prompt})["tokens"]
    assert engine(plugged, kind="evict", session=tag)["status"] in ("done", "clipped")
    outcome = engine(plugged, kind="prefetch", session=f"{tag}-again", tokens=tokens)
    assert outcome["status"] == "done" and outcome["confirmed"] == outcome["planned"] >= 40, outcome


def resident(stack: Endpoints, session: str) -> int:
    """Tokens of a session's context that the coordinator sees in the device pool."""
    return int(control(stack, f"/sessions/{session}")["resident"]["device_tokens"])


def calls_a_tool(stack: Endpoints, session: str) -> list[dict[str, Any]]:
    """A session with a context of some 3,000 tokens whose reply called a tool; its next request's messages."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": words(session, 330)}]
    reply = chat(stack, messages, session, tools=TOOLS, max_tokens=60, structured_outputs={"choice": [CALL]})
    [call] = reply["choices"][0]["message"]["tool_calls"]
    assert eventually(lambda: resident(stack, session) >= LONG)
    asked = {"role": "assistant", "content": "", "tool_calls": [call]}
    return [*messages, asked, {"role": "tool", "tool_call_id": call["id"], "content": "3 passed"}]


def test_a_session_that_waits_for_its_tool_is_back_in_the_pool_without_being_asked_for(
    plugged: Endpoints,
) -> None:
    tag = uuid.uuid4().hex[:8]
    messages = calls_a_tool(plugged, tag)
    seen = []
    for i in range(3):
        chat(plugged, [{"role": "user", "content": words(f"{tag}-other-{i}", 700)}], f"{tag}-other-{i}")
        seen.append(resident(plugged, tag))
    assert min(seen) < LONG, "the others displaced it"
    assert eventually(lambda: resident(plugged, tag) >= LONG)
    before = hits(plugged)
    usage = chat(plugged, messages, tag, tools=TOOLS)["usage"]
    after = hits(plugged)
    assert usage["prompt_tokens_details"]["cached_tokens"] >= LONG
    assert after["device"] - before["device"] >= LONG and after["below"] == before["below"]
    brought = [a for a in control(plugged, f"/actions?session={tag}")["actions"] if "device" in a["tiers"]]
    assert {a["source"] for a in brought} == {"plan"} and brought[0]["status"] == "done"


def test_what_an_ended_session_left_in_the_pool_goes_before_what_waits_longer(plugged: Endpoints) -> None:
    tag = uuid.uuid4().hex[:8]
    messages = calls_a_tool(plugged, f"{tag}-waits")
    ending = [{"role": "user", "content": words(f"{tag}-ends", 330)}]
    chat(plugged, ending, f"{tag}-ends")
    assert eventually(lambda: resident(plugged, f"{tag}-ends") >= LONG)
    assert resident(plugged, f"{tag}-waits") >= LONG
    control(plugged, f"/sessions/{tag}-ends/signals", {"kind": "end"})
    tokens = http(f"{plugged.engine_url}/tokenize", {"model": "m16k", "messages": ending})["tokens"]

    def left() -> int:
        return int(engine(plugged, kind="demote", tokens=tokens).get("planned", 0))

    assert eventually(lambda: left() == 0)
    began = time.time()
    chat(plugged, [{"role": "user", "content": words(f"{tag}-new", 330)}], f"{tag}-new")
    before = hits(plugged)
    chat(plugged, messages, f"{tag}-waits", tools=TOOLS)
    after = hits(plugged)
    assert after["device"] - before["device"] >= LONG and after["below"] == before["below"]
    actions = control(plugged, f"/actions?session={tag}-waits")["actions"]
    brought = [a for a in actions if a["kind"] == "prefetch" and a["created_at"] >= began]
    assert not brought, "nothing of it had gone"


def test_a_request_that_comes_while_its_session_is_loaded_is_answered(plugged: Endpoints) -> None:
    tag = uuid.uuid4().hex[:8]
    messages = a_session(plugged, tag)
    command = json.dumps({"kind": "prefetch", "session": tag}).encode()
    request = urllib.request.Request(
        f"{plugged.engine_url}{PATH}", command, {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        answer = chat(plugged, messages, tag)
        outcome = json.load(reply)
    assert answer["choices"][0]["finish_reason"] in ("length", "stop")
    assert outcome["status"] in ("done", "clipped")


def test_what_is_no_command_gets_a_clear_error_and_an_unknown_session_is_missing(plugged: Endpoints) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        engine(plugged, kind="evict")
    assert refused.value.code == 400
    assert "names a session" in json.load(refused.value)["detail"]
    assert engine(plugged, kind="evict", session="nobody")["status"] == "missing"


def test_the_control_route_is_not_reached_through_the_gateway(plugged: Endpoints) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        http(f"{plugged.gateway_url}{PATH}")
    assert refused.value.code == 404


def test_the_internal_port_takes_the_same_commands(plugged: Endpoints, port: int) -> None:
    with zmq.Context() as context, context.socket(zmq.REQ) as socket:
        socket.linger, socket.rcvtimeo = 0, 20_000
        socket.connect(f"tcp://127.0.0.1:{port}")
        socket.send(b'{"kind": "status"}')
        assert json.loads(socket.recv())["active"] is True
        socket.send(b"nonsense")
        assert "not JSON" in json.loads(socket.recv())["detail"]


def test_nothing_is_left_of_a_real_stack_that_is_killed_hard(
    plugged: Endpoints, command: subprocess.Popen[bytes], state: Path
) -> None:
    """The last test here."""
    status = read_status(state)
    assert status is not None and any(name.startswith("lmcache_kv") for name in status.shm)
    pids = shm.family(process.pid for process in status.processes.values() if process.pid)
    assert len(pids) >= 8, "LMCache's two, vLLM's three, kvpilot's three"
    command.kill()
    command.wait()
    down = [sys.executable, "-m", "kvpilot.cli", "down", "--state", str(state)]
    assert subprocess.run(down, timeout=60, check=False).returncode == 0
    assert not alive(pids)
    assert not [name for name in status.shm if (Path("/dev/shm") / name).exists()]
