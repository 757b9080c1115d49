"""Actions under way: which contexts they are about, and what they wait for."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Collection, Coroutine, Sequence
from typing import Any

from kvpilot.sessions.book import Thread

log = logging.getLogger(__name__)

DRAIN_TIMEOUT_S = 600.0
"""How long an action waits for its session's running requests."""


class ActionTasks:
    """``changed`` is set when anything happened that may call for a new plan; ``settled`` when a thread may have
    become what :meth:`drained` waits for."""

    def __init__(self) -> None:
        self.changed = asyncio.Event()
        self.settled = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._busy: dict[str, int] = {}

    def start(self, work: Coroutine[Any, Any, None], owners: Sequence[str]) -> None:
        for owner in owners:
            self._busy[owner] = self._busy.get(owner, 0) + 1
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._ended(done, owners))

    def _ended(self, task: asyncio.Task[None], owners: Sequence[str]) -> None:
        self._tasks.discard(task)
        for owner in owners:
            left = self._busy.get(owner, 1) - 1
            if left:
                self._busy[owner] = left
            else:
                self._busy.pop(owner, None)
        self.changed.set()
        if not task.cancelled() and task.exception() is not None:
            log.error("an action failed unexpectedly", exc_info=task.exception())

    @property
    def under_way(self) -> int:
        """Actions that have begun and not ended."""
        return len(self._tasks)

    def busy(self, owner: str) -> bool:
        """Whether an action on this thread is under way."""
        return owner in self._busy

    def busy_owners(self) -> Collection[str]:
        """All of whom that is so."""
        return self._busy.keys()

    async def drained(self, threads: Sequence[Thread]) -> None:
        """Waits until no request of the threads runs and the tokens of all that ended are known (bounded)."""
        deadline = time.monotonic() + DRAIN_TIMEOUT_S
        while any(thread.unsettled for thread in threads) and time.monotonic() < deadline:
            self.settled.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.settled.wait(), 1.0)

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
