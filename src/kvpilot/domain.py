"""The vocabulary every room of kvpilot shares. Frozen, slotted, no I/O.

Conventions: times are unix seconds (float) from the clock of the process that observed them; a span is half-open
``[start, end)`` in tokens; chunk hashes are the cache layer's own (LMCache: 32 bytes of blake3).

Messages between processes (gateway to coordinator) are tagged unions of these structs in MessagePack.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec
import numpy as np
import numpy.typing as npt

TokenArray = npt.NDArray[np.uint32]


class Struct(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Base of everything that crosses a process border: immutable, tagged with its class name."""


class Tier(StrEnum):
    """Where KV lies, fastest first."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
    POOL = "pool"


class SegmentKind(StrEnum):
    """What a part of an agent's context is."""

    SYSTEM = "system"
    TOOLS = "tools"
    SKILL = "skill"
    USER = "user"
    ASSISTANT = "assistant"
    THINKING = "thinking"
    TOOL_CALL = "tool_call"
    TOOL_RESULT = "tool_result"
    SUMMARY = "summary"
    TEMPLATE = "template"
    """Tokens the chat template adds and that belong to no message (generation prompt, default system text)."""


class SessionState(StrEnum):
    RUNNING = "running"
    WAITING_TOOL = "waiting_tool"
    WAITING_HUMAN = "waiting_human"
    SUSPENDED = "suspended"
    ENDED = "ended"


class Segment(Struct, frozen=True):
    """One part of a context with its exact token span.

    ``message`` is the index into the request's ``messages`` (-1: the tools list or template text);
    the reply of a turn has index ``len(messages)``. ``name`` is the tool's name where there is one.
    """

    kind: SegmentKind
    start: int
    end: int
    message: int = -1
    name: str | None = None


class ToolFacts(Struct, frozen=True):
    """A tool call as the reply has it, as far as it tells how long the tool may take."""

    name: str
    program: str | None = None
    """First … last program of a shell line, with their subcommands (``git diff``, ``pytest … tail``)."""
    timeout_s: float | None = None
    background: bool = False
    agent: bool = False
    """Whether it starts a sub-agent."""


class Space(Struct, frozen=True):
    """The name space of KV: equal tokens share KV only inside one space."""

    model: str
    """The model as the cache layer keys it (for LMCache the path or name given to the engine)."""
    salt: str = ""
    adapter: str = ""


# ---------------------------------------------------------------- events: gateway and control API → coordinator


class SessionRef(Struct, frozen=True):
    """What a request says about its session. ``source`` tells who said it; id None = identify by content."""

    id: str | None = None
    parent: str | None = None
    source: str = "content"


class TargetKind(StrEnum):
    """What a command is about, and what a range counts in."""

    SESSION = "session"
    MESSAGES = "messages"
    TOOLS = "tools"
    TOKENS = "tokens"
    BLOCKS = "blocks"
    """Blocks of the engine, each of ``engine.block_size`` tokens."""
    CHUNKS = "chunks"


class Retention(Struct, frozen=True):
    """A wish to keep a context for ``ttl_s`` seconds: a bias where room is made, never a lock.

    ``up_to`` is where the wish ends, as the client counts in ``unit`` (None: nowhere; -1: before the messages);
    nothing acts on it yet, as demotion takes a context from its tail anyway.
    ``priority`` ranks contexts of equal prospects, -100…100.
    """

    ttl_s: float = 0.0
    up_to: int | None = None
    unit: TargetKind = TargetKind.MESSAGES
    priority: int = 0


class RequestStarted(Struct, frozen=True):
    """A request was forwarded. ``body`` is its JSON as ``path`` takes it: what the client sent, after the context
    edits it asked for."""

    request_id: str
    at: float
    tenant: str
    salt: str
    session: SessionRef
    path: str
    body: bytes = b""
    retention: Retention | None = None


class PromptKnown(Struct, frozen=True):
    """A long streamed reply is under way whose engine told the prompt's tokens, a JSON list of ids, or at least
    how many they are."""

    request_id: str
    at: float
    prompt_ids: bytes = b""
    prompt_token_count: int = 0


class RequestFinished(Struct, frozen=True):
    """A request ended, well or not. ``message`` is the reply as a chat message's JSON (content, tool_calls, …).

    ``prompt_ids`` and ``output_ids`` are JSON lists as the engine wrote them, empty when it told none; the
    prompt's is empty too when a ``PromptKnown`` came before.
    """

    request_id: str
    at: float
    status: int
    first_token_at: float | None = None
    prompt_ids: bytes = b""
    output_ids: bytes = b""
    finish_reason: str | None = None
    message: bytes = b""
    prompt_token_count: int = 0
    cached_token_count: int | None = None
    completion_token_count: int = 0
    aborted: bool = False


