"""All dialects, asked in order of precedence, joined into one :class:`Hints`.

When two dialects speak in one request:

* What the body says comes before what headers say; among each the order of :data:`BUILT_IN` decides, plug-ins
  come after the built-in ones.
* The session is that of the first dialect that names one. The parent is that of the first dialect that names
  one and does not name another session: parents of two id schemes are not mixed. One id alone counts for both;
  a session that is its own parent is a root (``parent`` None).
* Commands and signals add up. For retention the first dialect with a ttl wins, for its priority the first with
  one, for context edits the first that has any.
* Garbage in one dialect never touches what another says.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import TypeVar

from msgspec.structs import replace

from kvpilot.domain import Command, Retention, SessionRef, Signal, SignalKind, TargetKind
from kvpilot.hints import (
    agent_hint,
    agentic_context,
    anthropic,
    claude_code,
    codex,
    continuum,
    deepseek,
    dynamo,
    engine,
    evoke,
    headers,
    kv_envelope,
    openai,
    sglang,
    thunderagent,
    verl,
)
from kvpilot.hints.body import Marked
from kvpilot.hints.content import may_be_marked
from kvpilot.hints.result import ContextEdit, HintRequest, Hints

log = logging.getLogger(__name__)

ENTRY_POINTS = "kvpilot.dialects"
MAX_REASONS = 32

_NOTHING = Hints()
_Said = TypeVar("_Said", Command, Signal)


@dataclass(frozen=True, slots=True)
class Dialect:
    """One dialect: where to look for it and how to read it.

    ``read`` is asked only when the body has one of ``fields`` at its top level, when one of ``headers`` (lower case)
    is there, or when messages or tools may carry ``mark`` (one of ``content.KEYS``). It returns None when the dialect
    is not spoken after all, and raises on nothing a client may send.
    """

    name: str
    read: Callable[[HintRequest], Hints | None]
    fields: tuple[str, ...] = ()
    headers: tuple[str, ...] = ()
    mark: str = ""


BUILT_IN: tuple[Dialect, ...] = (
    Dialect("kv-envelope", kv_envelope.read, fields=kv_envelope.FIELDS),
    Dialect("agent_hint", agent_hint.read, fields=(agent_hint.FIELD,)),
    Dialect("sglang", sglang.read, fields=(sglang.FIELD,)),
    Dialect("agent-infer", agentic_context.read, fields=("vllm_xargs",)),
    Dialect("verl", verl.read, fields=("kv_transfer_params",)),
    Dialect("evoke", evoke.read, fields=("kv_transfer_params",)),
    Dialect("continuum", continuum.read, fields=("job_id",)),
    Dialect("thunderagent", thunderagent.read, fields=("program_id",)),
    Dialect("engine", engine.read, fields=("session_id",)),
    Dialect("dynamo", dynamo.read_body, fields=("nvext",)),
    Dialect("anthropic", anthropic.read, fields=anthropic.FIELDS, mark=anthropic.MARK),
    Dialect("openai", openai.read, fields=openai.FIELDS, mark=openai.MARK),
    Dialect("claude-code", claude_code.read_body, fields=(claude_code.FIELD,)),
    Dialect("dynamo-headers", dynamo.read_headers, headers=dynamo.HEADERS),
    Dialect("claude-code-headers", claude_code.read_headers, headers=claude_code.HEADERS),
    Dialect("codex", codex.read, headers=codex.HEADERS),
    Dialect("deepseek", deepseek.read, headers=deepseek.HEADERS),
    Dialect("headers", headers.read, headers=headers.HEADERS),
)
"""In order of precedence."""


class Registry:
    """Dialects by the keys they speak through: a dialect that is not there costs a look-up."""

    def __init__(self, dialects: Iterable[Dialect]) -> None:
        self.dialects = tuple(sorted(dialects, key=lambda dialect: not dialect.fields))
        self._bits = [(1 << rank, dialect) for rank, dialect in enumerate(self.dialects)]
        """Each dialect's own bit."""
        self._by_field = _index((bit, dialect.fields) for bit, dialect in self._bits)
        self._by_header = _index((bit, dialect.headers) for bit, dialect in self._bits)
        self._marks = [(bit, dialect.mark) for bit, dialect in self._bits if dialect.mark]
        self._broken: set[str] = set()

    def read(self, request: HintRequest) -> Hints:
        """Everything the request says about its session and its KV; see the module's text for precedence."""
        found = []
        for dialect in self._spoken(request):
            try:
                hints = dialect.read(request)
                if hints is not None and not isinstance(hints, Hints):
                    raise TypeError(f"read returned a {type(hints).__name__}, not Hints")
            except Exception:
                hints = self._failed(dialect)
            if hints is not None:
                found.append(hints)
        return join(found, request) if found else _NOTHING

    def _spoken(self, request: HintRequest) -> list[Dialect]:
        """The dialects that may be spoken, by precedence."""
        spoken = 0
        fields, names = request.fields, self._by_field.keys()
        for name in fields.names_in(names) if isinstance(fields, Marked) else names & fields.keys():
            spoken |= self._by_field[name]
        for name in self._by_header.keys() & request.headers:
            spoken |= self._by_header[name]
        for bit, mark in self._marks:
            if not spoken & bit and may_be_marked(request, mark):
                spoken |= bit
        return [dialect for bit, dialect in self._bits if spoken & bit] if spoken else []

    def _failed(self, dialect: Dialect) -> Hints:
        """No dialect may fail a user's request, a plug-in's neither."""
        if dialect.name not in self._broken:
            self._broken.add(dialect.name)
            log.exception("dialect %s failed; told once", dialect.name)
        return Hints(dropped=(f"{dialect.name}: could not be read",))


