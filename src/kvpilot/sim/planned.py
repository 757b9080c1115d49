"""Several tiers as kvpilot runs them: forecasts say what each conversation is worth, :mod:`kvpilot.plan` what to move.

* Device and host memory keep what is worth most; both take what is computed, as the engine and the cache layer do.
* In the device what a conversation is worth looks no further ahead than its link needs to bring a part of it: room is
  not held for who returns in a minute where bringing it back takes milliseconds. Disks are too slow for that.
* Between requests what lies below and is worth more than what lies above is loaded, most worth first. A link serves
  requests before prefetches; a prefetch that is not in the next plan is given up, what it brought stays.
* Disk is written when host memory gives something up, or had no room for it, and only what is forecast to be used
  again: what was superseded meanwhile, or belongs to a session that has ended, never is.

Plans are made after each reply and signal, and again whenever some wait has lasted so long that it is worth more or
less than before.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np

from kvpilot.domain import SignalKind, Tier
from kvpilot.plan.exchange import Ints, Rows, exchange
from kvpilot.plan.placement import PlacementSettings
from kvpilot.replay.plan import Hints
from kvpilot.sim.brain import Kvpilot, knowing
from kvpilot.sim.hardware import Hardware
from kvpilot.sim.one_tier import Scenario
from kvpilot.sim.policy import ContextPolicy, Run
from kvpilot.sim.serving import Step
from kvpilot.sim.tiers import Node, TieredOutcome, capacities
from kvpilot.sim.tree_cache import TreeCache
from kvpilot.sim.workload import ROOT, Floats
from kvpilot.sim.workload import Ints as NodeInts

FIRST_TICK_S, LAST_TICK_S = 0.1, 1.0
"""What plans made for time alone are apart at least, when something has just happened, and in between."""
TURNED = 1 / 3
"""In the device worths look ahead for as long as its link takes to turn over so much of it."""


def run_planned(
    scenario: Scenario,
    hardware: Hardware,
    device_chunks: int,
    hints: Hints,
    settings: PlacementSettings | None = None,
) -> TieredOutcome:
    """kvpilot's own policy over the tiers of a machine."""
    node = PlannedNode(scenario, hardware, device_chunks, hints, settings or PlacementSettings())
    node.run()
    return node.outcome()


class _Ranked(ContextPolicy):
    """A tier that is ranked by what another policy knows, within the horizon of that number."""

    def __init__(self, run: Run, brain: Kvpilot, horizon: int) -> None:
        super().__init__(run)
        self._brain, self._horizon = brain, horizon

    def scores(self, leaves: NodeInts, now: float) -> Floats:
        return self._brain.ranked(self.cache, leaves, now, self._horizon)


@dataclass(slots=True)
class _Load:
    """``chunks`` still to come of a conversation that ends with ``tip``."""

    context: int
    chunks: int
    queued: float


class _Link:
    """What is read from one tier into the one above: for requests at once, else as planned."""

    def __init__(self, chunks_per_s: float, latency_s: float) -> None:
        self.chunks_per_s = chunks_per_s
        self.latency_s = latency_s
        self.busy_until = 0.0
        """By requests."""
        self.loads: list[_Load] = []
        self._spent_until = 0.0
        self._part = 0.0
        """Of a chunk under way."""

    def demand(self, chunks: int, now: float) -> float:
        """A request reads that much; when it has it."""
        start = max(now, self.busy_until)
        self.busy_until = start + chunks / self.chunks_per_s
        return self.busy_until + self.latency_s

    def moved(self, now: float) -> int:
        """Chunks that it had time for, beside requests, since it was last asked."""
        since = max(self._spent_until, min(self.busy_until, now))
        if self.loads:
            since = max(since, self.loads[0].queued + self.latency_s)
        self._spent_until = max(self._spent_until, now)
        if not self.loads or now <= since:
            return 0
        self._part += (now - since) * self.chunks_per_s
        whole = int(self._part)
        self._part -= whole
        return whole


