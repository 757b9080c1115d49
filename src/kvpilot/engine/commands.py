"""The versioned envelope of what is asked of an engine, and of what became of it. Counts are the engine's blocks.

The same JSON goes over the control route of vLLM's own server and over the internal port.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from kvpilot.domain import OutcomeStatus

VERSION = 1
PATH = "/kvpilot/v1/engine"
"""Of the control route on vLLM's own server. Outside ``/v1``: nobody reaches it through kvpilot's gateway."""
MAX_TTL_S = 86400.0

Position = Annotated[int, Meta(ge=0)]
Token = Annotated[int, Meta(ge=0, lt=2**32)]


class CommandError(ValueError):
    """The command cannot be understood; the message says why."""


class Kind(StrEnum):
    RETAIN = "retain"
    """Reuse these blocks last for ``ttl_s`` seconds, within the budget for that."""
    RELEASE = "release"
    """Take such a wish back."""
    DEMOTE = "demote"
    """Reuse these blocks before other sessions'; they stay readable until then."""
    EVICT = "evict"
    """Drop the session's claim and forget what nobody else claims or uses."""
    PREFETCH = "prefetch"
    """Bring the context from the tiers below into the device pool."""
    STATUS = "status"


class EngineCommand(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One command. Its target is a session (with ``tree``: and its descendants), a range of the tokens of the
    session's latest context, a context by its tokens (or a range of it), or blocks by their hashes in hex; a context
    or blocks with a session are that session's claims.
    """

    kind: Kind
    v: Literal[1] = 1
    id: str = ""
    """The caller's name for it; comes back with the outcome."""
    session: str = ""
    salt: str = ""
    """The ``cache_salt`` the session's requests carry: part of its name."""
    tree: bool = False
    start: Position | None = None
    end: Position | None = None
    blocks: tuple[str, ...] = ()
    tokens: tuple[Token, ...] = ()
    """The context itself, where the engine may not know it (any more)."""
    eta_s: Annotated[float, Meta(ge=0, le=MAX_TTL_S)] | None = None
    """Prefetch: in how many seconds the session's next request is expected, where somebody knows."""
    ttl_s: Annotated[float, Meta(gt=0, le=MAX_TTL_S)] = 300.0


class RankState(StrEnum):
    OK = "ok"
    LATE = "late"
    """Others are done, it is not."""
    SILENT = "silent"
    """Its process is there, but does not answer."""
    DEAD = "dead"


class RankReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is known of one rank of the model. ``busy_s``: how long it has been at what it does."""

    rank: int
    state: RankState = RankState.OK
    busy_s: float = 0.0
    pid: int = 0
    """Of its process, where it says so itself."""
    loaded: int = 0
    """Prefetch: blocks that have come from below there."""


class EngineOutcome(msgspec.Struct, frozen=True, omit_defaults=True):
    """What became of a command. ``planned`` blocks were meant; ``confirmed`` of them are now as asked (retain:
    claimed; demote: first to be reused; evict: gone; prefetch: in the device pool); ``skipped`` were left alone as
    a request or another session needs them."""

    kind: Kind
    status: OutcomeStatus
    v: int = VERSION
    id: str = ""
    reason: str = ""
    planned: int = 0
    confirmed: int = 0
    skipped: int = 0
    loaded: int = 0
    """Prefetch: blocks that came from below."""
    dram: int = 0
    """Evict: chunks that vLLM's own DRAM tier has forgotten as well."""
    disk: int = 0
    """Evict: files of vLLM's own disk tier that are deleted as well."""
    seconds: float = 0.0
    ranks: tuple[RankReport, ...] = ()
    """Of a model with several, for prefetches, and where one does not do as it should."""


_DECODER = msgspec.json.Decoder(EngineCommand)


def parse_command(raw: bytes) -> EngineCommand:
    """Raises CommandError with one line that says what is wrong."""
    try:
        command = _DECODER.decode(raw)
    except msgspec.ValidationError as error:
        raise CommandError(f"not a command of version {VERSION}: {error}") from None
    except msgspec.DecodeError as error:
        raise CommandError(f"not JSON: {error}") from None
    _check(command)
    return command


def block_hashes(command: EngineCommand) -> list[bytes]:
    """The blocks it names. Raises CommandError when one is not hex."""
    try:
        return [bytes.fromhex(block) for block in command.blocks]
    except ValueError:
        raise CommandError("blocks: a hash is not hexadecimal") from None


def _check(command: EngineCommand) -> None:
    if command.kind is Kind.STATUS:
        return
    if not (command.session or command.blocks or command.tokens):
        raise CommandError("a command names a session, blocks or tokens")
    if command.blocks and command.kind is Kind.PREFETCH:
        raise CommandError("prefetch takes a session or tokens: hashes do not tell the tokens to load")
    if command.blocks and command.tokens:
        raise CommandError("blocks and tokens are two targets: give one")
    if command.start is not None and command.end is not None and command.end <= command.start:
        raise CommandError("the range is empty: end must be above start")
    if (command.start is not None or command.end is not None) and not (command.session or command.tokens):
        raise CommandError("a range is one of a context: name the session or give its tokens")
    block_hashes(command)
