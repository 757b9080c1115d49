"""Finds message boundaries beside everything else: one job per thread, newest prompt first come."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvpilot.context.conversation import decode_body
from kvpilot.context.messages import common_prefix
from kvpilot.context.segments import PreviousMap, SegmentedPrompt, Segmenter
from kvpilot.coordinator.mapper import Mapped
from kvpilot.domain import TokenArray
from kvpilot.sessions.book import Thread

log = logging.getLogger(__name__)

MAX_QUEUE = 1000


@dataclass(slots=True)
class Known:
    """The newest map of a thread, with what tells how much of it the next prompt shares."""

    map: SegmentedPrompt
    tokens: TokenArray
    hashes: Sequence[bytes]


class SegmentQueue:
    """A job replaces an older one of the same thread; beyond ``MAX_QUEUE`` the oldest are shed and counted.

    ``on_found`` is told when a thread's segments have changed (who stores the thread has to write it again).
    """

    def __init__(
        self, segmenter: Segmenter, on_found: Callable[[Thread], None] = lambda thread: None
    ) -> None:
        self._segmenter = segmenter
        self._on_found = on_found
        self._jobs: OrderedDict[str, Mapped] = OrderedDict()
        self._known: dict[str, Known] = {}
        self._wake = asyncio.Event()
        self._lock = asyncio.Lock()
        self.shed = 0
        self.methods: Counter[str] = Counter()

    def put(self, mapped: Mapped) -> None:
        self._jobs[mapped.thread.owner] = mapped
        if len(self._jobs) > MAX_QUEUE:
            self._jobs.popitem(last=False)
            self.shed += 1
        self._wake.set()

    def forget(self, owner: str) -> None:
        self._jobs.pop(owner, None)
        self._known.pop(owner, None)

    async def of(self, thread: Thread) -> SegmentedPrompt | None:
        """The thread's map now, made at once if it is still waiting; None if there is none."""
        job = self._jobs.get(thread.owner)
        if job is not None:
            await self._do(job)
        known = self._known.get(thread.owner)
        return known.map if known else None

    async def run(self) -> None:
        """Works off the queue; runs for ever."""
        while True:
            await self._wake.wait()
            if not self._jobs:
                self._wake.clear()
                continue
            await self._do(next(iter(self._jobs.values())))

    async def _do(self, job: Mapped) -> None:
        async with self._lock:
            owner = job.thread.owner
            if self._jobs.get(owner) is not job:
                return
            del self._jobs[owner]
            found = await self._segmenter.segment(job.body, job.prompt, previous=self._previous(job))
            self._known[owner] = Known(found, job.prompt, job.hashes)
            segments = list(found.segments)
            if job.output is not None and job.reply and found.message_ends:
                segments += self._segmenter.reply(found, decode_body(job.reply), job.output)
            job.thread.segments = tuple(segments)
            job.thread.segments_method = found.method
            self.methods[found.method] += 1
            self._on_found(job.thread)

    def _previous(self, job: Mapped) -> PreviousMap | None:
        known = self._known.get(job.thread.owner)
        if known is None:
            return None
        shared = common_prefix(known.hashes, job.hashes)
        return PreviousMap(known.map, known.tokens, shared - 1) if shared > 1 else None
