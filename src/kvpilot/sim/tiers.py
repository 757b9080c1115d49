"""Several tiers: how long a request waits for its first token when its KV lies here or there.

A request finds a prefix in device memory, the next part in host memory, the next on disk, the rest it computes. Links
and the engine's prefill each serve one after the other: a link in the order of requests, prefill in the order in
which loads are done. Every tier is written through, as vLLM with LMCache does it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from kvpilot.domain import SignalKind, Tier
from kvpilot.replay.plan import Hints
from kvpilot.sim.hardware import Hardware
from kvpilot.sim.one_tier import Scenario, Tables
from kvpilot.sim.outcome import Level
from kvpilot.sim.policy import ContextPolicy, Run
from kvpilot.sim.serving import Engine, Step
from kvpilot.sim.tree_cache import TreeCache
from kvpilot.sim.view import Request
from kvpilot.sim.workload import Floats, Ints


@dataclass(frozen=True, slots=True)
class TieredOutcome:
    """``ttft``: by call, seconds; ``waited`` of it for room in the device. ``found``: by call, leading chunks that some
    tier had. The others by tier, chunks."""

    ttft: Floats
    waited: Floats
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


class Node(Engine):
    """Tiers under policies."""

    def __init__(
        self, scenario: Scenario, hardware: Hardware, device_chunks: int, make: TierPolicy, hints: Hints
    ) -> None:
        super().__init__(scenario, hardware, device_chunks)
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
            waited=self.waited,
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

    def came(self, call: int, now: float) -> None:
        request = self._requests[call] = self._tables.request(call, now)
        self._latest[request.context] = call
        for policy in self._policies.values():
            policy.on_request(request)

    def load(self, call: int, now: float) -> tuple[int, float]:
        request, device = self._requests[call], self._caches[Tier.DEVICE]
        here, ready = device.held(request.tip), now
        for store in self._hardware.stores:
            there = self._caches[store.tier].held(request.tip)
            if there > here:
                start = max(now, self._link_free[store.tier])
                taken = (there - here) * self._chunk_bytes / store.read_bytes_per_s
                self._link_free[store.tier] = start + taken
                ready = max(ready, start + store.latency_s + taken)
                here = there
        self.take_room(request, now)
        for tier, cache in self._caches.items():
            if tier is not Tier.DEVICE:
                policy = self._policies[tier]
                newcomer = policy.newcomer(request, now)
                cache.request(call, request.tip, request.context, now, policy.scores, newcomer)
        return here, ready

    def take_room(self, request: Request, now: float) -> None:
        """In the device, for all that the request will have, whatever that displaces."""
        tip = int(self._workload.context_tip[request.index])
        device, policy = self._caches[Tier.DEVICE], self._policies[Tier.DEVICE]
        device.request(request.index, tip, request.context, now, policy.scores, math.inf)

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