class SignalKind(StrEnum):
    """What an agent (or its framework) says about a session outside of a request."""

    TOOL_FINISHED = "tool_finished"
    WAITING_HUMAN = "waiting_human"
    SUSPEND = "suspend"
    RESUME = "resume"
    END = "end"
    COMPACTED = "compacted"
    EXPECTED = "expected"
    """Only tells when the next request comes (``eta_s``)."""
    RETAIN = "retain"
    """Only tells what to keep (``retention``)."""


class Signal(Struct, frozen=True):
    """A life-cycle hint. ``eta_s``: expected seconds until the session's next request, when known."""

    at: float
    tenant: str
    session: SessionRef
    kind: SignalKind
    eta_s: float | None = None
    retention: Retention | None = None


Event = RequestStarted | PromptKnown | RequestFinished | Signal


# ---------------------------------------------------------------- commands and actions


class ActionKind(StrEnum):
    PREFETCH = "prefetch"
    """Bring towards the device (LMCache: disk → host)."""
    DEMOTE = "demote"
    """Copy below, confirm, then drop above."""
    EVICT = "evict"
    """Drop from every tier what no live session references."""


class Command(Struct, frozen=True):
    """Somebody asks for an action on a session (or on a range of its context, or on chunks).

    ``start``/``end`` count messages, tools, tokens or engine blocks, half-open; ``body`` is then the JSON
    request with the *old* messages and tools the range refers to. ``chunks`` are hex chunk hashes.
    """

    kind: ActionKind
    tenant: str
    salt: str
    session: SessionRef
    target: TargetKind = TargetKind.SESSION
    start: int = 0
    end: int = 0
    body: bytes = b""
    chunks: tuple[str, ...] = ()
    source: str = "api"
    client_ids: tuple[str, ...] = ()
    """Names the client gave it, each its tenant's own: what comes again under one of them is not done again."""


class OutcomeStatus(StrEnum):
    ACCEPTED = "accepted"
    """Taken on; running or still to be confirmed."""
    DONE = "done"
    """Everything planned was confirmed by the cache layer."""
    CLIPPED = "clipped"
    """Only a part was done; counts and reason tell which."""
    DEFERRED = "deferred"
    """Waiting for something (a running request, room) before it can be done."""
    REJECTED = "rejected"
    MISSING = "missing"
    """The target is not known or no longer matches."""
    FAILED = "failed"
    """The cache layer failed or did not answer in time."""


class ActionRecord(Struct, frozen=True):
    """One action and what became of it. Counts are chunks."""

    id: str
    kind: ActionKind
    status: OutcomeStatus
    created_at: float
    session: str | None = None
    tenant: str = ""
    source: str = ""
    reason: str = ""
    planned: int = 0
    confirmed: int = 0
    skipped: int = 0
    """Chunks left alone because a live session references them or they were already where they should be."""
    tiers: dict[str, int] = {}
    """Per tier: chunks confirmed gone (evict, demote) or present (prefetch)."""
    finished_at: float | None = None
    client_ids: tuple[str, ...] = ()
    """The names its command came under; a command that takes several actions gives them to each."""
    asked: str = ""
    """Digest of what the command asked for, where it has names: tells a repeat from another use of a name."""

    @property
    def open(self) -> bool:
        return self.status in (OutcomeStatus.ACCEPTED, OutcomeStatus.DEFERRED)


class CommandBatch(Struct, frozen=True):
    """Commands that arrived together (one management request). Answered with :class:`CommandReply`."""

    commands: tuple[Command, ...]


class CommandReply(Struct, frozen=True):
    actions: tuple[ActionRecord, ...]


# ---------------------------------------------------------------- observations: cache layers → coordinator


class TierUsage(Struct, frozen=True):
    """Bytes held and capacity of one tier; capacity 0 = unknown."""

    tier: Tier
    used_bytes: int
    capacity_bytes: int


def new_id(prefix: str, random_bits: int) -> str:
    """An id like ``a-1f0c…`` from caller-supplied randomness (64 bits are used)."""
    return f"{prefix}-{random_bits & 0xFFFFFFFFFFFFFFFF:016x}"
