"""Finds message boundaries beside everything else: newest prompt of each thread first come, older ones dropped."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict

from kvpilot.context.segments import SegmentedPrompt, Segmenter
from kvpilot.coordinator.mapper import Mapped
from kvpilot.sessions.book import SessionBook, Thread

log = logging.getLogger(__name__)

MAX_QUEUE = 1000


class SegmentQueue:
    """One job per thread at most; a job replaces an older one of the same thread."""

    def __init__(self, segmenter: Segmenter, book: SessionBook) -> None:
        self._segmenter = segmenter
        self._book = book
        self._jobs: OrderedDict[str, Mapped] = OrderedDict()
        self._known: dict[str, SegmentedPrompt] = {}
        self._wake = asyncio.Event()
        self._lock = asyncio.Lock()
        self.shed = 0
        self.methods: dict[str, int] = {}

    def put(self, mapped: Mapped) -> None:
        self._jobs[mapped.thread.owner] = mapped
        if len(self._jobs) > MAX_QUEUE:
            self._jobs.popitem(last=False)
            self.shed += 1
        self._wake.set()

    def forget(self, owner: str) -> None:
        self._jobs.pop(owner, None)
        self._known.pop(owner, None)

    def peek(self, owner: str) -> SegmentedPrompt | None:
        return self._known.get(owner)

    async def of(self, thread: Thread) -> SegmentedPrompt | None:
        """The thread's segments now, computed at once if they are still waiting."""
        job = self._jobs.get(thread.owner)
        if job is not None:
            await self._do(job)
        return self._known.get(thread.owner)

    async def run(self) -> None:
        while True:
            await self._wake.wait()
            if not self._jobs:
                self._wake.clear()
                continue
            await self._do(next(iter(self._jobs.values())))
            await asyncio.sleep(0)

    async def _do(self, job: Mapped) -> None:
        async with self._lock:
            owner = job.thread.owner
            if self._jobs.get(owner) is not job:
                return
            del self._jobs[owner]
            try:
                found = await self._segmenter.segment(
                    job.body,
                    job.prompt,
                    previous=self._known.get(owner),
                    output_tokens=job.output,
                    reply=job.reply,
                )
            except Exception:
                # Segments explain and serve range edits; their absence must not stop the mapping of chunks.
                log.exception("segments of %s", owner)
                return
            self._known[owner] = found
            job.thread.segments = tuple(found.segments)
            job.thread.segments_method = found.method
            self.methods[found.method] = self.methods.get(found.method, 0) + 1
