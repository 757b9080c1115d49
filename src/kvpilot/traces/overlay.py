"""Many recorded sessions laid over one another in time, as in ``--sessions N --seed S``."""

from __future__ import annotations

import random
from collections.abc import Iterable
from itertools import chain

import msgspec

from kvpilot.traces.errors import TraceError
from kvpilot.traces.model import TraceCall, TraceSession

LONGEST_GAP_S = 3600.0
LIVE_AT_ONCE = 20


class Placed(msgspec.Struct, frozen=True):
    """A session and when it starts, in seconds of the overlay."""

    session: TraceSession
    start: float


class Overlay(msgspec.Struct, frozen=True):
    """Sessions in order of their start; ``gaps_cut`` gaps were longer than an hour and were cut to one."""

    placed: tuple[Placed, ...]
    window_s: float
    gaps_cut: int

    def calls(self) -> list[tuple[float, TraceSession, TraceCall]]:
        """Every call with its time in the overlay, in time order."""
        return sorted(
            ((p.start + call.t_request, p.session, call) for p in self.placed for call in p.session.calls),
            key=lambda item: item[0],
        )


def overlay(
    sessions: Iterable[TraceSession],
    n: int,
    seed: int,
    window_s: float | None = None,
    live_at_once: int = LIVE_AT_ONCE,
    longest_gap_s: float = LONGEST_GAP_S,
) -> Overlay:
    """``n`` sessions drawn without replacement, each starting at a uniform time in a window.

    Reservoir sampling, so the stream is read once. Default window: the drawn sessions' busy time (calls and
    gaps below ten minutes) ÷ ``live_at_once``. Gaps above ``longest_gap_s`` are cut to it.
    Raises TraceError when there are fewer than ``n``.
    """
    rng = random.Random(seed)
    drawn: list[TraceSession] = []
    seen = 0
    for session in sessions:
        seen += 1
        if len(drawn) < n:
            drawn.append(session)
        elif (slot := rng.randrange(seen)) < n:
            drawn[slot] = session
    if len(drawn) < n:
        raise TraceError(f"the trace has {seen} sessions, {n} were asked for")
    shortened = [cut_gaps(session, longest_gap_s) for session in drawn]
    window = window_s if window_s is not None else sum(s.busy_s() for s, _ in shortened) / live_at_once
    placed = [Placed(session, rng.uniform(0.0, window)) for session, _ in shortened]
    return Overlay(
        tuple(sorted(placed, key=lambda p: p.start)), window, sum(number for _, number in shortened)
    )


def cut_gaps(session: TraceSession, longest_s: float) -> tuple[TraceSession, int]:
    """The session from time 0, with no call-less stretch longer than ``longest_s``; how many were cut."""
    if not session.calls:
        return session, 0
    origin = session.calls[0].t_request
    cut, removed, busy_until = 0, origin, origin
    calls = []
    for call in session.calls:
        if call.t_request - busy_until > longest_s:
            removed += call.t_request - busy_until - longest_s
            cut += 1
        busy_until = max(busy_until, call.t_end)
        calls.append(shift(call, -removed))
    return msgspec.structs.replace(session, calls=tuple(calls)), cut


def shift(call: TraceCall, by: float) -> TraceCall:
    """The call, ``by`` seconds later."""
    return msgspec.structs.replace(
        call,
        t_request=call.t_request + by,
        t_end=call.t_end + by,
        t_first=None if call.t_first is None else call.t_first + by,
    )


def chained(traces: Iterable[Iterable[TraceSession]]) -> Iterable[TraceSession]:
    """Several traces as one stream."""
    return chain.from_iterable(traces)
