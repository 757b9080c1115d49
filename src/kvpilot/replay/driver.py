"""Carries a plan out: waits, sends, hints, measures."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from kvpilot.domain import SignalKind
from kvpilot.replay.client import Control, ControlError, Gateway
from kvpilot.replay.compaction import CompactionWatch
from kvpilot.replay.plan import Hints, PlannedCall, PlannedSession, PlannedSignal
from kvpilot.replay.render import Conversation, PrefixMemory
from kvpilot.replay.text import TextMaker


class TurnRow(msgspec.Struct):
    """One request of the replay, as its client saw it."""

    session: str
    agent: str
    turn: int
    tenant: str
    started_s: float
    prompt_tokens: int
    planned_tokens: int
    reusable_tokens: int
    cached_tokens: int
    ttft_ms: float | None
    e2e_ms: float | None
    status: int
    summarises: bool = False
    resident_before: dict[str, Any] | None = None
    error: str | None = None


class TierSamples(msgspec.Struct):
    """Bytes held per tier over the run, sampled at even steps."""

    samples: dict[str, list[int]] = msgspec.field(default_factory=dict)
    capacity: dict[str, int] = msgspec.field(default_factory=dict)

    def add(self, tiers: Mapping[str, Mapping[str, int]]) -> None:
        for tier, usage in tiers.items():
            self.samples.setdefault(tier, []).append(usage["used_bytes"])
            self.capacity[tier] = usage["capacity_bytes"]

    def held(self) -> dict[str, dict[str, int]]:
        return {
            tier: {"mean": round(sum(values) / len(values)), "peak": max(values)}
            for tier, values in self.samples.items()
        }

    def written(self) -> dict[str, int]:
        """What was written at least: increases between samples (a write undone in between is not seen)."""
        return {
            tier: sum(max(0, b - a) for a, b in itertools.pairwise([0, *values]))
            for tier, values in self.samples.items()
        }


class Replayer:
    """One replay. ``rows`` grow while it runs, so that an interrupted run still has results."""

    def __init__(
        self,
        gateway: Gateway,
        control: Control | None,
        texts: TextMaker,
        hints: Hints,
        salt: str = "",
        api_keys: Mapping[str, str] | None = None,
        progress: Callable[[TurnRow], None] = lambda row: None,
    ) -> None:
        self._gateway, self._control, self._texts = gateway, control, texts
        self._hints, self._salt, self._api_keys, self._progress = hints, salt, api_keys or {}, progress
        self._memory = PrefixMemory()
        self._began = 0.0
        lifecycle = control is not None and hints is Hints.LIFECYCLE
        self.compactions = CompactionWatch(control) if lifecycle and control is not None else None
        self.rows: list[TurnRow] = []
        self.tiers = TierSamples()
        self.signals = 0
        self.signals_failed = 0

    async def run(self, sessions: Sequence[PlannedSession]) -> None:
        """All sessions side by side, as planned. Cancelling it leaves ``rows`` as far as they are."""
        self._began = time.monotonic()
        sampling = asyncio.create_task(self._sample_tiers())
        try:
            async with asyncio.TaskGroup() as group:
                for session in sessions:
                    group.create_task(self._session(session))
            if self.compactions is not None:
                await self.compactions.finish()
        finally:
            sampling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await sampling

    async def _session(self, session: PlannedSession) -> None:
        await asyncio.sleep(session.start_s)
        conversation = Conversation(self._texts, self._salt + session.tenant)
        ended = [asyncio.get_running_loop().create_future() for _ in session.calls]
        names: dict[str, str] = {}

        async def call(planned: PlannedCall) -> None:
            for wait in planned.waits:
                end = await ended[wait.call]
                await asyncio.sleep(max(0.0, end + wait.gap_s - time.monotonic()))
            await self._send(session, conversation, planned, names)
            ended[planned.index].set_result(time.monotonic())
            for signal in planned.signals:
                group.create_task(self._signal(session, planned, signal))

        async with asyncio.TaskGroup() as group:
            for planned in session.calls:
                group.create_task(call(planned))

    async def _send(
        self,
        session: PlannedSession,
        conversation: Conversation,
        planned: PlannedCall,
        names: dict[str, str],
    ) -> None:
        units = conversation.units(planned)
        reusable = self._memory.reusable(units, session.tenant)
        self._memory.add(units, session.tenant)
        agent = session.session_id(planned.agent)
        ids = (agent, session.parent_id(planned.agent)) if self._hints is Hints.LIFECYCLE else None
        resident = await self._resident(agent if ids else names.get(planned.agent))
        started = time.monotonic() - self._began
        result = await self._gateway.chat(
            conversation.messages(planned),
            planned.max_tokens,
            session=ids,
            api_key=self._api_keys.get(session.tenant),
        )
        if result.session:
            names[planned.agent] = result.session
        if result.error is None:
            conversation.replied(planned.agent, planned, result.content)
        self._memory.add([*units, conversation.reply_unit(planned)], session.tenant)
        row = TurnRow(
            session=session.id,
            agent=planned.agent,
            turn=planned.turn,
            tenant=session.tenant,
            started_s=round(started, 3),
            prompt_tokens=result.prompt_tokens,
            planned_tokens=sum(tokens for _, tokens in units),
            reusable_tokens=reusable,
            cached_tokens=result.cached_tokens,
            ttft_ms=result.ttft_ms,
            e2e_ms=result.e2e_ms,
            status=result.status,
            summarises=planned.summarises,
            resident_before=resident,
            error=result.error,
        )
        self.rows.append(row)
        self._progress(row)
        if self.compactions is not None and result.error is None:
            if planned.summarises:
                await self.compactions.summarised(agent)
            elif self.compactions.waits_for(agent):
                self.compactions.continued(agent, planned.agent, planned.turn, result.cached_tokens)

    async def _resident(self, session: str | None) -> dict[str, Any] | None:
        if self._control is None or session is None:
            return None
        known = await self._control.session(session)
        return None if known is None else known.get("resident")

    async def _signal(self, session: PlannedSession, planned: PlannedCall, signal: PlannedSignal) -> None:
        await asyncio.sleep(signal.after_s)
        if self._control is None:
            return
        self.signals += 1
        parent = session.parent_id(planned.agent)
        try:
            await self._control.signal(
                session.session_id(planned.agent), SignalKind(signal.kind), parent, signal.eta_s
            )
        except ControlError:
            self.signals_failed += 1

    async def _sample_tiers(self, every_s: float = 0.5) -> None:
        while self._control is not None:
            with contextlib.suppress(ControlError):
                self.tiers.add(await self._control.tiers())
            await asyncio.sleep(every_s)
