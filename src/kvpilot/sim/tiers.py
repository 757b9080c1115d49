"""Several tiers: how long a request waits for its first token when its KV lies here or there.

A request finds a prefix in device memory, the next part in host memory, the next on disk, the rest it computes. Links
and the engine's prefill each serve one after the other: a link in the order of requests, prefill in the order in
which loads are done. Every tier is written through, as vLLM with LMCache does it. Requests come when they came in the
recording, but never before the reply that their agent waits for.

*Clairvoyant* is a bound and no policy (but for the order in which prefill is queued for, which may favour another by
a thousandth): it knows all requests, keeps by next use (Belady) in the device and in all
tiers together, and loads at any time since the agent's call before, soonest request first. Only a load that its link
cannot finish in time delays a request; prefill is queued for as ever.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np

from kvpilot.domain import SignalKind, Tier
from kvpilot.replay.plan import Hints
from kvpilot.sim.belady import belady
from kvpilot.sim.hardware import Hardware
from kvpilot.sim.one_tier import Scenario, Tables
from kvpilot.sim.outcome import Level
from kvpilot.sim.policy import ContextPolicy, Run
from kvpilot.sim.tree_cache import TreeCache
from kvpilot.sim.view import Request
from kvpilot.sim.workload import INSTANT_S, Floats, Ints, Workload


@dataclass(frozen=True, slots=True)
class TieredOutcome:
    """``ttft``: by call, seconds. ``found``: by call, leading chunks that some tier had. The others by tier, chunks."""

    ttft: Floats
    found: Ints
    held_mean: dict[Tier, float]
    held_peak: dict[Tier, int]
    written: dict[Tier, int]


def capacities(hardware: Hardware, device_chunks: int) -> dict[Tier, int]:
    """Chunks of each tier, fast to slow."""
    return {Tier.DEVICE: device_chunks} | {
        store.tier: int(store.size * device_chunks) for store in hardware.stores
    }


TierPolicy = Callable[[Run, Tier], ContextPolicy]
"""Makes the policy of one tier; those of a run may share what they know."""


def alone(kind: type[ContextPolicy]) -> TierPolicy:
    """Each tier has a policy of that kind for itself."""
    return lambda run, _: kind(run)


def run_tiers(
    scenario: Scenario, hardware: Hardware, device_chunks: int, make: TierPolicy, hints: Hints
) -> TieredOutcome:
    """Each tier under a policy of its own, loads when a request needs them."""
    node = Node(scenario, hardware, device_chunks, make, hints)
    node.run()
    return node.outcome()


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

    def __init__(self, scenario: Scenario, hardware: Hardware) -> None:
        self._workload = scenario.workload
        self._hardware = hardware
        self._chunk_bytes = self._workload.chunk_tokens * hardware.bytes_per_token
        self._free = 0.0
        self._begun = self._workload.begin.copy()
        self._running: set[int] = set()
        self._waiting: dict[int, deque[int]] = {}
        self._steps: list[tuple[float, Step, int]] = []
        """(time, what, index of the call or signal)"""
        self.ttft = np.zeros(self._workload.calls)
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

    def load(self, call: int, now: float) -> tuple[int, float]:
        """A request came: leading chunks that some tier has, and when they are all in the device."""
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
        if agent in self._running:
            self._waiting.setdefault(agent, deque()).append(call)
            return
        self._running.add(agent)
        self._begun[call] = now
        self.found[call], ready = self.load(call, now)
        self.at(ready, Step.READY, call)

    def _ready(self, call: int, now: float) -> None:
        behind = int(self.found[call]) * self._workload.chunk_tokens
        new = int(self._workload.prompt_tokens[call]) - behind
        self._free = max(now, self._free) + self._hardware.prefill_s(new, behind)
        self.ttft[call] = self._free - self._begun[call]
        self.at(max(self.ends_at(call, self._free), self._begun[call] + INSTANT_S), Step.END, call)

    def ends_at(self, call: int, first_token: float) -> float:
        """When the reply is complete that began with its first token then."""
        return first_token + self._workload.recorded[call].reply.tok * self._hardware.decode_token_s

    def _end(self, call: int, now: float) -> None:
        self.replied(call, now)
        agent = int(self._workload.agent[call])
        self._running.discard(agent)
        waiting = self._waiting.get(agent)
        if waiting:
            self.at(now, Step.REQUEST, waiting.popleft())


class Node(Engine):
    """Tiers under policies."""

    def __init__(
        self, scenario: Scenario, hardware: Hardware, device_chunks: int, make: TierPolicy, hints: Hints
    ) -> None:
        super().__init__(scenario, hardware)
        workload = self._workload
        self._view = view = scenario.view(hints)
        self._tables = Tables(workload, view)
        self._caches = {
            tier: TreeCache(workload, chunks, pin_calls=tier is Tier.DEVICE)
            for tier, chunks in capacities(hardware, device_chunks).items()
        }
        self._policies = {
            tier: make(Run(cache, view, workload.chunk_tokens), tier) for tier, cache in self._caches.items()
        }
        self._levels = {tier: Level() for tier in self._caches}
        self._link_free = dict.fromkeys(self._caches, 0.0)
        self._requests: dict[int, Request] = {}
        self._latest: dict[int, int] = {}
        self._signals: dict[int, list[int]] = {}
        for index, signal in enumerate(view.signals):
            self._signals.setdefault(signal.call, []).append(index)

    def outcome(self) -> TieredOutcome:
        return TieredOutcome(
            ttft=self.ttft,
            found=self.found,
            held_mean={tier: level.mean for tier, level in self._levels.items()},
            held_peak={tier: level.peak for tier, level in self._levels.items()},
            written={tier: cache.written for tier, cache in self._caches.items()},
        )

    def before(self, now: float) -> None:
        for policy in self._policies.values():
            policy.before(now)

    def after(self, now: float) -> None:
        for tier, cache in self._caches.items():
            self._levels[tier].set(cache.used, now)

    def load(self, call: int, now: float) -> tuple[int, float]:
        request = self._requests[call] = self._tables.request(call, now, self._caches[Tier.DEVICE])
        here, ready = request.hit, now
        for store in self._hardware.stores:
            there = self._caches[store.tier].held(request.tip)
            if there > here:
                start = max(now, self._link_free[store.tier])
                taken = (there - here) * self._chunk_bytes / store.read_bytes_per_s
                self._link_free[store.tier] = start + taken
                ready = max(ready, start + store.latency_s + taken)
                here = there
        self._latest[request.context] = call
        for tier, cache in self._caches.items():
            policy = self._policies[tier]
            policy.on_request(request)
            newcomer = policy.newcomer(request, now)
            cache.request(call, request.tip, request.context, now, policy.scores, newcomer)
        return here, ready

    def replied(self, call: int, now: float) -> None:
        request, reply = self._requests.pop(call), self._tables.reply(call, now)
        context = request.context if self._latest[request.context] == call else None
        for tier, cache in self._caches.items():
            policy = self._policies[tier]
            policy.on_end(request, reply)
            newcomer = policy.newcomer(request, now)
            cache.end(call, request.tip, reply.tip, context, now, policy.scores, newcomer)
        self._say_what_follows(call, now)

    def _say_what_follows(self, call: int, now: float) -> None:
        """The signals that come after a call, not before its reply."""
        for index in self._signals.get(call, ()):
            self.at(max(now, self._view.signals[index].at), Step.SIGNAL, index)

    def signalled(self, signal: int, now: float) -> None:
        said = replace(self._view.signals[signal], at=now)
        for tier, cache in self._caches.items():
            if said.kind is SignalKind.END:
                cache.release(said.context)
            self._policies[tier].on_signal(said)


def clairvoyant(scenario: Scenario, hardware: Hardware, device_chunks: int) -> TieredOutcome:
    """The bound described above. What it holds and writes is not told."""
    engine = _Clairvoyant(scenario, hardware, device_chunks)
    engine.run()
    return TieredOutcome(engine.ttft, engine.found, {}, {}, {})


class _Clairvoyant(Engine):
    def __init__(self, scenario: Scenario, hardware: Hardware, device_chunks: int) -> None:
        super().__init__(scenario, hardware)
        workload = self._workload
        calls, uses = scenario.instant
        reach = 0
        self._hits: Ints = np.zeros(workload.calls, dtype=np.int32)
        self._late: Floats = np.zeros(workload.calls)
        earliest = _called_before(workload)
        speeds = {store.tier: store.read_bytes_per_s for store in hardware.stores}
        for tier, chunks in capacities(hardware, device_chunks).items():
            reach += chunks
            hits = belady(workload, calls, uses, reach).hits
            if tier in speeds:
                took = np.maximum(0, hits - self._hits) * self._chunk_bytes / speeds[tier]
                self._late = np.maximum(self._late, _lateness(workload.begin, earliest, took))
            self._hits = hits

    def load(self, call: int, now: float) -> tuple[int, float]:
        return int(self._hits[call]), now + float(self._late[call])


def _lateness(begin: Floats, earliest: Floats, took: Floats) -> Floats:
    """How long after its request each load ends on one link that serves the soonest request first."""
    late = np.zeros(len(begin))
    free = 0.0
    for call in np.flatnonzero(took).tolist():
        free = max(free, earliest[call]) + took[call]
        late[call] = max(0.0, free - begin[call])
    return late


def _called_before(workload: Workload) -> Floats:
    """By call, when its agent called before (its own time where it did not)."""
    out = workload.begin.copy()
    last: dict[int, float] = {}
    for call, agent in enumerate(workload.agent.tolist()):
        out[call] = last.get(agent, out[call])
        last[agent] = float(workload.begin[call])
    return out
