"""What others do, over contexts, as far as one tier can tell them apart. Each names the source of its rule.

Where a source leaves a constant to its user, the constant is here and says so. Times are seconds.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import deque

import numpy as np

from kvpilot.domain import SignalKind
from kvpilot.sim.policy import ContextPolicy, Run
from kvpilot.sim.view import Reply, Request, SeenSignal
from kvpilot.sim.workload import ROOT, Floats, Ints

_CLASS = 1e10
"""Between classes of a score whose order inside a class is time: a double still tells microseconds apart."""


class LeafLru(ContextPolicy):
    """Least recently used leaf first (SGLang's radix cache): a use lasts until its request ends."""

    uses_hints = False


class References(ContextPolicy):
    """SGLang's session references (issue 29173): fewest references first, then the least recently used.

    What no live context holds has none: supersession and ends are heeded, nothing is forecast.
    """

    def scores(self, leaves: Ints, now: float) -> Floats:
        holders = self.cache.holders
        references = np.array([len(holders.get(leaf, ())) for leaf in leaves.tolist()], dtype=np.float64)
        return np.asarray(references * _CLASS + self.cache.last_used[leaves])


class Ttl(ContextPolicy):
    """Providers' prompt caches: gone ``ttl_s`` after the last use, the least recently used before that if need be."""

    uses_hints = False

    def __init__(self, run: Run, ttl_s: float) -> None:
        super().__init__(run)
        self._ttl_s = ttl_s

    def before(self, now: float) -> None:
        self.cache.expire(now - self._ttl_s)


class TailLru(ContextPolicy):
    """T-LRU (arXiv 2510.15152): of a context of L tokens that expects Q more only the first L + Q − H need to stay
    for the next request to have at most H tokens to compute; what lies behind counts as infinitely old.

    Q is the running mean of what requests add. A leaf counts by its end.
    """

    uses_hints = False
    BUDGET = 4096
    """H in tokens: the user's choice."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._length = np.zeros(run.view.contexts)
        self._added, self._requests = 0.0, 0

    def on_request(self, request: Request) -> None:
        before = self._length[request.context]
        if before:
            self._added += max(0.0, request.prompt - before)
            self._requests += 1
        self._length[request.context] = request.prompt

    def on_end(self, request: Request, reply: Reply) -> None:
        self._length[request.context] = reply.chunks

    def scores(self, leaves: Ints, now: float) -> Floats:
        expected = self._added / self._requests if self._requests else 0.0
        stay = self._length + expected - self.BUDGET / self.chunk_tokens
        needed = self.by_holder(leaves, stay, nobody=-_CLASS)
        ends = np.array([self.cache.start[leaf] + self.cache.resident(leaf) for leaf in leaves.tolist()])
        used = self.cache.last_used[leaves]
        return np.asarray(np.where(ends > needed, used - _CLASS, used))


class Continuum(ContextPolicy):
    """Continuum / CacheTTL: a context is kept for τ after a tool call, then it is as old as it is.

    τ ∈ {0} ∪ {observed durations} maximises P(duration ≤ τ) · (Q̄·η + reload(context)) − τ. With one tier and no
    queue Q̄ = 0. At most ``ENOUGH`` samples in all: 2 s; a tool with at most that many: everybody's; no tool: 0.
    """

    uses_hints = False
    ENOUGH = 100
    DEFAULT_S = 2.0
    KEPT_SAMPLES = 1000
    PER_TOKEN_S, PER_TOKEN_SQUARED_S = 1e-4, 5e-10
    """Prefill of x tokens = a·x + b·x²: about a 70B model on one node of eight H100. The user's to fit."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._durations: dict[str, _Samples] = {"": _Samples(self.KEPT_SAMPLES)}
        self._waiting: dict[int, tuple[str, float]] = {}
        self._until = np.full(run.view.contexts, -np.inf)

    def on_request(self, request: Request) -> None:
        tool, since = self._waiting.pop(request.context, ("", 0.0))
        if tool:
            for key in (tool, ""):
                self._durations.setdefault(key, _Samples(self.KEPT_SAMPLES)).add(request.at - since)
        self._until[request.context] = np.inf

    def on_end(self, request: Request, reply: Reply) -> None:
        tool = reply.message.calls[0].name if reply.message.calls else ""
        if tool:
            self._waiting[request.context] = tool, reply.at
        self._until[request.context] = reply.at + self._ttl(tool, reply.chunks * self.chunk_tokens)

    def _ttl(self, tool: str, tokens: int) -> float:
        everybody = self._durations[""]
        if not tool:
            return 0.0
        if len(everybody) <= self.ENOUGH:
            return self.DEFAULT_S
        own = self._durations.get(tool)
        samples = own if own is not None and len(own) > self.ENOUGH else everybody
        saved = self.PER_TOKEN_S * tokens + self.PER_TOKEN_SQUARED_S * tokens**2
        return samples.best_ttl(saved)

    def scores(self, leaves: Ints, now: float) -> Floats:
        kept = self.by_holder(leaves, self._until, nobody=-np.inf) > now
        return np.asarray(self.cache.last_used[leaves] + np.where(kept, _CLASS, 0.0))


class _Samples:
    """The latest durations, sorted."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._order: deque[float] = deque()
        self._sorted: list[float] = []

    def __len__(self) -> int:
        return len(self._order)

    def add(self, duration: float) -> None:
        self._order.append(duration)
        insort(self._sorted, duration)
        if len(self._order) > self._most:
            self._sorted.remove(self._order.popleft())

    def best_ttl(self, saved: float) -> float:
        """τ that maximises P(duration ≤ τ) · saved − τ, 0 if none is worth it."""
        durations = np.asarray(self._sorted)
        worth = np.arange(1, len(durations) + 1) / len(durations) * saved - durations
        best = int(worth.argmax())
        return float(durations[best]) if worth[best] > 0 else 0.0


class _Counted(ContextPolicy):
    """Counts the requests that went through each node."""

    uses_hints = False

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.count = np.zeros(len(run.cache.parent))

    def on_request(self, request: Request) -> None:
        node = request.tip
        while node != ROOT:
            self.count[node] += 1
            node = self.cache.parent[node]


class Evoke(_Counted):
    """EVOKE: w_r · 0.5^(age / half-life) + w_u · (1 − 0.5^count). Its floors by role are left out: roles do not end
    where chunks do, and one floor for all changes no order. The weights are its user's."""

    RECENCY, USE, HALF_LIFE_S = 0.6, 0.4, 300.0

    def scores(self, leaves: Ints, now: float) -> Floats:
        age = now - self.cache.last_used[leaves]
        recency = self.RECENCY * np.exp2(-age / self.HALF_LIFE_S)
        return np.asarray(recency + self.USE * (1.0 - np.exp2(-self.count[leaves])))


class Marconi(ContextPolicy):
    """Marconi: S = recency + α · FLOPs saved per byte, both scaled to [0, 1] over the candidates.

    A chunk at depth d saves its linear work and its attention over d chunks, so deep chunks save more per byte. α is
    its user's.
    """

    uses_hints = False
    ALPHA = 0.5
    LINEAR_CHUNKS = 64.0
    """Depth in chunks at which attention costs as much as the linear layers (16k tokens of 256-token chunks)."""

    def scores(self, leaves: Ints, now: float) -> Floats:
        used = self.cache.last_used[leaves]
        depth = np.array([self.cache.start[leaf] for leaf in leaves.tolist()], dtype=np.float64)
        scale = 256 / self.chunk_tokens
        return np.asarray(_scaled(used) + self.ALPHA * _scaled(1.0 + depth / (self.LINEAR_CHUNKS * scale)))


def _scaled(values: Floats) -> Floats:
    low, high = values.min(), values.max()
    return np.asarray((values - low) / (high - low) if high > low else np.zeros(len(values)))


class MarconiOffload(_Counted):
    """vllm-marconi-offload: reuse · exp(−decay · age) / (depth + 1), depth in chunks. The decay is its user's."""

    DECAY_PER_S = 1 / 300.0

    def scores(self, leaves: Ints, now: float) -> Floats:
        age = now - self.cache.last_used[leaves]
        depth = np.array([self.cache.start[leaf] for leaf in leaves.tolist()], dtype=np.float64)
        return np.asarray(self.count[leaves] * np.exp(-self.DECAY_PER_S * age) / (depth + 1.0))


class StepsToExecution(ContextPolicy):
    """After KVFlow: the agent furthest from its next step goes first; what several share counts for the nearest.

    KVFlow reads steps off a workflow graph, which coding agents do not have. Steps here: 0 running, or its tools have
    come back; 1 a tool runs; 2 its sub-agents run; 3 a person is to answer. Equal steps: least recently used first.
    """

    RUNNING, TOOL, AGENTS, PERSON = range(4)

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._steps = np.zeros(run.view.contexts)

    def on_request(self, request: Request) -> None:
        self._steps[request.context] = self.RUNNING

    def on_end(self, request: Request, reply: Reply) -> None:
        uses = reply.message.calls
        steps = self.TOOL if uses else self.PERSON
        if any(use.subagent is not None for use in uses):
            steps = self.AGENTS
        self._steps[request.context] = steps

    def on_signal(self, signal: SeenSignal) -> None:
        if signal.kind is SignalKind.TOOL_FINISHED:
            self._steps[signal.context] = self.RUNNING
        elif signal.kind is SignalKind.WAITING_HUMAN:
            self._steps[signal.context] = self.PERSON

    def scores(self, leaves: Ints, now: float) -> Floats:
        nearest = self.by_holder(leaves, -self._steps, nobody=-math.inf)
        nearest = np.maximum(nearest, -self.PERSON - 1)
        return np.asarray(nearest * _CLASS + self.cache.last_used[leaves])


class NextCall(ContextPolicy):
    """Not a policy but what perfect forecasts are worth: when each conversation calls next is known, nothing else.

    The farthest goes first, from its tail; new chunks displace only what is needed later than they are.
    """

    def __init__(self, run: Run, begin: Floats) -> None:
        super().__init__(run)
        self._due: list[deque[float]] = [deque() for _ in range(run.view.contexts)]
        for context, at in zip(run.view.context.tolist(), begin.tolist(), strict=True):
            self._due[context].append(at)
        self._next = np.array([due[0] if due else np.inf for due in self._due])

    def on_request(self, request: Request) -> None:
        due = self._due[request.context]
        due.popleft()
        self._next[request.context] = due[0] if due else np.inf

    def scores(self, leaves: Ints, now: float) -> Floats:
        return np.maximum(self.by_holder(leaves, -self._next, nobody=-1e15), -1e15)

    def newcomer(self, request: Request, now: float) -> float:
        return max(-float(self._next[request.context]), -1e15)
