"""The log of actions and what became of them."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from kvpilot.domain import ActionKind, ActionRecord, OutcomeStatus, Space, new_id

MAX_RECORDS = 20_000


class Deferral(msgspec.Struct, frozen=True):
    """What a deferred action waits for and is going to do, in words that outlive a restart.

    ``sessions`` are (tenant, id), ``turns`` how many requests each had when the action was asked for; ``owners``
    are the threads it is about, ``whole`` and ``cut`` what it says of them (see ``commands.Target``).
    """

    sessions: tuple[tuple[str, str], ...]
    turns: tuple[int, ...]
    owners: tuple[str, ...]
    works: tuple[Work, ...] = ()
    whole: bool = False
    cut: int | None = None
    suspended: bool = False
    """Whether the session had been suspended by then: one that was resumed is not demoted."""


class Work(msgspec.Struct, frozen=True):
    """What an action is to be done to; kept with an open action so that a restart can take it up again.

    ``chunks`` are chunk hashes, head of the context first. ``owner`` is the thread whose context it is (None for
    chunks nobody references). ``deferral``: what has to be found out first, of an action that has not begun.
    """

    space: Space
    chunks: tuple[bytes, ...]
    owner: str | None = None
    deferral: Deferral | None = None


Listener = Callable[[ActionRecord, Work | None], None]


class ActionLog:
    """Bounded, newest last. ``listener`` is told every change (the store writes it down)."""

    def __init__(self, listener: Listener | None = None) -> None:
        self._records: OrderedDict[str, ActionRecord] = OrderedDict()
        self._closed: dict[str, asyncio.Event] = {}
        self._named: dict[tuple[str, str], list[str]] = {}
        self.listener = listener
        self.totals: dict[tuple[str, str], int] = {}
        self.chunks: dict[str, int] = {}

    def open(
        self,
        kind: ActionKind,
        *,
        now: float,
        session: str | None,
        tenant: str,
        source: str,
        planned: int,
        skipped: int = 0,
        reason: str = "",
        status: OutcomeStatus = OutcomeStatus.ACCEPTED,
        work: Work | None = None,
    ) -> ActionRecord:
        """Write down a new action; with a final ``status`` it is closed at once (rejected, missing, nothing to do)."""
        record = ActionRecord(
            id=new_id("a", secrets.randbits(64)),
            kind=kind,
            status=status,
            created_at=now,
            session=session,
            tenant=tenant,
            source=source,
            reason=reason,
            planned=planned,
            skipped=skipped,
        )
        if not record.open:
            record = msgspec.structs.replace(record, finished_at=now)
        self._put(record, work)
        return record

    def update(self, action_id: str, work: Work | None = None, **changes: Any) -> ActionRecord:
        """Replace fields of a record, and what it is to be done to. Raises KeyError for an unknown id."""
        record = msgspec.structs.replace(self._records[action_id], **changes)
        self._put(record, work)
        return record

    def name(self, record: ActionRecord, client_ids: tuple[str, ...], asked: str) -> ActionRecord:
        """Write down the names a client has for the action, so that :meth:`named` finds it, also after a restart."""
        record = self._renamed(record, client_ids, asked)
        self.adopt(record)
        return record

    def unname(self, records: Sequence[ActionRecord]) -> None:
        """Take the client's names from actions: they are going to stand for others."""
        for record in records:
            for client_id in record.client_ids:
                self._named.pop((record.tenant, client_id), None)
            self._renamed(record, (), "")

    def _renamed(self, record: ActionRecord, client_ids: tuple[str, ...], asked: str) -> ActionRecord:
        record = self._records.get(record.id, record)
        record = self._records[record.id] = msgspec.structs.replace(
            record, client_ids=client_ids, asked=asked
        )
        if self.listener is not None:
            self.listener(record, None)
        return record

    def named(self, tenant: str, client_id: str) -> list[ActionRecord]:
        """The actions a tenant's client knows by this name, as they stand now."""
        return [self._records[action_id] for action_id in self._named.get((tenant, client_id), ())]

    def adopt(self, record: ActionRecord) -> None:
        """Put back a record loaded from the store, without telling the listener."""
        self._records[record.id] = record
        for client_id in record.client_ids:
            ids = self._named.setdefault((record.tenant, client_id), [])
            if record.id not in ids:
                ids.append(record.id)

    def _put(self, record: ActionRecord, work: Work | None) -> None:
        self._records[record.id] = record
        while len(self._records) > MAX_RECORDS:
            old, dropped = self._records.popitem(last=False)
            self._closed.pop(old, None)
            for client_id in dropped.client_ids:
                self._named.pop((dropped.tenant, client_id), None)
        if not record.open:
            key = (record.kind.value, record.status.value)
            self.totals[key] = self.totals.get(key, 0) + 1
            self.chunks[record.kind.value] = self.chunks.get(record.kind.value, 0) + record.confirmed
            event = self._closed.pop(record.id, None)
            if event is not None:
                event.set()
        if self.listener is not None:
            self.listener(record, work)

    def get(self, action_id: str) -> ActionRecord | None:
        return self._records.get(action_id)

    def newest(self, *, session: str | None = None, tenant: str | None = None) -> Iterator[ActionRecord]:
        """Newest first, optionally of one session or tenant only."""
        for record in reversed(self._records.values()):
            if session is not None and record.session != session:
                continue
            if tenant is not None and record.tenant != tenant:
                continue
            yield record

    def open_records(self) -> list[ActionRecord]:
        return [record for record in self._records.values() if record.open]

    async def wait(self, action_id: str, timeout_s: float) -> ActionRecord | None:
        """The record once it is final, or as it stands after ``timeout_s`` seconds; None for an unknown id."""
        record = self._records.get(action_id)
        if record is None or not record.open or timeout_s <= 0:
            return record
        event = self._closed.setdefault(action_id, asyncio.Event())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(event.wait(), timeout_s)
        return self._records.get(action_id)
