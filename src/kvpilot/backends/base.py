"""What every cache layer looks like to kvpilot.

A chunk is named by its :class:`~kvpilot.domain.Space` and the layer's own hash. Counts are chunks unless a
docstring says otherwise. Every call is bounded in time and fails only with :class:`BackendError`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvpilot.domain import Space, Tier, TierUsage, TokenArray


class BackendError(Exception):
    """The cache layer did not do what was asked; the message says which part and why."""


class Unreachable(BackendError):
    """Nobody listens, the connection broke, or the circuit breaker is open after repeated failures."""


class TimedOut(BackendError):
    """No (complete) answer in time. What was asked may still happen."""


class Refused(BackendError):
    """The layer understood and said no (HTTP 4xx or 5xx); ``status`` is its code."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class NotReady(Refused):
    """No engine has registered this model's KV layout with the layer yet (or since its restart).

    LMCache prefetches only after vLLM has sent it a first request; retry after the next one.
    """


class BadAnswer(BackendError):
    """The answer makes no sense: not JSON, too large, or not of the documented shape."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a layer can do. ``chunk_size`` is in tokens; ``hash_algorithm`` names the chunk hash chain."""

    prefetch: bool
    drop_tiers: frozenset[Tier]
    directory: bool
    chunk_size: int
    hash_algorithm: str


@dataclass(frozen=True, slots=True)
class PrefetchResult:
    """Outcome of a prefetch that was waited for.

    ``found`` of ``total`` chunks are in the host tier now, those included that were there before. Chunks that
    exist nowhere leave holes and do not stop what lies behind them. ``seconds`` is how long it took.
    """

    found: int
    total: int
    seconds: float

    @property
    def complete(self) -> bool:
        return self.found == self.total


@dataclass(frozen=True, slots=True)
class DropResult:
    """Outcome of a drop in chunks × tiers, as the layer reports it.

    ``deleted`` may include chunks that were not there (see the backend); ``skipped`` were locked by a reader
    or writer and are worth another try. ``errors`` name the nodes or tiers that failed; the rest was done.
    What is really gone is told only by :meth:`Backend.locate`.
    """

    deleted: int
    skipped: int
    errors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Placement:
    """One chunk of the directory listing and the tiers that hold all of it."""

    space: Space
    chunk: bytes
    tiers: frozenset[Tier]


@dataclass(frozen=True, slots=True)
class DirectoryStats:
    """Cheap summary of the directory: bytes it lists per tier; ``mark`` changes when its content does (a swap
    of equals can go unnoticed: list in full now and then)."""

    bytes: Mapping[Tier, int]
    mark: tuple[int, ...]


class Backend(Protocol):
    """A cache layer. All methods raise only :class:`BackendError` (and ``asyncio.CancelledError``)."""

    name: str
    chunk_size: int

    async def start(self) -> None:
        """Open what is needed. Does not talk to the layer: it may come up later."""

    async def close(self) -> None:
        """Release everything. Idempotent."""

    async def capabilities(self) -> Capabilities: ...

    async def usage(self) -> tuple[TierUsage, ...]:
        """Bytes held and capacity, one entry per tier the layer has."""

    async def locate(self, space: Space, chunks: Sequence[bytes]) -> list[frozenset[Tier]]:
        """Where each chunk is, asked now from the layer's directory; one entry per chunk, in order."""

    async def prefetch(self, space: Space, tokens: TokenArray, *, timeout_s: float) -> PrefetchResult:
        """Bring the whole chunks of ``tokens`` (a context from position 0) from disk to host and wait for it.

        Raises TimedOut after ``timeout_s`` seconds (the load may still finish), NotReady when the layer does
        not know the model's layout.
        """

    async def drop(
        self, space: Space, chunks: Sequence[bytes], tiers: Collection[Tier], *, force: bool = False
    ) -> DropResult:
        """Remove ``chunks`` (given head first) from ``tiers``, last chunk first.

        Partial failures are in the result; raises only when nothing could be done. ``force`` also removes
        what readers hold: never use it while requests run.
        """

    async def directory_stats(self) -> DirectoryStats:
        """Summary of the directory, in constant time."""

    def list_keys(self) -> AsyncIterator[list[Placement]]:
        """The whole directory, in pages."""
