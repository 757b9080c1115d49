"""What a request leaves in the cache layer whose client went before the engine had told its tokens, or their number.

Nobody vouches for a rendering of such a prompt. But a chunk's hash names all tokens up to its end: that the layer
has a chunk of it which no known context accounts for proves the rendering up to there.
"""

from __future__ import annotations

import asyncio

from kvpilot.backends.base import Backend
from kvpilot.context.chunks import ChunkHasher
from kvpilot.domain import Space, TokenArray
from kvpilot.sessions.references import ReferenceTable

LOOK_AFTER_S = (1.0, 2.0, 4.0)
"""Engines store asynchronously, and the directory lags about a second: seconds before each look."""


async def left_behind(backend: Backend, references: ReferenceTable, space: Space, tokens: TokenArray) -> bool:
    """Whether the layer has chunks of ``tokens`` that no live context holds. Raises BackendError."""
    chunks = ChunkHasher(backend.chunk_size).hashes(tokens)
    for wait_s in LOOK_AFTER_S:
        await asyncio.sleep(wait_s)
        unheld = [chunk for chunk in chunks if not references.is_live(space, chunk)]
        if not unheld:
            return False
        if any(await backend.locate(space, unheld)):
            return True
    return False
