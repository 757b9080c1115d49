"""Embedded store (SQLite): sessions with their contexts, actions, and what the forecast learned.

Actions are written before they are acknowledged. Sessions change with every request and are written at most a
quarter of a second later; what a crash loses of them, the session's next full prompt repairs.

Nothing waits for a store that cannot be written (disk full, locked): what it missed is kept and written with the
first flush that works again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ParamSpec, TypeVar

import msgspec
import numpy as np

from kvpilot.coordinator.actions import Work
from kvpilot.coordinator.service import StoredThread
from kvpilot.domain import ActionRecord, Segment, SessionState, Space, TokenArray
from kvpilot.forecast.forecaster import StoredRhythm
from kvpilot.sessions.book import Session, SessionKey, Thread
from kvpilot.sessions.references import ReferenceTable

log = logging.getLogger(__name__)

FLUSH_S = 0.25
BUSY_TIMEOUT_MS = 100
"""How long a write waits for another program that has the file locked."""
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
    rhythm: StoredRhythm | None = None


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
    parent_guessed: bool = False


T = TypeVar("T")
P = ParamSpec("P")
RhythmOf = Callable[[str], StoredRhythm | None]
LateAction = tuple[ActionRecord, Work | None]

_UNREADABLE = (ValueError, TypeError)
"""What decoding a damaged row raises (msgspec's errors are ValueErrors)."""

_row_decoder = msgspec.msgpack.Decoder(SessionRow)
_record_decoder = msgspec.msgpack.Decoder(ActionRecord)
_work_decoder = msgspec.msgpack.Decoder(Work)


class Store:
    """One SQLite file. Use from one event loop; writing sessions happens on a worker thread."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._db = _open(path)
        self._dirty: dict[SessionKey, Session | None] = {}
        self._late: dict[str, LateAction] = {}
        self._working = True
        self._lock = asyncio.Lock()

    # ------------------------------------------------------------ sessions

    def session_changed(self, session: Session) -> None:
        self._dirty[session.key] = session

    def session_forgotten(self, session: Session) -> None:
        self._dirty[session.key] = None

    async def flush(self, references: ReferenceTable, rhythm_of: RhythmOf = lambda owner: None) -> None:
        """Write what changed since the last flush; what cannot be written is kept for the next."""
        # Who is cancelled meanwhile does not take along what the worker thread has in hand.
        await asyncio.shield(self._flush(references, rhythm_of))

    async def _flush(self, references: ReferenceTable, rhythm_of: RhythmOf) -> None:
        async with self._lock:
            dirty, late = self._dirty, dict(self._late)
            if not dirty and not late:
                return
            rows = {
                key: _row(s, references, rhythm_of) if s is not None else None for key, s in dirty.items()
            }
            self._dirty = {}
            try:
                await asyncio.to_thread(self._write, late, rows)
            except sqlite3.Error as error:
                self._dirty = dirty | self._dirty
                self._fails(error)
                return
            for action_id, entry in late.items():
                if self._late.get(action_id) is entry:
                    del self._late[action_id]
            if not self._working:
                log.info("%s is written again", self._path)
            self._working = True

    def _write(self, late: dict[str, LateAction], rows: dict[SessionKey, SessionRow | None]) -> None:
        # No transaction: it would take in the actions that are acknowledged meanwhile, and undo them.
        for action_id, entry in late.items():
            _by_itself(f"action {action_id}", self._write_action, *entry)
        for key, row in rows.items():
            _by_itself(f"session {key!r}", self._write_session, key, row)

    def _write_session(self, key: SessionKey, row: SessionRow | None) -> None:
        if row is None:
            self._db.execute("DELETE FROM sessions WHERE tenant=? AND id=?", key)
            return
        for thread in row.threads:
            if thread.tokens is not None:
                thread.tokens = zlib.compress(thread.tokens, 1)
        self._db.execute("REPLACE INTO sessions VALUES (?, ?, ?)", (*key, msgspec.msgpack.encode(row)))

    def _fails(self, error: sqlite3.Error) -> None:
        if self._working:
            log.warning("%s cannot be written (%s): changes are kept until it can be", self._path, error)
        self._working = False

    def load_sessions(self) -> Iterator[tuple[Session, list[StoredThread]]]:
        """Sessions as they were; unreadable rows are skipped."""
        for tenant, session_id, data in self._db.execute("SELECT tenant, id, data FROM sessions").fetchall():
            try:
                row = _row_decoder.decode(data)
                yield (
                    _session(row),
                    [StoredThread(_thread(row, t), _tokens(t), t.rhythm) for t in row.threads],
                )
            except (*_UNREADABLE, zlib.error) as error:
                _skipped(f"session {tenant}/{session_id}", error)

    # ------------------------------------------------------------ actions

    def put_action(self, record: ActionRecord, work: Work | None) -> None:
        """Durable when it returns, if the store works. ``work`` None keeps what came with the record before."""
        if self._working and record.id not in self._late:
            try:
                _by_itself(f"action {record.id}", self._write_action, record, work)
                return
            except sqlite3.Error as error:
                self._fails(error)
        _, before = self._late.get(record.id, (record, None))
        self._late[record.id] = (record, work or before)
        while len(self._late) > ACTIONS_KEPT:
            del self._late[next(iter(self._late))]

    def _write_action(self, record: ActionRecord, work: Work | None) -> None:
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
        """Closed actions, oldest first, and the open ones with their work; unreadable rows are skipped."""
        closed: list[ActionRecord] = []
        pending: list[tuple[ActionRecord, Work | None]] = []
        rows = self._db.execute("SELECT id, record, work FROM actions ORDER BY created, id").fetchall()
        for action_id, raw, packed in rows:
            record = _read(_record_decoder, raw, f"action {action_id}")
            if record is None:
                continue
            if record.open:
                work = _read(_work_decoder, packed, f"work of action {action_id}") if packed else None
                pending.append((record, work))
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
        return None if row is None else _read(msgspec.msgpack.Decoder(), row[0], name)

    def close(self) -> None:
        self._db.close()


def _open(path: Path) -> sqlite3.Connection:
    """The file's connection; a file that is no intact database is moved aside and begun anew.

    Raises RuntimeError with what to do where it cannot be opened at all.
    """
    try:
        return _connect(path)
    except sqlite3.OperationalError as error:
        raise RuntimeError(
            f"{path} cannot be opened ({error}): end what else uses it, make it and its folder writable,"
            " or set another state_dir"
        ) from None
    except sqlite3.DatabaseError as error:
        aside = path.with_name(f"{path.name}.damaged-{time.strftime('%Y%m%d-%H%M%S')}")
        log.warning("%s is damaged (%s): moved to %s, starting with an empty store", path, error, aside)
        for suffix in ("-wal", "-shm", ""):
            with contextlib.suppress(FileNotFoundError):
                Path(f"{path}{suffix}").rename(f"{aside}{suffix}")
        return _connect(path)


def _connect(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
    try:
        db.text_factory = lambda raw: raw.decode(errors="replace")
        (found,) = db.execute("PRAGMA quick_check(1)").fetchone()
        if found != "ok":
            raise sqlite3.DatabaseError(found)
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=NORMAL")
        (version,) = db.execute("PRAGMA user_version").fetchone()
        if version not in (0, SCHEMA_VERSION):
            raise RuntimeError(
                f"{path} was written by another version of kvpilot (schema {version}); move it away"
            )
        db.executescript(SCHEMA)
        db.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
        db.execute(f"PRAGMA busy_timeout={BUSY_TIMEOUT_MS}")
    except Exception:
        db.close()
        raise
    return db


def _by_itself(what: str, write: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
    """A row that cannot be written costs only itself. Raises sqlite3.Error where the store is at fault."""
    try:
        write(*args, **kwargs)
    except Exception as error:
        if isinstance(error, sqlite3.Error) and not isinstance(error, sqlite3.DataError):
            raise
        log.warning("%s cannot be stored as it is: %s", what, error)


def _read(decoder: msgspec.msgpack.Decoder[T], data: bytes, what: str) -> T | None:
    try:
        return decoder.decode(data)
    except _UNREADABLE as error:
        _skipped(what, error)
        return None


def _skipped(what: str, error: Exception) -> None:
    log.warning("stored %s is unreadable and skipped: %s", what, error)


def _row(session: Session, references: ReferenceTable, rhythm_of: RhythmOf) -> SessionRow:
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
            rhythm=rhythm_of(t.owner),
        )
        for t in session.threads.values()
    ]
    return SessionRow(
        key=session.key,
        explicit=session.explicit,
        parent=session.parent,
        parent_guessed=session.parent_guessed,
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
        parent_guessed=row.parent_guessed,
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