class PlannedNode(Node):
    def __init__(
        self,
        scenario: Scenario,
        hardware: Hardware,
        device_chunks: int,
        hints: Hints,
        settings: PlacementSettings,
    ) -> None:
        brains: list[Kvpilot] = []
        tiers = capacities(hardware, device_chunks)
        chunk_bytes = scenario.workload.chunk_tokens * hardware.bytes_per_token
        horizon = TURNED * device_chunks * chunk_bytes / hardware.stores[0].read_bytes_per_s
        horizons = (horizon, *[math.inf] * len(hardware.stores))

        def make(run: Run, tier: Tier) -> ContextPolicy:
            if not brains:
                brains.append(Kvpilot(run, knowing(horizons)))
                return brains[0]
            return _Ranked(run, brains[0], list(tiers).index(tier))

        super().__init__(scenario, hardware, device_chunks, make, hints)
        self._brain = brains[0]
        self._settings = settings
        self._order = list(self._caches)
        rate = 1 / self._chunk_bytes
        self._links = [_Link(store.read_bytes_per_s * rate, store.latency_s) for store in hardware.stores]
        """Link i brings what tier i + 1 has into tier i."""
        self._tips = [ROOT] * self._view.contexts
        self._live: set[int] = set()
        self._unfinished = self._workload.calls
        self._now = 0.0
        self._due = False
        self._tick = 0
        self._tick_s = FIRST_TICK_S
        self._caches[self._order[-2]].on_evict = self._spill

    # ------------------------------------------------------------ what happens

    def before(self, now: float) -> None:
        self._now = now
        for level, link in enumerate(self._links):
            self._advance(level, link, now)

    def after(self, now: float) -> None:
        super().after(now)
        if self._due:
            self._due = False
            self._plan(now)
            self._later(max(now + self._tick_s, self._brain.forecaster.changes(now)))

    def ticked(self, number: int, now: float) -> None:
        if number == self._tick:
            self._due = True
            self._tick_s = min(LAST_TICK_S, 2.0 * self._tick_s)

    def came(self, call: int, now: float) -> None:
        request = self._requests[call] = self._tables.request(call, now)
        self._latest[request.context] = call
        self._brain.on_request(request)
        self._tips[request.context] = request.tip
        self._live.add(request.context)
        for cache in self._caches.values():
            cache.follow(request.context, request.tip, now)

    def waits(self, call: int, now: float) -> None:
        self._rank_queue()
        self._due = True

    def load(self, call: int, now: float) -> tuple[int, float]:
        caches = [self._caches[tier] for tier in self._order]
        request = self._requests[call]
        here, ready = caches[0].held(request.tip), now
        for link, cache in zip(self._links, caches[1:], strict=True):
            there = cache.held(request.tip)
            if there > here:
                ready = max(ready, link.demand(there - here, now))
                here = there
        self._rank_queue()
        self.take_room(request, now)
        for level, cache in enumerate(caches[1:-1], 1):
            worth = self._brain.worth(request.context, now, level)
            scores = self._policies[self._order[level]].scores
            cache.request(call, request.tip, request.context, now, scores, worth)
        self._keep_a_copy(request.context, request.tip)
        self._tick_s = FIRST_TICK_S
        self._later(now + FIRST_TICK_S)
        return here, ready

    def replied(self, call: int, now: float) -> None:
        caches = [self._caches[tier] for tier in self._order]
        request, reply = self._requests.pop(call), self._tables.reply(call, now)
        latest = self._latest[request.context] == call
        self._brain.on_end(request, reply)
        for level, (cache, policy) in enumerate(self._above()):
            context = request.context if latest else None
            worth = self._brain.worth(request.context, now, level)
            cache.end(call, request.tip, reply.tip, context, now, policy.scores, worth)
        if latest:
            caches[-1].follow(request.context, reply.tip, now)
            self._tips[request.context] = reply.tip
            self._keep_a_copy(request.context, reply.tip)
        self._unfinished -= 1
        self._due, self._tick_s = True, FIRST_TICK_S
        self._say_what_follows(call, now)

    def signalled(self, signal: int, now: float) -> None:
        said = replace(self._view.signals[signal], at=now)
        self._brain.on_signal(said)
        if said.kind is SignalKind.END:
            self._live.discard(said.context)
            for cache in self._caches.values():
                cache.release(said.context)
        self._due, self._tick_s = True, FIRST_TICK_S

    def _rank_queue(self) -> None:
        self._brain.next_up([self._requests[call].context for call in self._queue])

    # ------------------------------------------------------------ plans

    def _plan(self, now: float) -> None:
        for level, link in enumerate(self._links):
            worths = self._brain.worths(now, level)
            waiting = np.array(
                [c for c in sorted(self._live) if worths[c] >= self._settings.least_load], dtype=np.int64
            )
            link.loads = self._loads(level, link, waiting, worths, now) if len(waiting) else []

    def _loads(self, level: int, link: _Link, waiting: Ints, worths: Floats, now: float) -> list[_Load]:
        above, below = (self._caches[tier] for tier in self._order[level : level + 2])
        missing = np.array([below.depth_of(c) - above.depth_of(c) for c in waiting.tolist()], dtype=np.int64)
        if (missing <= 0).all():
            return []
        leaves, loose = above.tails()
        held = self._policies[self._order[level]].scores(leaves, now)
        flat = np.zeros(len(waiting), dtype=np.int64)
        found = exchange(
            Rows(worths[waiting], missing, flat),
            Rows(held, loose, np.array([above.start[leaf] for leaf in leaves.tolist()], dtype=np.int64)),
            above.capacity - above.used,
            self._settings.margin,
            int(self._settings.ahead_s * link.chunks_per_s),
        )
        queued = {load.context: load.queued for load in link.loads}
        contexts = ((int(waiting[row]), chunks) for row, chunks in found.enter)
        return [_Load(context, chunks, queued.get(context, now)) for context, chunks in contexts]

    def _advance(self, level: int, link: _Link, now: float) -> None:
        """What the link has brought since it was last looked at is admitted now."""
        left = link.moved(now)
        if not left:
            return
        above, below = (self._caches[tier] for tier in self._order[level : level + 2])
        policy = self._policies[self._order[level]]
        worths = self._brain.worths(now, level)
        while left > 0 and link.loads:
            load = link.loads[0]
            tip = self._tips[load.context]
            there = below.depth_of(load.context) - above.depth_of(load.context)
            most = min(left, load.chunks, there)
            worth = float(worths[load.context]) / (1.0 + self._settings.margin)
            brought = above.bring(load.context, tip, most, now, policy.scores, worth) if most > 0 else 0
            left -= brought
            load.chunks -= brought
            if load.chunks <= 0 or brought < most or most <= 0:
                link.loads.pop(0)

    def _later(self, when: float) -> None:
        """The next plan is due then, or when something happens before."""
        if self._unfinished and when < math.inf:
            self._tick += 1
            self.at(when, Step.TICK, self._tick)

    # ------------------------------------------------------------ copies below

    def _above(self) -> list[tuple[TreeCache, ContextPolicy]]:
        """All tiers but the lowest."""
        return [(self._caches[tier], self._policies[tier]) for tier in self._order[:-1]]

    def _spill(self, leaf: int, chunks: int) -> None:
        """The tail of a leaf is about to go: what somebody may come back to is written to disk."""
        above = self._caches[self._order[-2]]
        holders = above.holders.get(leaf, ())
        self._write(holders, leaf, above.start[leaf] + above.resident(leaf))

    def _keep_a_copy(self, context: int, tip: int) -> None:
        """What host memory had no room for is written to disk."""
        depth = self._workload.depth(tip)
        if self._caches[self._order[-2]].held(tip) < depth:
            self._write((context,), tip, depth)

    def _write(self, contexts: Collection[int], tip: int, depth: int) -> None:
        """The first ``depth`` chunks up to ``tip``, which these conversations hold."""
        now, lowest = self._now, self._caches[self._order[-1]]
        worths = self._brain.worths(now, len(self._links))
        worth = float(sum(worths[context] for context in contexts))
        while tip != ROOT and worth + self._brain.arrivals.rate(tip, now) < self._settings.least_write:
            # Of what nobody comes back to its beginning may still be what others begin with.
            depth, tip, contexts = lowest.start[tip], lowest.parent[tip], ()
        missing = depth - lowest.held(tip)
        if tip == ROOT or missing <= 0:
            return
        worth = (worth + self._brain.arrivals.rate(tip, now)) / (1.0 + self._settings.margin)
        scores = self._policies[self._order[-1]].scores
        lowest.bring(next(iter(contexts), None), tip, missing, now, scores, worth)
        for context in contexts:
            lowest.follow(context, tip, now)
