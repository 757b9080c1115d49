"""kvpilot in the scheduler's process: vLLM's requests into the book, commands into its pool."""

from __future__ import annotations

import logging
import math
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_utils import KVCacheBlock, make_block_hash_with_group_id
from vllm.v1.request import Request

from kvpilot import __version__
from kvpilot.domain import OutcomeStatus
from kvpilot.engine.book import Book, Context, Hash, SessionKey
from kvpilot.engine.commands import (
    VERSION,
    CommandError,
    EngineCommand,
    EngineOutcome,
    Kind,
    block_hashes,
    parse_command,
)
from kvpilot.engine.free_queue import SessionFreeQueue, install, uninstall
from kvpilot.engine.hints import read_hints
from kvpilot.engine.loads import Load, Loader, Reply
from kvpilot.engine.tiers import tiers_of
from kvpilot.engine.wire import dump

log = logging.getLogger("vllm.kvpilot")

TICK_S = 2.0
MAX_DISPLACED = 100
"""So many of the sessions that lost blocks to others are told, those that lost most."""
DUE_S = 10.0
"""For so long a session that somebody has prefetched counts as about to return."""


@dataclass(frozen=True, slots=True)
class Origin:
    """What a load needs to ask for a context as its requests did."""

    cache_salt: str | None
    lora_request: Any
    block_hasher: Any
    plain: bool
    """Only tokens: no images or embeddings, which tokens do not tell."""


