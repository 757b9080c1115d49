"""One tier of memory under a policy: what hits, what is held.

At a request what is resident of its prompt hits; the rest is computed and admitted as far as it fits; at the end the
reply's chunks follow. What does not fit streams through. A hit is a leading run of chunks: without its head a prefix
is worth nothing. Over the optimum (:mod:`kvpilot.sim.belady`) no pin holds its hand, so under ``Pin.CALL`` even perfect
forecasts do not reach it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import StrEnum
from functools import cached_property

import numpy as np

from kvpilot.domain import SignalKind
from kvpilot.replay.plan import Hints
from kvpilot.sim.belady import NextUses
from kvpilot.sim.events import Event, EventKind, events
from kvpilot.sim.outcome import Level, Outcome
from kvpilot.sim.policy import ContextPolicy, Run
from kvpilot.sim.tree_cache import TreeCache
from kvpilot.sim.view import Reply, Request, View, view_of
from kvpilot.sim.working_set import working_set
from kvpilot.sim.workload import INSTANT_S, Ints, Workload, compile_workload
from kvpilot.traces import Overlay, TraceSession, overlay


class Pin(StrEnum):
    """How long what a request references is safe from eviction."""

    CALL = "call"
    """To the end of its reply: memory of an engine, which reads it all the time."""
    LOOKUP = "lookup"
    """While it is looked up and admitted: a tier below the engine, which loads a copy."""


DEFAULT_PIN = Pin.LOOKUP


class Scenario:
    """A workload with what many runs over it share, each made when first needed."""

    def __init__(self, laid: Overlay, pin: Pin = DEFAULT_PIN) -> None:
        self.laid = laid
        self.pin = pin
        self.workload: Workload = compile_workload(laid)
        self._views: dict[Hints, View] = {}
        self._events: dict[Hints, list[Event]] = {}

    def view(self, hints: Hints) -> View:
        if hints not in self._views:
            self._views[hints] = view_of(self.workload, self.laid, hints)
        return self._views[hints]

    def events(self, hints: Hints) -> list[Event]:
        if hints not in self._events:
            self._events[hints] = events(self.workload, self.view(hints))
        return self._events[hints]

    @cached_property
    def calls(self) -> list[Event]:
        """Requests and ends alone."""
        return events(self.workload)

    @cached_property
    def next_uses(self) -> NextUses:
        return NextUses(self.workload, self.calls)

    @cached_property
    def instant(self) -> tuple[list[Event], NextUses]:
        """As if replies took no time: requests and ends, and their next uses. For bounds on any engine."""
        workload = replace(self.workload, end=self.workload.begin + INSTANT_S)
        calls = events(workload)
        return calls, NextUses(workload, calls)

    @cached_property
    def working_set(self) -> float:
        """Chunks."""
        return working_set(self.workload, self.calls)

    @cached_property
    def reusable(self) -> Ints:
        """By call, leading chunks of the prompt that an infinite cache would hit."""
        return _infinite(self.workload, self.calls)


def scenario_of(
    sessions: Sequence[TraceSession],
    at_most: int | None,
    seed: int,
    window_s: float | None = None,
    pin: Pin = DEFAULT_PIN,
) -> Scenario:
    """``at_most`` sessions (None: all, as where there are fewer) laid over one another, compiled."""
    count = len(sessions) if at_most is None else min(at_most, len(sessions))
    return Scenario(overlay(sessions, count, seed, window_s), pin)


def _infinite(workload: Workload, calls: list[Event]) -> Ints:
    cache = TreeCache(workload, capacity=workload.distinct_chunks)
    hits = np.zeros(workload.calls, dtype=np.int32)
    for event in calls:
        tip = workload.prompt_tip if event.kind is EventKind.REQUEST else workload.context_tip
        found = cache.fill(int(tip[event.item]))
        if event.kind is EventKind.REQUEST:
            hits[event.item] = found
    return hits


Observer = Callable[[TreeCache, Event], None]


def run_contexts(
    scenario: Scenario,
    make: Callable[[Run], ContextPolicy],
    capacity: int,
    hints: Hints,
    observe: Observer | None = None,
) -> Outcome:
    """A policy over contexts in a tier of ``capacity`` chunks. ``observe`` sees the cache after each event."""
    workload, view = scenario.workload, scenario.view(hints)
    cache = TreeCache(workload, capacity, pin_calls=scenario.pin is Pin.CALL)
    policy = make(Run(cache, view, workload.chunk_tokens))
    tables = Tables(workload, view)
    hits = np.zeros(workload.calls, dtype=np.int32)
    latest: dict[int, int] = {}
    running: dict[int, Request] = {}
    level = Level()
    for event in scenario.events(hints):
        now, kind, index = event
        policy.before(now)
        if kind is EventKind.REQUEST:
            request = tables.request(index, now)
            running[index] = request
            latest[request.context] = index
            policy.on_request(request)
            newcomer = policy.newcomer(request, now)
            hits[index] = cache.request(index, request.tip, request.context, now, policy.scores, newcomer)
        elif kind is EventKind.END:
            request = running.pop(index)
            reply = tables.reply(index, now)
            goes_on = latest[request.context] == index
            policy.on_end(request, reply)
            newcomer = policy.newcomer(request, now)
            cache.end(
                index,
                request.tip,
                reply.tip,
                request.context if goes_on else None,
                now,
                policy.scores,
                newcomer,
            )
        else:
            signal = view.signals[index]
            if signal.kind is SignalKind.END:
                cache.release(signal.context)
            policy.on_signal(signal)
        level.set(cache.used, now)
        if observe is not None:
            observe(cache, event)
    return Outcome(hits, level.mean, level.peak, cache.written)


class Tables:
    """What requests and replies are made of, as plain lists: looking up numpy scalars is slow."""

    def __init__(self, workload: Workload, view: View) -> None:
        self._calls = workload.recorded
        self._context = view.context.tolist()
        self._session = view.session.tolist()
        self._parent = view.parent.tolist()
        self._tip = workload.prompt_tip.tolist()
        self._context_tip = workload.context_tip.tolist()
        self._prompt = workload.depths(workload.prompt_tip).tolist()
        self._chunks = workload.depths(workload.context_tip).tolist()
        self._tokens = workload.prompt_tokens.tolist()
        hidden = np.array([agent.recorded.hidden_tok for agent in workload.agents])
        self._head = (hidden // workload.chunk_tokens)[workload.agent].tolist()

    def request(self, index: int, now: float) -> Request:
        context = self._context[index]
        return Request(
            index=index,
            at=now,
            context=context,
            session=self._session[context],
            parent=self._parent[context],
            tip=self._tip[index],
            prompt=self._prompt[index],
            head=self._head[index],
            tokens=self._tokens[index],
            added=self._calls[index].add,
        )

    def reply(self, index: int, now: float) -> Reply:
        return Reply(now, self._context_tip[index], self._chunks[index], self._calls[index].reply)
