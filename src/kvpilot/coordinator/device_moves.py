"""Contexts into the engine's device pool and out of it: what the plan and clients ask for, as orders and actions."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvpilot.backends.base import BackendError
from kvpilot.coordinator.actions import ActionLog, Work
from kvpilot.coordinator.device import Device
from kvpilot.coordinator.forecasts import Forecasts
from kvpilot.coordinator.tasks import ActionTasks
from kvpilot.domain import ActionKind, ActionRecord, OutcomeStatus, Tier
from kvpilot.sessions.book import SessionBook, Thread
from kvpilot.sessions.references import ReferenceTable

PREFETCH_S = 30.0
"""How long it is waited for, the engine's busy times included; the engine goes on with it by itself."""


class DeviceMoves:
    def __init__(
        self,
        device: Device,
        *,
        book: SessionBook,
        references: ReferenceTable,
        forecasts: Forecasts,
        actions: ActionLog,
        tasks: ActionTasks,
        chunk_size: int,
        clock: Callable[[], float],
    ) -> None:
        self._device, self._book, self._references = device, book, references
        self._forecasts, self._actions, self._tasks = forecasts, actions, tasks
        self._chunk_size, self._clock = chunk_size, clock

    def send_down(self, thread: Thread, chunk: bytes | None) -> None:
        """The engine reuses first what the thread has in its pool from this chunk on (None: all of its session)."""
        if chunk is None:
            self._device.sent_down(thread.session[1], thread.space)
        elif thread.owner in self._references and chunk in (chunks := self._references.chunks(thread.owner)):
            start, tokens = chunks.index(chunk) * self._chunk_size, self._references.tokens(thread.owner)
            self._device.sent_down(thread.session[1], thread.space, tokens, start)

    def make_way(self, owners: Iterable[str], chunk: bytes) -> None:
        """What lies in the pool from this chunk on makes way for what returns sooner."""
        for owner in owners:
            if (thread := self._book.thread(owner)) is not None and not thread.in_flight:
                self.send_down(thread, chunk)

    def begin_prefetch(self, work: Work, planned: int, reason: str) -> ActionRecord:
        """Bring the owner's context up to the last chunk of ``work`` from host memory into the engine's pool."""
        thread = self._book.thread(work.owner) if work.owner else None
        known = thread is not None and thread.owner in self._references
        tenant, session = thread.session if thread is not None and known else ("", None)
        # Not kept for a restart: the engine's pool is another one by then.
        record = self._actions.open(
            ActionKind.PREFETCH,
            now=self._clock(),
            session=session,
            tenant=tenant,
            source="plan",
            planned=planned if known else 0,
            status=OutcomeStatus.ACCEPTED if known else OutcomeStatus.MISSING,
            reason=reason if known else "no context with these chunks is known",
        )
        if thread is not None and known:
            self._tasks.start(self._bring(record, work, thread), [thread.owner])
        return record

    async def _bring(self, record: ActionRecord, work: Work, thread: Thread) -> None:
        tokens = self._references.tokens(thread.owner)[: len(work.chunks) * self._chunk_size]
        forecast = self._forecasts.of(thread.owner, self._clock())
        eta_s = forecast.quantile(0.5) if forecast is not None else None
        try:
            outcome = await self._device.prefetch(thread.session[1], thread, tokens, eta_s, PREFETCH_S)
        except BackendError as error:
            failed = OutcomeStatus.FAILED
            self._actions.update(record.id, status=failed, reason=str(error), finished_at=self._clock())
            return
        state = self._device.state
        there = outcome.confirmed * (state.block_tokens if state is not None else 0) // self._chunk_size
        ahead = len(work.chunks) - record.planned
        self._actions.update(
            record.id,
            status=outcome.status,
            reason=outcome.reason or record.reason,
            confirmed=max(0, there - ahead),
            skipped=ahead,
            tiers={Tier.DEVICE.value: there},
            finished_at=self._clock(),
        )
