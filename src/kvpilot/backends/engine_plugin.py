"""The engine's own device pool, where vLLM runs kvpilot's plug-in: what it can do, and commands to it.

The third depth beside proxy only and a cache layer; :meth:`EnginePlugin.state` finds out which an engine has.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from kvpilot.backends.base import Refused
from kvpilot.backends.http import Peer
from kvpilot.config import Config
from kvpilot.engine.commands import PATH, EngineCommand, EngineOutcome

TIMEOUT_S = 60.0


class Displaced(msgspec.Struct, frozen=True):
    """A session that lost blocks to others since its last request."""

    salt: str
    session: str
    blocks: int


class EngineState(msgspec.Struct, frozen=True):
    """What the plug-in says of itself. Counts are blocks of ``block_tokens`` tokens."""

    active: bool
    kvpilot: str = ""
    reason: str = ""
    """Why it is not active."""
    scheduler: str = ""
    connector: str | None = None
    events: bool = False
    block_tokens: int = 0
    blocks: Mapping[str, int] = {}
    requests: Mapping[str, int] = {}
    sessions: int = 0
    taken: int = 0
    """Blocks that sessions needed and others were given, since the engine started."""
    displaced: tuple[Displaced, ...] = ()

    @property
    def prefetches(self) -> bool:
        """Whether it can bring contexts into the device pool."""
        return self.active and self.connector is not None


class EnginePlugin:
    """One engine's plug-in. Calls raise only BackendError, and end within ``timeout_s`` seconds."""

    def __init__(self, url: str, *, api_key: str = "", timeout_s: float = TIMEOUT_S) -> None:
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._peer = Peer(url, timeout_s=timeout_s, headers=headers)

    @classmethod
    def from_config(cls, config: Config) -> EnginePlugin:
        return cls(config.engine.url, api_key=config.engine.api_key)

    async def close(self) -> None:
        await self._peer.close()

    async def state(self, timeout_s: float = 5.0) -> EngineState | None:
        """None: this engine has no plug-in."""
        try:
            return await self._peer.call("GET", PATH, EngineState, timeout_s=timeout_s)
        except Refused as refusal:
            if refusal.status == 404:
                return None
            if refusal.status == 503:
                return EngineState(active=False, reason=str(refusal))
            raise

    async def command(self, command: EngineCommand, timeout_s: float = TIMEOUT_S) -> EngineOutcome:
        """Its outcome; a prefetch's comes when it has ended."""
        return await self._peer.call("POST", PATH, EngineOutcome, body=command, timeout_s=timeout_s)
