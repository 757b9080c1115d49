"""What a compaction in a replay left behind, and how soon it was gone."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import msgspec

from kvpilot.replay.client import Control

MAPPED_WITHIN_S = 10.0
GONE_WITHIN_S = 15.0
STEP_S = 0.1


class CompactionRow(msgspec.Struct):
    """One compaction. ``gone_after_s``: from the end of the first call on the new context until no tier of the
    cache layer held a superseded chunk, as its directory says; None = not within the time watched."""

    session: str
    agent: str
    turn: int
    superseded_chunks: int
    kept_chunks: int
    gone_after_s: float | None
    cached_tokens: int
    """What the first call on the new context found of the kept prefix."""


class CompactionWatch:
    """Notes an agent's chunks before a compaction and looks where they are after it."""

    def __init__(self, control: Control) -> None:
        self._control = control
        self._before: dict[str, list[str]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self.rows: list[CompactionRow] = []

    async def summarised(self, session: str) -> None:
        """The summarising call ended: what the session's context consists of now will be superseded."""
        self._before[session] = await self._chunks(session)

    def continued(self, session: str, agent: str, turn: int, cached_tokens: int) -> None:
        """The first call on the new context ended."""
        before = self._before.pop(session, None)
        if before:
            watch = self._watch(session, agent, turn, cached_tokens, before, time.monotonic())
            self._tasks.append(asyncio.get_running_loop().create_task(watch))

    def waits_for(self, session: str) -> bool:
        return session in self._before

    async def finish(self) -> None:
        """Wait for what is still being watched."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _watch(
        self, session: str, agent: str, turn: int, cached: int, before: list[str], ended: float
    ) -> None:
        now = before
        while now == before and time.monotonic() - ended < MAPPED_WITHIN_S:
            await asyncio.sleep(STEP_S)
            now = await self._chunks(session)
        dead = set(before) - set(now)
        gone: float | None = None
        while gone is None and time.monotonic() - ended < GONE_WITHIN_S:
            if not await self._held(dead):
                gone = round(time.monotonic() - ended, 2)
            await asyncio.sleep(STEP_S)
        kept = len(before) - len(dead)
        self.rows.append(CompactionRow(session, agent, turn, len(dead), kept, gone, cached))

    async def _chunks(self, session: str) -> list[str]:
        known: dict[str, Any] = await self._control.session(session) or {}
        return [chunk["hash"] for context in known.get("contexts", ()) for chunk in context["chunks"]]

    async def _held(self, chunks: set[str]) -> bool:
        """Whether any of the chunks is in a tier; the answer of an unreachable coordinator counts as yes."""
        with contextlib.suppress(Exception):
            return any(await self._control.located(sorted(chunks)))
        return True
