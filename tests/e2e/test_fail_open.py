"""Parts die under load: no user's request fails, and what was known is known again."""

from __future__ import annotations

import os
import signal
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvpilot.stack.launch import Endpoints
from tests.e2e.peers import Message, chat, control, directory, eventually, session_chunks, words

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


class Load:
    """Agents that take turn after turn until told to stop; every failure is kept."""

    def __init__(self, stack: Endpoints, agents: int) -> None:
        self._stack = stack
        self._stop = threading.Event()
        self.turns = 0
        self.slowest_s = 0.0
        self.failures: list[str] = []
        self._threads = [threading.Thread(target=self._agent, args=(n,), daemon=True) for n in range(agents)]

    def _agent(self, number: int) -> None:
        tag = uuid.uuid4().hex[:6]
        messages: list[Message] = [{"role": "user", "content": words(tag, 150)}]
        while not self._stop.is_set():
            begun = time.monotonic()
            try:
                reply = chat(self._stack, messages, f"load-{tag}")
                messages += [reply["choices"][0]["message"], {"role": "user", "content": words(tag, 8)}]
            except Exception as error:
                self.failures.append(f"agent {number}: {error!r}")
            self.turns += 1
            self.slowest_s = max(self.slowest_s, time.monotonic() - begun)
            time.sleep(0.3)

    @contextmanager
    def running(self) -> Iterator[Load]:
        for thread in self._threads:
            thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            for thread in self._threads:
                thread.join(120)


def kill(stack: Endpoints, name: str) -> int:
    """kill -9; returns the restarts so far."""
    restarts = stack.restarts[name]
    os.kill(stack.pids[name], signal.SIGKILL)
    return restarts


def back(stack: Endpoints, name: str, restarts: int, within_s: float) -> None:
    def ready() -> bool:
        process = stack.status.processes[name]
        return process.restarts > restarts and process.state == "ready"

    eventually(ready, within_s)


def prepared(stack: Endpoints, tag: str) -> tuple[list[Message], str, list[str]]:
    messages: list[Message] = [{"role": "user", "content": words(tag, 500)}]
    session = f"f-{tag}"
    chat(stack, messages, session)
    chunks = session_chunks(stack, session)
    eventually(lambda: all(tiers == {"l1", "l2"} for tiers in directory(stack, chunks)))
    return messages, session, chunks


def test_killing_lmcache_under_eight_sessions_fails_no_request_and_hits_return(stack: Endpoints) -> None:
    tag = uuid.uuid4().hex[:8]
    messages, session, chunks = prepared(stack, tag)
    load = Load(stack, 8)
    with load.running():
        eventually(lambda: load.turns >= 8, 120)
        restarts = kill(stack, "lmcache")
        before = load.turns
        back(stack, "lmcache", restarts, 90)
        eventually(lambda: load.turns >= before + 16, 120)
    assert load.failures == []
    print(f"{load.turns} turns, slowest {load.slowest_s:.1f} s")

    def hits() -> bool:
        # Other contexts push this one out of the device pool, so that a hit is LMCache's.
        for _ in range(3):
            chat(stack, [{"role": "user", "content": words(uuid.uuid4().hex[:4], 700)}])
        usage = chat(stack, messages, session)["usage"]
        return bool(usage["prompt_tokens_details"]["cached_tokens"] >= 256 * len(chunks))

    eventually(hits, 120)


def test_killing_lmcaches_coordinator_fails_no_request_and_actions_are_confirmed_again(
    stack: Endpoints,
) -> None:
    tag = uuid.uuid4().hex[:8]
    load = Load(stack, 3)
    with load.running():
        restarts = kill(stack, "lmcache-coordinator")
        eventually(lambda: load.turns >= 6, 120)
        back(stack, "lmcache-coordinator", restarts, 90)
    assert load.failures == []
    _, session, chunks = prepared(stack, tag)
    done = control(stack, "/actions?wait=30", {"kind": "evict", "session": session})
    assert (done["status"], done["confirmed"]) == ("done", len(chunks))
    eventually(lambda: not any(directory(stack, chunks)), 10)


def test_a_killed_coordinator_knows_its_sessions_again_within_ten_seconds(stack: Endpoints) -> None:
    tag = uuid.uuid4().hex[:8]
    messages, session, chunks = prepared(stack, tag)
    time.sleep(0.5)
    load = Load(stack, 3)
    with load.running():
        eventually(lambda: load.turns >= 3, 120)
        restarts = kill(stack, "coordinator")
        begun = time.monotonic()
        back(stack, "coordinator", restarts, 10)
        assert session_chunks(stack, session) == chunks
        assert time.monotonic() - begun < 10
        before = load.turns
        eventually(lambda: load.turns >= before + 6, 120)
    assert load.failures == []
    longer = [*messages, {"role": "assistant", "content": "ok"}, {"role": "user", "content": "go on"}]
    chat(stack, longer, session)
    eventually(lambda: control(stack, f"/sessions/{session}")["turns"] == 2)
    done = control(stack, "/actions?wait=20", {"kind": "evict", "session": session})
    assert done["status"] == "done" and done["confirmed"] >= len(chunks)


def test_while_the_coordinator_is_dead_management_calls_are_still_answered(stack: Endpoints) -> None:
    restarts = kill(stack, "coordinator")
    hint = {"manage_request": True, "edits": [{"type": "evict", "target": "session"}]}
    answer = chat(
        stack, [], None, agent_hint={"session_id": "x", "parent_session_id": "x", "context_management": hint}
    )
    assert answer["choices"][0]["message"]["content"] == ""
    back(stack, "coordinator", restarts, 10)
