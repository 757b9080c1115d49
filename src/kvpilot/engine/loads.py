"""Bringing contexts into the device pool before anybody asks for them.

A load is a request that never computes: its blocks are allocated, the connector fills them as for any user's request,
they are entered in the prefix cache and freed again, where the next request of the session finds them. It takes one
slice of the context at a time, so that memory and the connector are given back soon when a user needs them, and it
starts a slice only when no user's request waits.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus

from kvpilot.domain import OutcomeStatus
from kvpilot.engine.book import Context
from kvpilot.engine.commands import EngineCommand, EngineOutcome, RankReport, RankState
from kvpilot.engine.ranks import arrivals

if TYPE_CHECKING:
    from kvpilot.engine.inside import Inside

SLICE_TOKENS = 4096
MAX_QUEUED = 256
RANK_LATE_S = 10.0
"""After so long a rank that has not loaded a slice, as others have, is late."""
MAX_LOOKUP_S = 10.0
"""A look-up below that takes longer is given up (LMCache away, say)."""

NAME = "kvpilot-load-"
"""What the names of loads begin with."""

Reply = Callable[[EngineOutcome], None]


@dataclass(slots=True)
class Load:
    """One prefetch under way. ``goal`` is where it ends, in tokens, a multiple of the block size."""

    command: EngineCommand
    context: Context
    tokens: array[int]
    goal: int
    reply: Reply
    began: float
    at: int = 0
    loaded: int = 0
    request: Any = None
    asked_at: float = 0.0
    loading: bool = False
    cancelled: str = ""
    failed: bool = False
    loading_since: float = 0.0
    slice_blocks: int = 0
    by_rank: dict[int, int] = field(default_factory=dict)
    """Blocks that have come from below, of those that a rank has loaded whole slices of."""
    told: bool = False
    """Its outcome was told already: a rank is late."""


class Loader:
    """Prefetches, one after the other. :meth:`step` is called before every scheduling step and never waits."""

    def __init__(self, inside: Inside) -> None:
        self._inside = inside
        self._scheduler = inside.scheduler
        self._queue: deque[Load] = deque()
        self._numbers = 0
        self.slices = 0
        self.cancelled = 0

    @property
    def step_tokens(self) -> int:
        """Contexts come from below in whole multiples of so many tokens."""
        size = int(self._scheduler.block_size)
        connector = self._scheduler.connector
        lmcache = getattr(connector, "scheduler_adapter", None)
        own = getattr(getattr(connector, "connector_scheduler", None), "config", None)
        return math.lcm(
            size,
            int(getattr(lmcache, "lmcache_tokens_per_chunk", size)),
            int(getattr(own, "alignment_tokens", None) or size),
        )

    @property
    def busy(self) -> bool:
        return bool(self._queue)

    @property
    def paused(self) -> bool:
        return self._scheduler._pause_state is not PauseState.UNPAUSED

    def submit(self, load: Load) -> None:
        """Take a load on; ``reply`` gets its outcome, now or later."""
        if self._scheduler.connector is None:
            self._end(load, OutcomeStatus.REJECTED, "no connector: there is no tier below to load from")
        elif len(self._queue) >= MAX_QUEUED:
            self._end(load, OutcomeStatus.REJECTED, f"{MAX_QUEUED} prefetches are waiting already")
        else:
            self._queue.append(load)

    def cancel(self, context: Context, reason: str) -> None:
        """Loads of a context end at the next border of a slice: its own request is here and loads what it needs."""
        for load in self._queue:
            if load.context is context:
                load.cancelled = reason

    def abandon(self, reason: str) -> None:
        """End all loads, in whatever state they are; vLLM frees what a slice under way holds once it has arrived."""
        while self._queue:
            load = self._queue.popleft()
            if load.request is not None:
                self._scheduler.finish_requests(load.request.request_id, RequestStatus.FINISHED_ABORTED)
            if load.told:
                continue
            load.reply(
                EngineOutcome(
                    kind=load.command.kind, status=OutcomeStatus.FAILED, id=load.command.id, reason=reason
                )
            )

    def step(self, now: float) -> None:
        while self._queue and self._advance(self._queue[0], now):
            self._queue.popleft()

    def invalid(self, block_ids: set[int]) -> None:
        """The connector could not fill these blocks: what lies from the first of them on is not there."""
        load = self._queue[0] if self._queue else None
        if load is None or not load.loading:
            return
        (ids,) = self._scheduler.kv_cache_manager.get_block_ids(load.request.request_id)
        bad = next((i for i, block_id in enumerate(ids) if block_id in block_ids), None)
        if bad is not None:
            load.request.num_computed_tokens = bad * self._scheduler.block_size
            load.failed = True
            self._scheduler.failed_recving_kv_req_ids.add(load.request.request_id)

    # ------------------------------------------------------------ one load

    def _advance(self, load: Load, now: float) -> bool:
        """Do what can be done without waiting; whether the load has ended."""
        if load.loading:
            if not self._arrived(load):
                self._look_at_ranks(load, now)
                return False
            if load.failed:
                return self._end(load, OutcomeStatus.FAILED, "the connector could not load it")
        while load.request is None:
            if load.cancelled:
                self.cancelled += 1
                return self._end(load, OutcomeStatus.CLIPPED, load.cancelled)
            if load.at >= load.goal:
                return self._end(load, OutcomeStatus.DONE, "")
            if not self._idle():
                return False
            self._ask(load, now)
        return self._look_up(load, now)

    def _idle(self) -> bool:
        """No user's request waits for memory or for the connector."""
        return not self._scheduler.waiting and not self.paused

    def _ask(self, load: Load, now: float) -> None:
        """Make the request for the next slice. One token more than is wanted, as the last is never taken as a hit."""
        end = min(load.goal, load.at + SLICE_TOKENS)
        beyond = load.tokens[end] if end < len(load.tokens) else 0
        self._numbers += 1
        session = load.context.session
        request = self._inside.request(
            f"{NAME}{self._numbers}",
            [*load.tokens[:end], beyond],
            load.context.origin,
            session.key[1] if session is not None else None,
        )
        self._scheduler.requests[request.request_id] = request
        load.request, load.asked_at = request, now
        self._scheduler.connector.on_new_request(request)

    def _look_up(self, load: Load, now: float) -> bool:
        scheduler, request = self._scheduler, load.request
        if request.is_finished():  # The engine aborted everything.
            load.request = None
            return self._end(load, OutcomeStatus.FAILED, "aborted by the engine")
        blocks, here, _ = scheduler.kv_cache_manager.get_computed_blocks(request)
        here -= here % scheduler.block_size
        below, later = scheduler.connector.get_num_new_matched_tokens(request, here)
        if below is None:
            if now - load.asked_at <= MAX_LOOKUP_S and not scheduler.waiting and not load.cancelled:
                return False
            self._drop(load, blocks)
            if now - load.asked_at > MAX_LOOKUP_S:
                return self._end(
                    load, OutcomeStatus.FAILED, f"the tiers below did not answer in {MAX_LOOKUP_S:.0f} s"
                )
            return False
        end = request.num_tokens - 1
        if here >= end:
            self._drop(load, blocks)
            load.at = end
            return False
        if below <= 0 or not later:
            self._drop(load, blocks)
            return self._end(
                load, OutcomeStatus.CLIPPED if here else OutcomeStatus.MISSING, "not in the tiers below"
            )
        if not self._has_room(load, blocks, below) or not self._allocate(load, blocks, here, below):
            self._drop(load, blocks)
            return self._end(load, OutcomeStatus.CLIPPED, "no room beside what is needed more")
        return False

    def _has_room(self, load: Load, blocks: Any, tokens: int) -> bool:
        """Only blocks that nobody claims or that are worth less give way to a load."""
        queue, now = self._inside.queue, self._inside.clock()
        free_hits = sum(1 for group in blocks.blocks for block in group if block.ref_cnt == 0)
        groups = len(blocks.blocks)
        wanted = groups * (tokens // self._scheduler.block_size)
        running = len(self._scheduler.running)
        own = queue.kept.size_of(load.context.number, free_hits)
        missing = wanted + running + free_hits - own
        missing -= queue.plain(missing)
        return bool(queue.kept.below(load.context.number, now, missing) >= missing)

    def _allocate(self, load: Load, blocks: Any, here: int, below: int) -> bool:
        scheduler, request = self._scheduler, load.request
        new = scheduler.kv_cache_manager.allocate_slots(
            request,
            0,
            num_new_computed_tokens=here,
            new_computed_blocks=blocks,
            num_external_computed_tokens=below,
            delay_cache_blocks=True,
            skip_zeroing_group_ids=scheduler.connector.get_loaded_kv_cache_group_ids(request),
            reserved_blocks=scheduler._inflight_prefill_reserved_blocks()
            + scheduler._spec_decode_step_blocks,
        )
        if new is None:
            return False
        held = scheduler.kv_cache_manager.get_blocks(request.request_id)
        scheduler.connector.update_state_after_alloc(request, held, below)
        request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
        request.num_computed_tokens = here + below
        load.loading = True
        load.loading_since = self._inside.clock()
        load.slice_blocks = below // scheduler.block_size
        load.loaded += load.slice_blocks
        self.slices += 1
        return True

    def _arrived(self, load: Load) -> bool:
        """Whether a slice's load has ended; if so, it is entered in the prefix cache and its blocks are freed."""
        scheduler, request = self._scheduler, load.request
        if request.is_finished():
            load.request, load.loading, load.failed = None, False, True
            return True
        if request.request_id not in scheduler.finished_recving_kv_req_ids:
            return False
        end = request.num_computed_tokens
        if arrivals.ranks > 1:
            (ids,) = scheduler.kv_cache_manager.get_block_ids(request.request_id)
            for rank in arrivals.take(request.request_id, set(ids)):
                load.by_rank[rank] = load.by_rank.get(rank, 0) + load.slice_blocks
        scheduler._update_waiting_for_remote_kv(request)
        # Less than was asked for is no reason to stop here: the next look-up tells what there is.
        load.at = end if end > load.at else load.goal
        load.loading = False
        self._free(load)
        return True

    def _drop(self, load: Load, blocks: Any) -> None:
        """Give a slice up that loads nothing; the connector forgets it and unlocks what it had found."""
        scheduler = self._scheduler
        scheduler.connector.update_state_after_alloc(load.request, blocks.new_empty(), 0)
        self._free(load)

    def _free(self, load: Load) -> None:
        load.request.status = RequestStatus.FINISHED_ABORTED
        self._scheduler._free_request(load.request)
        load.request = None

    def _look_at_ranks(self, load: Load, now: float) -> None:
        """A slice that has arrived on some ranks, and long after not on others: that is told. It holds its blocks until
        it has arrived on all, and nothing is loaded after it."""
        arrived = arrivals.of(load.request.request_id)
        if load.told or not arrived or now - load.loading_since < RANK_LATE_S:
            return
        late = [rank for rank in range(arrivals.ranks) if rank not in arrived]
        for rank in arrived:
            load.by_rank[rank] = load.by_rank.get(rank, 0) + load.slice_blocks
        load.cancelled = f"rank {', '.join(map(str, late))} has not loaded it in {RANK_LATE_S:.0f} s"
        self._end(load, OutcomeStatus.FAILED, load.cancelled, late)
        load.told = True

    def _end(self, load: Load, status: OutcomeStatus, reason: str, late: Sequence[int] = ()) -> bool:
        if load.told:
            return True
        present, planned = self._inside.present(load.goal, load.context)
        if status is OutcomeStatus.DONE and present < planned:
            status, reason = OutcomeStatus.CLIPPED, "others needed the room meanwhile"
        load.reply(
            EngineOutcome(
                kind=load.command.kind,
                status=status,
                id=load.command.id,
                reason=reason,
                planned=planned,
                confirmed=present,
                loaded=load.loaded,
                seconds=round(self._inside.clock() - load.began, 4),
                ranks=_by_rank(load, late),
            )
        )
        return True


def _by_rank(load: Load, late: Sequence[int]) -> tuple[RankReport, ...]:
    """What each rank has loaded; nothing where there is one."""
    if arrivals.ranks == 1:
        return ()
    return tuple(
        RankReport(
            rank,
            state=RankState.LATE if rank in late else RankState.OK,
            loaded=load.by_rank.get(rank, 0),
        )
        for rank in range(arrivals.ranks)
    )
