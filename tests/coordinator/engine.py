"""An engine with kvpilot's plug-in, as far as the coordinator sees it: a pool of blocks, and what it was asked."""

from __future__ import annotations

from kvpilot.backends.base import TimedOut, Unreachable
from kvpilot.backends.engine_plugin import Displaced, EngineState
from kvpilot.domain import OutcomeStatus
from kvpilot.engine.commands import EngineCommand, EngineOutcome, Kind
from kvpilot.ingest.residency import Residency

BLOCK = 4


class PluggedEngine:
    """Loads whatever it is asked for, and tells by KV events. ``blocks``: size of its pool."""

    def __init__(self, residency: Residency, blocks: int = 100) -> None:
        self.pool = residency.pool("engine", "m")
        self.blocks = blocks
        self.there = self.plugged = True
        self.full = self.busy = False
        self.displaced: tuple[Displaced, ...] = ()
        self.asked: list[EngineCommand] = []

    def holds(self, tokens: list[int], salt: str = "") -> None:
        """A request had this context."""
        whole = len(tokens) // BLOCK
        names = [hash((salt, *tokens[: (i + 1) * BLOCK])) for i in range(whole)]
        keys: list[list[object] | None] = [[salt] if salt and not i else None for i in range(whole)]
        self.pool.stored(names, None, tokens[: whole * BLOCK], BLOCK, extra_keys=keys)

    def loses_all(self) -> None:
        self.pool.clear()

    def orders(self, kind: Kind) -> list[EngineCommand]:
        return [command for command in self.asked if command.kind is kind]

    async def state(self, timeout_s: float) -> EngineState | None:
        if self.busy:
            raise TimedOut("no answer")
        if not self.there:
            raise Unreachable("nobody listens")
        if not self.plugged:
            return None
        return EngineState(
            active=True,
            connector="LMCacheMPConnector",
            events=True,
            block_tokens=BLOCK,
            blocks={"total": self.blocks, "free": self.blocks},
            taken=sum(each.blocks for each in self.displaced),
            displaced=self.displaced,
        )

    async def command(self, command: EngineCommand, timeout_s: float) -> EngineOutcome:
        self.asked.append(command)
        if not self.there:
            raise Unreachable("nobody listens")
        planned = len(command.tokens) // BLOCK
        if command.kind is Kind.PREFETCH and self.full:
            return EngineOutcome(command.kind, OutcomeStatus.CLIPPED, reason="no room", planned=planned)
        if command.kind is Kind.PREFETCH:
            self.holds(list(command.tokens), command.salt)
        return EngineOutcome(command.kind, OutcomeStatus.DONE, planned=planned, confirmed=planned)