class Inside:
    """One per scheduler. Nothing here may fail a request: what goes wrong turns kvpilot off, vLLM goes on."""

    def __init__(self, scheduler: Any, clock: Callable[[], float] = time.monotonic) -> None:
        self.scheduler = scheduler
        self.clock = clock
        self.pool = scheduler.kv_cache_manager.block_pool
        self.tiers = tiers_of(scheduler)
        below = self.tiers.tokens // scheduler.hash_block_size if self.tiers is not None else 0
        self.book = Book(scheduler.hash_block_size, self.pool.num_gpu_blocks, below)
        self.queue: SessionFreeQueue = install(self.pool, self.book, clock)
        if self.tiers is not None:
            self.tiers.attach(self)
        self.loader = Loader(self)
        self.off = ""
        self._running: dict[str, tuple[Context, bool]] = {}
        self._inbox: deque[tuple[bytes, Callable[[bytes], None]]] = deque()
        self._ticked = clock()
        self.stepped_at = 0.0
        """When the last scheduling step began, by ``clock``."""
        self._hasher: Any = None
        self.commands = 0

    # ------------------------------------------------------------ what the scheduler tells

    def arrived(self, request: Request) -> None:
        """Before a request is queued."""
        self._hasher = request._block_hasher
        extra = _extra(request)
        if request.session_id is None and not extra:
            return
        hints = read_hints(extra, request.session_id)
        if not hints.session or request.resumable:
            return
        now = self.clock()
        key = (request.cache_salt or "", hints.session)
        context = self.book.begin(
            key, request.block_hashes, now, parent=hints.parent, supersedes=hints.supersedes
        )
        plain = not request.mm_features and request.prompt_embeds is None
        known = context.origin
        if known is None or (known.plain, known.lora_request) != (plain, request.lora_request):
            context.origin = Origin(request.cache_salt, request.lora_request, request._block_hasher, plain)
        if hints.retain_s:
            self.book.retain(key, now + hints.retain_s, now)
        self.loader.cancel(context, "the session's request came")
        self._running[request.request_id] = (context, hints.last)

    def asker(self, request_id: str) -> tuple[Context, bool] | None:
        """The context of a request that has not ended, and whether its session ends with it."""
        return self._running.get(request_id)

    def finished(self, request: Request) -> None:
        """Before the blocks of a request that ended are freed."""
        found = self._running.pop(request.request_id, None)
        if found is None:
            return
        context, last = found
        tokens = request.all_token_ids if context.origin.plain else ()
        self.book.finish(context, request.block_hashes, tokens, self.clock(), last=last)

    def step(self) -> None:
        """Before every scheduling step."""
        now = self.clock()
        self.stepped_at = now
        if now - self._ticked >= TICK_S:
            self._ticked = now
            self.book.tick(now)
        while self._inbox:
            raw, reply = self._inbox.popleft()
            self.execute(raw, reply)
        if self.loader.busy:
            self.loader.step(now)

    def meanwhile(self) -> None:
        """While the model runs: what the next step needs not wait for."""
        self.queue.take_ahead()

    @property
    def has_work(self) -> bool:
        return not self.off and (bool(self._inbox) or self.loader.busy) and not self.loader.paused

    def post(self, raw: bytes, reply: Callable[[bytes], None]) -> None:
        """From another thread: a command to execute at the next step."""
        self._inbox.append((raw, reply))

    def forget_blocks(self) -> None:
        """The prefix cache was reset: no block has content any more."""
        self.queue.give_back()

    def turn_off(self, reason: str) -> None:
        """Hand everything back to vLLM."""
        if self.off:
            return
        self.off = reason
        log.error("kvpilot turned itself off, vLLM goes on without it: %s", reason)
        self._running.clear()
        try:
            self.loader.abandon(f"kvpilot turned itself off: {reason}")
        finally:
            uninstall(self.pool)
            if self.tiers is not None:
                self.tiers.detach()

    # ------------------------------------------------------------ commands

    def execute(self, raw: bytes, reply: Callable[[bytes], None]) -> None:
        """Carry out a command; ``reply`` gets the JSON of its outcome, a prefetch's when it has ended."""
        self.commands += 1
        try:
            command = parse_command(raw)
            if command.kind is Kind.STATUS:
                reply(dump(self.status()))
            elif self.off:
                reply(dump({"detail": f"kvpilot is off in this engine: {self.off}"}))
            else:
                self._carry_out(command, lambda outcome: reply(dump(outcome)))
        except CommandError as error:
            reply(dump({"detail": str(error)}))
        except Exception as error:
            log.exception("a command failed")
            reply(dump({"detail": f"the engine failed on it: {error!r}"}))

    def _carry_out(self, command: EngineCommand, reply: Reply) -> None:
        if command.kind is Kind.PREFETCH:
            self._prefetch(command, reply)
            return
        key = (command.salt, command.session)
        if command.session and not command.tokens and not self.book.sessions(key, tree=command.tree):
            reply(_outcome(command, OutcomeStatus.MISSING, "the session is not known here"))
            return
        if command.tokens and self._hasher is None:
            reply(_outcome(command, OutcomeStatus.MISSING, "nothing was served yet"))
            return
        hashes = self._target(command, key)
        act = {
            Kind.RETAIN: self._retain,
            Kind.RELEASE: self._release,
            Kind.DEMOTE: self._demote,
            Kind.EVICT: self._evict,
        }[command.kind]
        reply(act(command, key, hashes))

    def _target(self, command: EngineCommand, key: SessionKey) -> list[Hash]:
        """The blocks a command is about, head first."""
        if command.blocks:
            return block_hashes(command)
        sessions = self.book.sessions(key, tree=command.tree)
        contexts = [context for session in sessions for context in session.contexts]
        latest = self.book.get(key)
        if command.tokens:
            tokens = array("I", command.tokens)
            known = self._known_context(key, tokens)
            own = known.hashes if known is not None else self.hashes_of(tokens, self._origin(key))
            own = own[: len(tokens) // self.book.block_tokens]
        elif command.start is None and command.end is None:
            return list(dict.fromkeys(value for context in contexts for value in context.hashes))
        else:
            own = latest.contexts[-1].hashes if latest and latest.contexts else []
        size = self.book.block_tokens
        end = len(own) if command.end is None else command.end // size
        return own[math.ceil((command.start or 0) / size) : end]

    def _retain(self, command: EngineCommand, key: SessionKey, hashes: list[Hash]) -> EngineOutcome:
        now = self.clock()
        if _whole(command):
            for session in self.book.sessions(key, tree=command.tree):
                self.book.retain(session.key, now + command.ttl_s, now)
        else:
            self.book.retain_blocks(command.salt, hashes, now + command.ttl_s, now)
        here = sum(1 for value in hashes if self._cached(value))
        return _counted(command, len(hashes), here, 0)

    def _release(self, command: EngineCommand, key: SessionKey, hashes: list[Hash]) -> EngineOutcome:
        if _whole(command):
            for session in self.book.sessions(key, tree=command.tree):
                self.book.release(session.key)
        elif not self.book.release_blocks(hashes):
            return _outcome(command, OutcomeStatus.MISSING, "nobody asked to retain any of these")
        return _counted(command, len(hashes), len(hashes), 0)

    def _demote(self, command: EngineCommand, key: SessionKey, hashes: list[Hash]) -> EngineOutcome:
        if _whole(command):
            for session in self.book.sessions(key, tree=command.tree):
                self.book.demote(session.key)
            free = [block for value in hashes for block in self._cached(value) if block.ref_cnt == 0]
            used = sum(1 for value in hashes if any(block.ref_cnt for block in self._cached(value)))
            return _counted(command, len(free) + used, len(free), used)
        self.book.give_up(key, hashes)
        unclaimed = self._unclaimed_free(hashes)
        self.queue.first(unclaimed[::-1])
        return _counted(
            command, self._resident(hashes), len(unclaimed), self._resident(hashes) - len(unclaimed)
        )

    def _evict(self, command: EngineCommand, key: SessionKey, hashes: list[Hash]) -> EngineOutcome:
        if _whole(command):
            self.book.end(key, tree=command.tree)
        elif command.session:
            self.book.give_up(key, hashes)
        resident = self._resident(hashes)
        unclaimed = self._unclaimed_free(hashes)
        self.pool.evict_blocks({block.block_id for block in unclaimed})
        self.queue.first(unclaimed[::-1])
        outcome = _counted(command, resident, len(unclaimed), resident - len(unclaimed))
        if self.tiers is None:
            return outcome
        dropped = self.tiers.drop(value for value in hashes if value not in self.book.claimed)
        if dropped.reason and outcome.status is OutcomeStatus.DONE:
            outcome = replace(outcome, status=OutcomeStatus.CLIPPED, reason=dropped.reason)
        return replace(outcome, dram=dropped.dram, disk=dropped.disk)

    def _prefetch(self, command: EngineCommand, reply: Reply) -> None:
        key = (command.salt, command.session)
        session = self.book.get(key)
        context = session.contexts[-1] if session is not None and session.contexts else None
        tokens = array("I", command.tokens)
        now = self.clock()
        if tokens:
            context = self._context_of(key, tokens, now)
        elif context is None or not context.tokens:
            reply(_outcome(command, OutcomeStatus.MISSING, "the session's tokens are not known here"))
            return
        else:
            tokens = context.tokens[:]
        if context is None or not context.origin.plain:
            reply(
                _outcome(
                    command,
                    OutcomeStatus.REJECTED,
                    "the context is more than tokens, or nothing was served yet",
                )
            )
            return
        size = self.loader.step_tokens
        goal = min(len(tokens), command.end or len(tokens), self.scheduler.max_model_len - 1) // size * size
        if len(context.hashes) * self.book.block_tokens < goal:
            self.book.claim_again(context, self.hashes_of(tokens, context.origin))
        if command.eta_s is not None:
            self.book.expect(context, now + command.eta_s)
        else:
            self.book.due(context, now + DUE_S)
        self.loader.submit(Load(command, context, tokens, goal, reply, now))

    def _context_of(self, key: SessionKey, tokens: array[int], now: float) -> Context | None:
        """The context to file a load of given tokens under; a session that is not known becomes so."""
        context = self._known_context(key, tokens)
        if context is None and self._hasher is not None:  # else no request has shown yet how hashes are made
            origin = self._origin(key)
            context = self.book.learn(key, self.hashes_of(tokens, origin), tokens, now)
            context.origin = context.origin or origin
        return context

    def _known_context(self, key: SessionKey, tokens: array[int]) -> Context | None:
        """The session's context that begins with these tokens."""
        session = self.book.get(key)
        for context in reversed(session.contexts if session is not None else ()):
            if len(context.tokens) >= len(tokens) and context.tokens[: len(tokens)] == tokens:
                return context
        return None

    def _origin(self, key: SessionKey) -> Origin:
        """How requests of the session ask for their contexts, as far as they have shown it."""
        session = self.book.get(key)
        known = session.contexts[-1].origin if session is not None and session.contexts else None
        return known or Origin(key[0] or None, None, self._hasher, True)

    # ------------------------------------------------------------ the pool

    def hashes_of(self, tokens: Sequence[int], origin: Origin) -> list[Hash]:
        """Block hashes of a context of plain tokens."""
        return list(self.request("kvpilot-hashes", tokens, origin).block_hashes)

    def request(
        self, name: str, tokens: Sequence[int], origin: Origin, session: str | None = None
    ) -> Request:
        """A request that no client made."""
        return Request(
            request_id=name,
            prompt_token_ids=list(tokens),
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            cache_salt=origin.cache_salt,
            lora_request=origin.lora_request,
            session_id=session,
            block_hasher=origin.block_hasher,
        )

    def present(self, goal: int, context: Context) -> tuple[int, int]:
        """How many of a context's blocks a request would find in the pool up to ``goal`` tokens, and how many
        there are."""
        size = self.scheduler.block_size
        found = self.scheduler.kv_cache_manager.coordinator.find_longest_cache_hit(context.hashes, goal)
        return found[1] // size, goal // size

    def _cached(self, value: Hash) -> list[KVCacheBlock]:
        """The blocks of all KV groups that hold a content."""
        groups = range(len(self.scheduler.kv_cache_config.kv_cache_groups))
        table = self.pool.cached_block_hash_to_block
        found = (table.get_one_block(make_block_hash_with_group_id(value, group)) for group in groups)
        return [block for block in found if block is not None]

    def _resident(self, hashes: Sequence[Hash]) -> int:
        return sum(len(self._cached(value)) for value in hashes)

    def _unclaimed_free(self, hashes: Sequence[Hash]) -> list[KVCacheBlock]:
        """Of these contents, the blocks that no session claims and no request uses, head first."""
        return [
            block
            for value in hashes
            if value not in self.book.claimed
            for block in self._cached(value)
            if block.ref_cnt == 0 and not block.is_null
        ]

    def status(self) -> dict[str, Any]:
        scheduler = self.scheduler
        running, waiting = scheduler.get_request_counts()
        return {
            "v": VERSION,
            "kvpilot": __version__,
            "active": not self.off,
            "reason": self.off,
            "scheduler": type(scheduler).__name__,
            "connector": type(scheduler.connector).__name__ if scheduler.connector else None,
            "events": bool(scheduler.enable_kv_cache_events),
            "block_tokens": self.book.block_tokens,
            "blocks": {
                "total": self.pool.num_gpu_blocks - 1,
                "free": self.pool.get_num_free_blocks(),
            },
            "requests": {"running": running, "waiting": waiting},
            "sessions": len(self.book),
            "claims": self.book.claims,
            "taken": self.book.taken,
            "displaced": [
                {"salt": key[0], "session": key[1], "blocks": blocks}
                for key, blocks in self.book.displaced(MAX_DISPLACED)
            ],
            "prefetch": {
                "busy": self.loader.busy,
                "slices": self.loader.slices,
                "cancelled": self.loader.cancelled,
            },
            "tiers": self.tiers.status() if self.tiers is not None else None,
            "commands": self.commands,
        }


def _extra(request: Request) -> Any:
    params = request.sampling_params
    return params.extra_args if params is not None else None


def _whole(command: EngineCommand) -> bool:
    """Whether a command is about all of a session."""
    ranged = command.start is not None or command.end is not None
    return bool(command.session) and not (command.blocks or command.tokens or ranged)


def _outcome(command: EngineCommand, status: OutcomeStatus, reason: str) -> EngineOutcome:
    return EngineOutcome(kind=command.kind, status=status, id=command.id, reason=reason)


def _counted(command: EngineCommand, planned: int, confirmed: int, skipped: int) -> EngineOutcome:
    whole = confirmed == planned
    return EngineOutcome(
        kind=command.kind,
        status=OutcomeStatus.DONE if whole else OutcomeStatus.CLIPPED,
        id=command.id,
        reason="" if whole else "a request or another session needs the rest, or it is not here",
        planned=planned,
        confirmed=confirmed,
        skipped=skipped,
    )