def _index(names: Iterable[tuple[int, Sequence[str]]]) -> Mapping[str, int]:
    """By key the bits of all dialects that speak through it."""
    index: dict[str, int] = {}
    for bit, keys in names:
        for key in keys:
            index[key] = index.get(key, 0) | bit
    return index


def plug_ins() -> list[Dialect]:
    """Dialects of other packages (entry points ``kvpilot.dialects``); a broken one is logged and skipped."""
    found = []
    for entry in entry_points(group=ENTRY_POINTS):
        try:
            dialect = entry.load()
            if not isinstance(dialect, Dialect):
                raise TypeError(f"{entry.value} is not a kvpilot.hints.Dialect")
            found.append(dialect)
        except Exception:
            log.exception("dialect %s cannot be loaded and is skipped", entry.name)
    return found


@cache
def installed() -> Registry:
    """The built-in dialects and the plug-ins, loaded on first use."""
    return Registry((*BUILT_IN, *plug_ins()))


def read_hints(request: HintRequest) -> Hints:
    """Everything the request says about its session and its KV. Never raises."""
    return installed().read(request)


def join(found: Sequence[Hints], request: HintRequest) -> Hints:
    """One result of several dialects', the one with precedence first."""
    session = _join_ids([hints.session for hints in found])
    commands: list[Command] = []
    signals: list[Signal] = []
    wishes: list[Retention] = []
    edits: tuple[ContextEdit, ...] = ()
    dropped: dict[str, None] = {}
    manage = warm = False
    for hints in found:
        if hints.commands:
            commands += hints.commands
        if hints.signals:
            signals += hints.signals
        if hints.retention is not None:
            wishes.append(hints.retention)
        if hints.dropped:
            dropped.update(dict.fromkeys(hints.dropped))
        if hints.manage:
            manage = True
        if hints.edits or hints.warm:  # Anthropic's only.
            edits, warm = edits or hints.edits, warm or hints.warm
    retention = _join_retention(wishes)
    if commands or signals or retention is not None or dropped:
        # A JSON request without anything to infer from, which says something about KV, can only be about that,
        # also when nothing of it was understood: who sent it is told why.
        manage = manage or (bool(request.fields) and not request.has_content)
    if manage and retention is not None:
        signals.append(request.signal(SignalKind.RETAIN, session=session, retention=retention))
    if commands or signals:
        said = len(commands) + len(signals)
        commands = [bound for command in commands if _is_sound(bound := _bound(command, session))]
        signals = [heard for signal in signals if (heard := _bound(signal, session)).session.id]
        if len(commands) + len(signals) < said:
            dropped["commands or signals without a session id"] = None
    return Hints(
        session=session,
        commands=tuple(commands),
        signals=tuple(signals),
        retention=retention,
        edits=edits,
        warm=warm,
        manage=manage,
        dropped=_bounded(list(dropped)) if dropped else (),
    )


def _bound(said: _Said, session: SessionRef) -> _Said:
    return said if said.session.id or session.id is None else replace(said, session=session)


def _is_sound(command: Command) -> bool:
    return bool(command.session.id) or command.target is TargetKind.CHUNKS


def _join_ids(refs: Sequence[SessionRef]) -> SessionRef:
    named = next((ref for ref in refs if ref.id is not None), None)
    if named is None:
        child = next((ref for ref in refs if ref.parent is not None), None)
        return SessionRef() if child is None else SessionRef(id=child.parent, source=child.source)
    for ref in refs:
        if ref.parent is not None and (ref.id is None or ref.id == named.id):
            return SessionRef(named.id, ref.parent if ref.parent != named.id else None, named.source)
    return SessionRef(named.id, None, named.source)


def _join_retention(wishes: Sequence[Retention]) -> Retention | None:
    if not wishes:
        return None
    first, priority = None, 0
    for wish in wishes:
        if first is None and wish.ttl_s > 0:
            first = wish
        priority = priority or wish.priority
    first = first or wishes[0]
    return first if first.priority == priority else replace(first, priority=priority)


def _bounded(reasons: list[str]) -> tuple[str, ...]:
    if len(reasons) > MAX_REASONS:
        reasons[MAX_REASONS:] = [f"and {len(reasons) - MAX_REASONS} more"]
    return tuple(reasons)
