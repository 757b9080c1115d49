"""Tokens of requests whose API, or whose engine, does not tell them, asked from the engine beside the request.

vLLM returns token ids on chat completions and completions only. The same chat, rendered by its ``/tokenize``, has
the same tokens; that it is the same is believed when there are as many as the engine counted for the request.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import numpy as np

from kvpilot.context import anthropic, responses
from kvpilot.context.conversation import Body, decode_body
from kvpilot.context.engine_render import EngineRefusedError, EngineRenderError
from kvpilot.coordinator.mapper import Mapped
from kvpilot.domain import TokenArray

log = logging.getLogger(__name__)

Render = Callable[[Body], Awaitable[TokenArray]]
SILENT = (anthropic.PATH, responses.PATH)
"""APIs without token ids: asked for at once, not only when a reply came without."""
ASK_AFTER_S = 0.05
"""The engine is left time to begin with the request itself."""
AT_ONCE = 2
MAX_OPEN = 1000


class Asker:
    """``render`` gives a chat's tokens or raises EngineRenderError (EngineRefusedError where it never will); ``tell``
    is called once for every request that was begun, whatever happens, with its tokens or with None;
    ``patience_s`` bounds the wait for a request's end."""

    def __init__(
        self,
        render: Render,
        tell: Callable[[str, TokenArray | None], None],
        patience_s: float,
    ) -> None:
        self._render = render
        self._tell = tell
        self._patience_s = patience_s
        self._turn = asyncio.Semaphore(AT_ONCE)
        self._counts: dict[str, asyncio.Future[int]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.outcomes: Counter[str] = Counter()

    def begin(self, request_id: str, path: str, chat: Body) -> None:
        """Ask for the tokens of a request that came by the API ``path`` and amounts to ``chat``."""
        if len(self._counts) >= MAX_OPEN:
            self.outcomes["shed"] += 1
            self._tell(request_id, None)
            return
        self._counts[request_id] = asyncio.get_running_loop().create_future()
        self.start(self._ask(request_id, path, chat))

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run what asks; :meth:`close` ends it."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def counted(self, request_id: str, count: int) -> None:
        """How many tokens the engine says the prompt has; 0: it will not say any more."""
        future = self._counts.get(request_id)
        if future is not None and not future.done():
            future.set_result(count)

    async def _ask(self, request_id: str, path: str, chat: Body) -> None:
        tokens, outcome = None, "not answered"
        try:
            tokens, outcome = await self._compared(self._counts[request_id], path, chat)
        except (EngineRenderError, TimeoutError) as error:
            log.debug("%s: its tokens are not known: %s", request_id, error)
        except Exception:
            # A request that nobody answers for would be waited for for ever.
            log.exception("%s: asking for its tokens failed", request_id)
        finally:
            del self._counts[request_id]
        self.outcomes[outcome] += 1
        self._tell(request_id, tokens)

    async def _compared(
        self, counted: asyncio.Future[int], path: str, chat: Body
    ) -> tuple[TokenArray | None, str]:
        """The tokens, when they are as many as the engine counted, and what came of it."""
        await asyncio.sleep(ASK_AFTER_S)
        if not _in_vain(counted):
            async with self._turn:
                found = None if _in_vain(counted) else await self._rendered(path, chat)
            async with asyncio.timeout(self._patience_s):
                count = await counted
            if found is not None and len(found) == count:
                return found, "mapped"
            if found is not None and count:
                log.debug("/tokenize gives %d tokens, the engine counted %d", len(found), count)
                return None, "other length"
        return None, "not counted"

    async def with_reply(self, mapped: Mapped, chunk_size: int) -> TokenArray | None:
        """The context of a mapped request with its reply, as the next request will render it; None when the reply
        completes no chunk or its tokens cannot be told."""
        prompt = mapped.prompt
        # The last sampled token was never fed back: its KV does not exist.
        end = len(prompt) + mapped.reply_tokens - 1
        if end // chunk_size <= len(prompt) // chunk_size or "messages" not in mapped.body:
            return None
        messages = [*mapped.body["messages"], decode_body(mapped.reply)]
        try:
            async with self._turn:
                found = await self._rendered(
                    mapped.path, {**mapped.body, "messages": messages, "add_generation_prompt": False}
                )
        except EngineRenderError:
            return None
        goes_on = len(found) >= end and np.array_equal(found[: len(prompt)], prompt)
        return found[:end] if goes_on else None

    @property
    def full(self) -> bool:
        return len(self._tasks) >= MAX_OPEN

    async def rendered(self, path: str, chat: Body) -> TokenArray:
        """What the engine makes of a chat, in its turn. Raises EngineRenderError."""
        async with self._turn:
            return await self._rendered(path, chat)

    async def _rendered(self, path: str, chat: Body) -> TokenArray:
        try:
            return await self._render(chat)
        except EngineRefusedError:
            if path != anthropic.PATH or (other := anthropic.system_first(chat)) is None:
                raise
            return await self._render(other)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _in_vain(counted: asyncio.Future[int]) -> bool:
    """Whether the request ended without a count (it was refused, or its client went): there is nothing to map."""
    return counted.done() and not counted.cancelled() and counted.result() == 0
