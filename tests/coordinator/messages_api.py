"""A client of Anthropic's API, whose replies tell no tokens, and an engine that renders what it sends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from kvpilot.context.engine_render import EngineRenderError
from kvpilot.domain import RequestFinished, Space, TokenArray
from tests.coordinator.world import Message, World, text_tokens, words

SYSTEM = words("rule", 12)


class Engine:
    """Renders a chat as the world's toy template does."""

    def __init__(self) -> None:
        self.free = asyncio.Event()
        self.free.set()
        self.broken = False
        self.asked = 0

    async def __call__(self, body: Any) -> TokenArray:
        self.asked += 1
        await self.free.wait()
        if self.broken:
            raise EngineRenderError("away")
        return self.tokens(body["messages"])

    @staticmethod
    def tokens(messages: list[Message]) -> TokenArray:
        return text_tokens([{"role": m["role"], "content": m.get("content") or "-"} for m in messages])


class Agent:
    """A client of Anthropic's API under one session id."""

    def __init__(self, world: World, session: str = "A") -> None:
        self.world = world
        self.session = session

    def start(self, messages: list[Message]) -> str:
        body = {"system": SYSTEM}
        return self.world.start(messages, self.session, path="/v1/messages", body=body)

    def finish(self, request_id: str, count: int, **more: Any) -> None:
        reply = more.pop("reply", {"role": "assistant", "content": "ok"})
        self.world.service.handle(
            RequestFinished(
                request_id,
                self.world.now,
                more.pop("status", 200),
                message=json.dumps(reply).encode(),
                prompt_token_count=count,
                **more,
            )
        )

    def context(self, messages: list[Message]) -> list[Message]:
        return [{"role": "system", "content": SYSTEM}, *messages]

    def count(self, messages: list[Message]) -> int:
        return len(text_tokens(self.context(messages)))

    def stored(self, messages: list[Message]) -> None:
        self.world.layer.store(Space("m"), text_tokens(self.context(messages)))

    def held(self) -> list[int]:
        """Tokens of each of the session's contexts."""
        session = self.world.service.book.get("default", self.session)
        assert session is not None
        references = self.world.service.references
        return [len(references.tokens(t.owner)) for t in session.threads.values() if t.owner in references]

    async def turn(self, messages: list[Message]) -> None:
        self.stored(messages)
        self.finish(self.start(messages), self.count(messages))
        await settled()


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0)
    raise TimeoutError
