"""A coordinator service over the memory layer, driven by events as a gateway would send them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from kvpilot.backends.memory import MemoryLayer
from kvpilot.context.segments import SegmentedPrompt, Segmenter
from kvpilot.coordinator.segmenting import Known
from kvpilot.coordinator.service import CoordinatorService, ServiceSettings
from kvpilot.domain import (
    ActionRecord,
    RequestFinished,
    RequestStarted,
    SessionRef,
    Signal,
    SignalKind,
    Space,
    TokenArray,
)
from kvpilot.ingest.residency import Residency
from tests.coordinator.engine import PluggedEngine

Message = dict[str, Any]


SYSTEM = {"role": "system", "content": "you are an agent with rules a b c d e f g h"}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def words(prefix: str, n: int) -> str:
    return " ".join(f"{prefix}{i}" for i in range(n))


def text_tokens(messages: list[Message]) -> TokenArray:
    """One token per word: a template small enough to see through."""
    words = " ".join(f"<{m['role']}> {m['content']}" for m in messages).split()
    return np.array([hash_word(word) for word in words], dtype=np.uint32)


def hash_word(word: str) -> int:
    return int.from_bytes(word.encode()[:4].ljust(4, b"\0"), "big") % 50_000 + len(word)


class World:
    def __init__(
        self,
        *,
        mode: str = "kvpilot",
        chunk_size: int = 4,
        recheck_s: tuple[float, ...] = (0.0,),
        block_size: int = 64,
        render: Callable[[Any], Awaitable[TokenArray]] | None = None,
        plugged: bool = False,
    ) -> None:
        self.now = 1000.0
        self.layer = MemoryLayer(chunk_size)
        self.residency = Residency()
        self.engine = PluggedEngine(self.residency) if plugged else None
        self.service = CoordinatorService(
            backend=self.layer,
            residency=self.residency,
            segmenter=Segmenter(None, None),
            space_of=lambda salt: Space("m", salt),
            settings=ServiceSettings(mode=mode, recheck_s=recheck_s, block_size=block_size),
            render=render,
            plugin=self.engine,
            clock=lambda: self.now,
        )
        self._ids = itertools.count(1)

    async def observe(self) -> None:
        """What the directory poller does."""
        refresh = self.residency.begin_refresh(self.now)
        async for page in self.layer.list_keys():
            refresh.add(page)
        self.residency.commit(refresh)
        self.residency.set_usage(await self.layer.usage(), {}, self.now)

    def start(self, messages: list[Message], session: str | None = None, **kw: Any) -> str:
        request_id = f"r{next(self._ids)}"
        tenant = kw.pop("tenant", "default")
        body = {"messages": messages, **kw.pop("body", {})}
        ref = SessionRef(session, kw.pop("parent", None), "agent_hint" if session else "content")
        salt = "" if tenant == "default" else tenant
        retention = kw.pop("retention", None)
        path = kw.pop("path", "/v1/chat/completions")
        self.service.handle(
            RequestStarted(
                request_id,
                self.now,
                tenant,
                salt,
                ref,
                path,
                json.dumps(body).encode(),
                retention,
            )
        )
        return request_id

    def finish(
        self,
        request_id: str,
        messages: list[Message],
        *,
        reply: Message | None = None,
        salt: str = "",
        stored: bool = True,
        prompt_told: bool = False,
    ) -> list[ActionRecord]:
        tokens = text_tokens(messages)
        if stored:
            self.layer.store(Space("m", salt), tokens)
        message = reply or {"role": "assistant", "content": "ok"}
        return self.service.handle(
            RequestFinished(
                request_id,
                self.now,
                200,
                prompt_ids=b"" if prompt_told else json.dumps(tokens.tolist()).encode(),
                output_ids=b"[7]",
                message=json.dumps(message).encode(),
            )
        )

    def turn(self, messages: list[Message], session: str | None = None, **kw: Any) -> list[ActionRecord]:
        reply, stored = kw.pop("reply", None), kw.pop("stored", True)
        salt = "" if kw.get("tenant", "default") == "default" else kw["tenant"]
        return self.finish(
            self.start(messages, session, **kw), messages, reply=reply, salt=salt, stored=stored
        )

    def signal(self, session: str, kind: SignalKind, eta_s: float | None = None) -> list[ActionRecord]:
        return self.service.handle(Signal(self.now, "default", SessionRef(session), kind, eta_s))

    def segmented(self, messages: list[Message], session: str) -> None:
        """What the segmenter would find out: every word is a token, and so is every message's role."""
        book = self.service.book.get("default", session)
        assert book is not None
        (thread,) = book.threads.values()
        ends = list(itertools.accumulate(len(text_tokens([message])) for message in messages))
        found = SegmentedPrompt((), "template", ends[-1], message_ends=ends)
        segments = self.service.segments
        segments._jobs.pop(thread.owner, None)
        segments._known[thread.owner] = Known(found, text_tokens(messages), thread.hashes)

    async def settle(self, records: list[ActionRecord]) -> list[ActionRecord]:
        """The records once they are final."""
        return [await self.service.actions.wait(r.id, 20.0) or r for r in records]

    def chunks(self, messages: list[Message]) -> list[bytes]:
        return self.service.resolver._hasher.hashes(text_tokens(messages))

    def held(self, messages: list[Message], salt: str = "") -> list[bool]:
        return [bool(self.layer.tiers(Space("m", salt), c)) for c in self.chunks(messages)]
