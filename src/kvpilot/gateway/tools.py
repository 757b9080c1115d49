"""What every request of a gateway worker shares."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from kvpilot.config import Config
from kvpilot.context.chunks import ChunkHasher
from kvpilot.gateway.link import GatewayLink
from kvpilot.gateway.request import TOKEN_IDS, USAGE
from kvpilot.gateway.upstream import Upstream

log = logging.getLogger(__name__)

_ASK_AGAIN_S = 600.0
"""An engine that refused a question is asked again after so long: it may have been replaced."""


class Questions:
    """What the engine can be asked for beside what clients ask; remembers refusals."""

    def __init__(self) -> None:
        self._refused: dict[str, float] = {}

    def allowed(self) -> tuple[str, ...]:
        now = time.monotonic()
        return tuple(name for name in (TOKEN_IDS, USAGE) if self._refused.get(name, 0.0) <= now)

    def refuse(self, names: frozenset[str]) -> None:
        log.warning(
            "the engine does not take %s; asking again in %g s", ", ".join(sorted(names)), _ASK_AGAIN_S
        )
        self._refused.update(dict.fromkeys(names, time.monotonic() + _ASK_AGAIN_S))


@dataclass(frozen=True, slots=True)
class Tools:
    """What every exchange of a gateway shares."""

    config: Config
    upstream: Upstream
    link: GatewayLink
    questions: Questions
    hasher: ChunkHasher
