"""Lets conversations hold tokens that nobody told, once the engine was asked for them.

What is still to come is counted in ``Thread.awaited``: actions on a conversation wait until it is 0.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvpilot.backends.base import Backend, BackendError
from kvpilot.context.engine_render import EngineRenderError
from kvpilot.coordinator.asking import SILENT, Asker, Render
from kvpilot.coordinator.mapper import Mapped, Mapper, Pending
from kvpilot.coordinator.remains import left_behind
from kvpilot.coordinator.tasks import ActionTasks
from kvpilot.domain import PromptKnown, RequestFinished, RequestStarted, TokenArray
from kvpilot.sessions.references import ReferenceTable

log = logging.getLogger(__name__)


class AwaitedTokens:
    """``render`` as :class:`Asker` takes it; without it nothing is asked. ``take`` is given what was mapped in the
    end, ``extended`` a request whose thread now holds its reply, too."""

    def __init__(
        self,
        render: Render | None,
        patience_s: float,
        *,
        mapper: Mapper,
        references: ReferenceTable,
        backend: Backend,
        tasks: ActionTasks,
        take: Callable[[Mapped | None], object],
        extended: Callable[[Mapped], None],
    ) -> None:
        self.asker = Asker(render, self._answered, patience_s) if render else None
        self._mapper = mapper
        self._references = references
        self._backend = backend
        self._tasks = tasks
        self._take = take
        self._extended = extended

    def started(self, event: RequestStarted) -> None:
        """Ask at once where the API will not tell."""
        if event.path in SILENT:
            self._ask(event.request_id)

    def told(self, event: PromptKnown | RequestFinished) -> None:
        """What the engine said meanwhile: at least a count to compare an answer with."""
        if self.asker is None:
            return
        finished = isinstance(event, RequestFinished)
        if finished and event.prompt_token_count and not event.prompt_ids:
            self._ask(event.request_id)  # an engine that does not tell them on chat completions either
        if finished or event.prompt_token_count:
            self.asker.counted(event.request_id, event.prompt_token_count)

    def recover(self, lost: Pending | None) -> None:
        """Find out what a request left that was broken off before its tokens were told."""
        if lost is not None and self.asker is not None and not self.asker.full:
            lost.started.thread.awaited += 1
            self.asker.start(self._recover(self.asker, lost))

    def ask_reply(self, mapped: Mapped) -> None:
        """Ask for a reply's tokens where nobody told them."""
        untold = mapped.reply and mapped.output is not None and not len(mapped.output)
        if untold and self.asker is not None:
            mapped.thread.awaited += 1
            self.asker.start(self._ask_reply(self.asker, mapped))

    async def close(self) -> None:
        if self.asker is not None:
            await self.asker.close()

    def _ask(self, request_id: str) -> None:
        if self.asker is not None and (pending := self._mapper.ask(request_id)) is not None:
            self.asker.begin(request_id, pending.path, pending.body)

    def _answered(self, request_id: str, prompt: TokenArray | None) -> None:
        self._tasks.changed.set()
        self._take(self._mapper.on_answer(request_id, prompt))
        self._tasks.settled.set()

    async def _recover(self, asker: Asker, lost: Pending) -> None:
        thread = lost.started.thread
        try:
            tokens = await asker.rendered(lost.path, lost.body)
            if await left_behind(self._backend, self._references, thread.space, tokens):
                self._take(self._mapper.on_recovered(lost, tokens))
        except (EngineRenderError, BackendError) as error:
            log.debug("what a broken off request left is not known: %s", error)
        except Exception:
            log.exception("looking for what a broken off request left failed")
        finally:
            thread.awaited -= 1
            self._tasks.changed.set()
            self._tasks.settled.set()

    async def _ask_reply(self, asker: Asker, mapped: Mapped) -> None:
        turn = mapped.thread.mapped_turn
        try:
            tokens = await asker.with_reply(mapped, self._backend.chunk_size)
            if tokens is not None and mapped.thread.mapped_turn == turn:
                self._extend(mapped, tokens)
        except Exception:
            log.exception("asking for a reply's tokens failed")
        finally:
            mapped.thread.awaited -= 1
            self._tasks.settled.set()

    def _extend(self, mapped: Mapped, tokens: TokenArray) -> None:
        thread = mapped.thread
        if thread.owner not in self._references:
            return
        if len(self._references.tokens(thread.owner)) == len(mapped.prompt):
            self._references.set(thread.owner, thread.space, tokens)
            self._extended(mapped)
            self._tasks.changed.set()
