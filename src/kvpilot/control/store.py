"""Embedded store (SQLite): sessions with their contexts, actions, and what the forecast learned.

Actions are written before they are acknowledged. Sessions change with every request and are written at most a
quarter of a second later; what a crash loses of them, the session's next full prompt repairs.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from kvpilot.coordinator.actions import Work
from kvpilot.domain import ActionRecord, Segment, SessionState, Space, TokenArray
from kvpilot.sessions.book import Session, SessionKey, Thread
from kvpilot.sessions.references import ReferenceTable

log = logging.getLogger(__name__)

FLUSH_S = 0.25
ACTIONS_KEPT = 5000
SCHEMA_VERSION = 1
SCHEMA = """
CREATE TABLE IF NOT EXISTS sessions (tenant TEXT, id TEXT, data BLOB NOT NULL, PRIMARY KEY (tenant, id));
CREATE TABLE IF NOT EXISTS actions
    (id TEXT PRIMARY KEY, created REAL NOT NULL, open INTEGER NOT NULL, record BLOB NOT NULL, work BLOB);
CREATE INDEX IF NOT EXISTS actions_created ON actions (created);
CREATE TABLE IF NOT EXISTS memory (name TEXT PRIMARY KEY, data BLOB NOT NULL);
"""


class ThreadRow(msgspec.Struct):
    owner: str
    space: Space
    hashes: list[bytes]
    head: int
    turns: int
    last_seen: float
    prompt_ends: list[int]
    segments: tuple[Segment, ...]
    segments_method: str
    leftover: list[bytes]
    tokens: bytes | None
    """The referenced context, zlib-compressed little-endian uint32; None when nothing is referenced."""


class SessionRow(msgspec.Struct):
    key: SessionKey
    explicit: bool
    parent: SessionKey | None
    state: SessionState
    since: float
    waiting_for: tuple[str, ...]
    expected_at: float | None
    created: float
    last_seen: float
    turns: int
    threads: list[ThreadRow]


_row_decoder = msgspec.msgpack.Decoder(SessionRow)
_record_decoder = msgspec.msgpack.Decoder(ActionRecord)
_work_decoder = msgspec.msgpack.Decoder(Work)


class Store:
    """One SQLite file. Use from one event loop; writing sessions happens on a worker thread."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=NORMAL")
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version not in (0, SCHEMA_VERSION):
            raise RuntimeError(
                f"{path} was written by another version of kvpilot (schema {version}); move it away"
            )
        self._db.executescript(SCHEMA)
        self._db.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
        self._dirty: dict[SessionKey, Session | None] = {}
        self._lock = asyncio.Lock()

    # ------------------------------------------------------------ sessions

    def session_changed(self, session: Session) -> None:
        self._dirty[session.key] = session

    def session_forgotten(self, session: Session) -> None:
        self._dirty[session.key] = None

    async def flush(self, references: ReferenceTable) -> None:
        """Write what changed since the last flush."""
        if not self._dirty:
            return
        dirty, self._dirty = self._dirty, {}
        rows = {key: _row(s, references) if s is not None else None for key, s in dirty.items()}
        async with self._lock:
            await asyncio.to_thread(self._write, rows)

    def _write(self, rows: dict[SessionKey, SessionRow | None]) -> None:
        with self._db:
            self._db.execute("BEGIN")
            for (tenant, session_id), row in rows.items():
                if row is None:
                    self._db.execute("DELETE FROM sessions WHERE tenant=? AND id=?", (tenant, session_id))
                    continue
                for thread in row.threads:
                    if thread.tokens is not None:
                        thread.tokens = zlib.compress(thread.tokens, 1)
                data = msgspec.msgpack.encode(row)
                self._db.execute("REPLACE INTO sessions VALUES (?, ?, ?)", (tenant, session_id, data))

    def load_sessions(self) -> Iterator[tuple[Session, list[tuple[Thread, TokenArray | None]]]]:
        """Sessions as they were, each thread with the context it referenced; unreadable rows are skipped."""
        for tenant, session_id, data in self._db.execute("SELECT tenant, id, data FROM sessions").fetchall():
            try:
                row = _row_decoder.decode(data)
                yield _session(row), [(_thread(row, t), _tokens(t)) for t in row.threads]
            except (msgspec.DecodeError, zlib.error, ValueError) as error:
                log.warning("stored session %s/%s is unreadable and skipped: %s", tenant, session_id, error)

    # ------------------------------------------------------------ actions

    def put_action(self, record: ActionRecord, work: Work | None) -> None:
        """Durable when it returns. ``work`` None keeps what was stored with the record before."""
        self._db.execute(
            "INSERT INTO actions VALUES (?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET"
            " open=excluded.open, record=excluded.record,"
            " work=CASE WHEN excluded.open THEN COALESCE(excluded.work, work) END",
            (
                record.id,
                record.created_at,
                int(record.open),
                msgspec.msgpack.encode(record),
                msgspec.msgpack.encode(work) if work is not None and record.open else None,
            ),
        )

    def load_actions(self) -> tuple[list[ActionRecord], list[tuple[ActionRecord, Work | None]]]:
        """Closed actions, oldest first, and the open ones with their work."""
        closed: list[ActionRecord] = []
        pending: list[tuple[ActionRecord, Work | None]] = []
        rows = self._db.execute("SELECT record, work FROM actions ORDER BY created, id").fetchall()
        for raw, work in rows:
            record = _record_decoder.decode(raw)
            if record.open:
                pending.append((record, _work_decoder.decode(work) if work else None))
            else:
                closed.append(record)
        return closed, pending

    def prune_actions(self) -> None:
        self._db.execute(
            "DELETE FROM actions WHERE open=0 AND created <"
            " (SELECT created FROM actions ORDER BY created DESC LIMIT 1 OFFSET ?)",
            (ACTIONS_KEPT,),
        )

    # ------------------------------------------------------------ what was learned

    def put_memory(self, name: str, value: object) -> None:
        self._db.execute("REPLACE INTO memory VALUES (?, ?)", (name, msgspec.msgpack.encode(value)))

    def load_memory(self, name: str) -> object | None:
        row = self._db.execute("SELECT data FROM memory WHERE name=?", (name,)).fetchone()
        return None if row is None else msgspec.msgpack.decode(row[0])

    def close(self) -> None:
        self._db.close()


