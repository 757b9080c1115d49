"""Tokens of requests whose API, or whose engine, does not tell them, asked from the engine beside the request.

vLLM returns token ids on chat completions and completions only. The same chat, rendered by its ``/tokenize``, has
the same tokens; that it is the same is believed when there are as many as the engine counted for the request.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable

import numpy as np

from kvpilot.context import anthropic, responses
from kvpilot.context.conversation import Body, decode_body
from kvpilot.context.engine_render import EngineRenderError
from kvpilot.coordinator.mapper import Mapped
from kvpilot.domain import TokenArray

log = logging.getLogger(__name__)

SILENT = (anthropic.PATH, responses.PATH)
"""APIs without token ids: asked for at once, not only when a reply came without."""
ASK_AFTER_S = 0.05
"""The engine is left time to begin with the request itself."""
AT_ONCE = 2
MAX_OPEN = 1000


class Asker:
    """``render`` gives a chat's tokens or raises EngineRenderError; ``tell`` is called once for every request
    that was begun, with its tokens or with None; ``patience_s`` bounds the wait for a request's end."""

    def __init__(
        self,
        render: Callable[[Body], Awaitable[TokenArray]],
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

    def begin(self, request_id: str, body: Body) -> None:
        if len(self._counts) >= MAX_OPEN:
            self.outcomes["shed"] += 1
            self._tell(request_id, None)
            return
        self._counts[request_id] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(self._ask(request_id, body))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def counted(self, request_id: str, count: int) -> None:
        """How many tokens the engine says the prompt has; 0: it will not say any more."""
        future = self._counts.get(request_id)
        if future is not None and not future.done():
            future.set_result(count)

    async def _ask(self, request_id: str, body: Body) -> None:
        tokens: TokenArray | None = None
        outcome = "not answered"
        try:
            await asyncio.sleep(ASK_AFTER_S)
            async with self._turn:
                found = await self._rendered(body)
            async with asyncio.timeout(self._patience_s):
                count = await self._counts[request_id]
            if len(found) == count:
                tokens, outcome = found, "mapped"
            elif not count:
                outcome = "not counted"
            else:
                outcome = "other length"
                log.info(
                    "%s: /tokenize gives %d tokens, the engine counted %d", request_id, len(found), count
                )
        except (EngineRenderError, TimeoutError) as error:
            log.info("%s: its tokens are not known: %s", request_id, error)
        finally:
            del self._counts[request_id]
        self.outcomes[outcome] += 1
        self._tell(request_id, tokens)

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
                    {**mapped.body, "messages": messages, "add_generation_prompt": False}
                )
        except EngineRenderError:
            return None
        goes_on = len(found) >= end and np.array_equal(found[: len(prompt)], prompt)
        return found[:end] if goes_on else None

    async def _rendered(self, body: Body) -> TokenArray:
        try:
            return await self._render(body)
        except EngineRenderError:
            if (other := anthropic.system_first(body)) is None:
                raise
            return await self._render(other)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
