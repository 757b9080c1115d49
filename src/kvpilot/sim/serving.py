"""An engine that serves requests in time: who waits for room, prefill, replies.

A request takes room in device memory for its whole context, reply included, from its beginning to its end; what others
share with it is there once. Requests begin in the order in which they came, each once there is room beside those that
run, as vLLM's do; one that is larger than the device runs alone. (vLLM takes room for a reply while it grows, and
preempts the youngest request where there is none: as replies are short beside contexts that hardly differs, and nothing
has to be preempted here.) Requests come when they came in the recording, but never before the reply that their agent
waits for.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from enum import IntEnum

import numpy as np

from kvpilot.sim.hardware import Hardware
from kvpilot.sim.one_tier import Scenario
from kvpilot.sim.workload import INSTANT_S, ROOT, Workload


class Step(IntEnum):
    """What happens, in the order in which things of the same moment do."""

    END = 0
    SIGNAL = 1
    READY = 2
    """All that a request loads is in device memory."""
    REQUEST = 3
    TICK = 4
    """Time for another plan; index: which of them."""


class Engine:
    """Requests, prefill and replies in time. Where KV lies is for subclasses to say."""

    def __init__(self, scenario: Scenario, hardware: Hardware, device_chunks: float = math.inf) -> None:
        """``device_chunks``: infinity, nobody waits for room."""
        self._workload = scenario.workload
        self._hardware = hardware
        self._chunk_bytes = self._workload.chunk_tokens * hardware.bytes_per_token
        self._device_chunks = device_chunks
        self._in_use = InUse(self._workload)
        self._queue: deque[int] = deque()
        """Calls that wait for room."""
        self._free = 0.0
        self._came = self._workload.begin.copy()
        """By call, when its request came."""
        self._busy: set[int] = set()
        """Agents with a request."""
        self._waiting: dict[int, deque[int]] = {}
        """Agent → its calls that wait for its reply."""
        self._steps: list[tuple[float, Step, int]] = []
        """(time, what, index of the call or signal)"""
        self.ttft = np.zeros(self._workload.calls)
        self.waited = np.zeros(self._workload.calls)
        self.found = np.zeros(self._workload.calls, dtype=np.int32)

    def run(self) -> None:
        self._steps = [(at, Step.REQUEST, call) for call, at in enumerate(self._workload.begin.tolist())]
        heapq.heapify(self._steps)
        do = {
            Step.END: self._end,
            Step.SIGNAL: self.signalled,
            Step.READY: self._ready,
            Step.REQUEST: self._request,
            Step.TICK: self.ticked,
        }
        while self._steps:
            now, step, index = heapq.heappop(self._steps)
            self.before(now)
            do[step](index, now)
            self.after(now)

    def before(self, now: float) -> None:
        """Something is about to happen."""

    def after(self, now: float) -> None:
        """Something happened."""

    def came(self, call: int, now: float) -> None:
        """A request came."""

    def waits(self, call: int, now: float) -> None:
        """There is no room for a request that came."""

    def load(self, call: int, now: float) -> tuple[int, float]:
        """A request begins: leading chunks that some tier has, and when they are all in the device."""
        raise NotImplementedError

    def replied(self, call: int, now: float) -> None:
        """A request ended."""

    def signalled(self, signal: int, now: float) -> None:
        """An agent said something."""

    def ticked(self, number: int, now: float) -> None:
        """A moment that was asked for."""

    def at(self, when: float, step: Step, index: int) -> None:
        heapq.heappush(self._steps, (when, step, index))

    def _request(self, call: int, now: float) -> None:
        agent = int(self._workload.agent[call])
        if agent in self._busy:
            self._waiting.setdefault(agent, deque()).append(call)
            return
        self._busy.add(agent)
        self._came[call] = now
        self.came(call, now)
        self._queue.append(call)
        self._begin(now)
        if self._queue:
            self.waits(call, now)

    def _begin(self, now: float) -> None:
        """All that there is room for, first come, first served."""
        while self._queue and self._has_room(self._queue[0]):
            call = self._queue.popleft()
            self._in_use.begin(int(self._workload.context_tip[call]))
            self.waited[call] = now - self._came[call]
            self.found[call], ready = self.load(call, now)
            self.at(ready, Step.READY, call)

    def _has_room(self, call: int) -> bool:
        used = self._in_use
        wanted = used.missing(int(self._workload.context_tip[call]))
        return not used.chunks or used.chunks + wanted <= self._device_chunks

    def _ready(self, call: int, now: float) -> None:
        behind = int(self.found[call]) * self._workload.chunk_tokens
        new = int(self._workload.prompt_tokens[call]) - behind
        self._free = max(now, self._free) + self._hardware.prefill_s(new, behind)
        self.ttft[call] = self._free - self._came[call]
        self.at(max(self.ends_at(call, self._free), now + INSTANT_S), Step.END, call)

    def ends_at(self, call: int, first_token: float) -> float:
        """When the reply is complete that began with its first token then."""
        return first_token + self._workload.recorded[call].reply.tok * self._hardware.decode_token_s

    def _end(self, call: int, now: float) -> None:
        self.replied(call, now)
        self._in_use.end(int(self._workload.context_tip[call]))
        agent = int(self._workload.agent[call])
        self._busy.discard(agent)
        waiting = self._waiting.get(agent)
        if waiting:
            self.at(now, Step.REQUEST, waiting.popleft())
        self._begin(now)


class InUse:
    """What running requests hold of the device: chunks that several share count once. O(nodes that change)."""

    def __init__(self, workload: Workload) -> None:
        self.chunks = 0
        self._parent: list[int] = workload.parent.tolist()
        self._size: list[int] = workload.size.tolist()
        self._users = [0] * len(self._size)
        """By node: requests that end with it, and nodes behind it that are in use."""

    def missing(self, tip: int) -> int:
        """Chunks that a context which ends with ``tip`` would add."""
        chunks = 0
        while tip != ROOT and not self._users[tip]:
            chunks += self._size[tip]
            tip = self._parent[tip]
        return chunks

    def begin(self, tip: int) -> None:
        """A request whose context ends with ``tip`` begins."""
        while tip != ROOT:
            self._users[tip] += 1
            if self._users[tip] > 1:
                return
            self.chunks += self._size[tip]
            tip = self._parent[tip]

    def end(self, tip: int) -> None:
        """One that began so ends."""
        while tip != ROOT:
            self._users[tip] -= 1
            if self._users[tip]:
                return
            self.chunks -= self._size[tip]
            tip = self._parent[tip]