def _row(session: Session, references: ReferenceTable) -> SessionRow:
    threads = [
        ThreadRow(
            owner=t.owner,
            space=t.space,
            hashes=list(t.hashes),
            head=t.head,
            turns=t.turns,
            last_seen=t.last_seen,
            prompt_ends=list(t.prompt_ends),
            segments=t.segments,
            segments_method=t.segments_method,
            leftover=list(t.leftover),
            tokens=references.tokens(t.owner).tobytes() if t.owner in references else None,
        )
        for t in session.threads.values()
    ]
    return SessionRow(
        key=session.key,
        explicit=session.explicit,
        parent=session.parent,
        state=session.state,
        since=session.since,
        waiting_for=session.waiting_for,
        expected_at=session.expected_at,
        created=session.created,
        last_seen=session.last_seen,
        turns=session.turns,
        threads=threads,
    )


def _session(row: SessionRow) -> Session:
    # Whatever ran when we stopped has no end we will hear of.
    state = SessionState.WAITING_HUMAN if row.state is SessionState.RUNNING else row.state
    return Session(
        key=row.key,
        explicit=row.explicit,
        parent=row.parent,
        state=state,
        since=row.since,
        waiting_for=row.waiting_for,
        expected_at=row.expected_at,
        created=row.created,
        last_seen=row.last_seen,
        turns=row.turns,
    )


def _thread(session: SessionRow, row: ThreadRow) -> Thread:
    return Thread(
        owner=row.owner,
        session=session.key,
        space=row.space,
        hashes=row.hashes,
        head=row.head,
        turns=row.turns,
        last_seen=row.last_seen,
        prompt_ends=row.prompt_ends,
        segments=row.segments,
        segments_method=row.segments_method,
        leftover=row.leftover,
    )


def _tokens(row: ThreadRow) -> TokenArray | None:
    return None if row.tokens is None else np.frombuffer(zlib.decompress(row.tokens), dtype="<u4")
