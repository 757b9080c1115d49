"""Plays what a proxy sees of recorded calls to a session book, in order of time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from kvpilot.domain import SessionRef, Space
from kvpilot.eval.calls import HEAD, SeenCall
from kvpilot.sessions.book import SessionBook, Started


def play(
    calls: Sequence[SeenCall], book: SessionBook, ref: Callable[[int], SessionRef]
) -> Iterator[tuple[int, Started, bool]]:
    """Begins and ends every call in ``book``; yields after each its index, what was found, whether it began.

    ``ref``: what a call says about its session, by index.
    """
    moments = [(call.begin, 1, index) for index, call in enumerate(calls)]
    # Of what happens at the same time ends come first, but never before their own beginning.
    moments += [(max(call.end, call.begin + 1e-6), 0, index) for index, call in enumerate(calls)]
    running: dict[int, Started] = {}
    for now, begins, index in sorted(moments):
        call = calls[index]
        if begins:
            running[index] = _start(book, call, index, ref(index), now)
            yield index, running[index], True
            continue
        started = running.pop(index)
        book.finish(
            started.session,
            started.thread,
            tools=call.tools,
            asked=True,
            now=now,
            text=call.reply_text,
            name=call.reply_name,
            agents=call.agent_calls,
        )
        yield index, started, False


def _start(book: SessionBook, call: SeenCall, index: int, ref: SessionRef, now: float) -> Started:
    return book.start(
        tenant="default",
        ref=ref,
        space=Space("recorded"),
        hashes=call.hashes,
        head=HEAD,
        request_id=str(index),
        now=now,
        opening=call.opening,
        said=lambda: call.said,
    )
