"""vLLM's scheduler with the hooks that kvpilot needs: what it tells, and where it is asked to do more.

``session_aware`` makes a subclass of whatever scheduler vLLM would use. Each hook runs guarded: an error inside
kvpilot turns kvpilot off and never reaches a request.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from kvpilot.engine.inside import Inside, log


class SessionAware:
    """Mixed in before a scheduler class."""

    kvpilot: Inside | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        try:
            self.kvpilot = start(self)
        except Exception:
            log.exception("kvpilot could not start in this engine; vLLM goes on without it")

    def add_request(self, request: Any) -> None:
        if request.request_id not in self.requests:  # type: ignore[attr-defined]
            self._tell(Inside.arrived, request)
        super().add_request(request)  # type: ignore[misc]

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self._tell(Inside.finished, request)
        return super()._free_request(request, *args, **kwargs)  # type: ignore[misc]

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        self._tell(Inside.step)
        return super().schedule(*args, **kwargs)  # type: ignore[misc]

    def get_grammar_bitmask(self, *args: Any, **kwargs: Any) -> Any:
        # vLLM asks for this when it has started the model for what was scheduled.
        found = super().get_grammar_bitmask(*args, **kwargs)  # type: ignore[misc]
        self._tell(Inside.meanwhile)
        return found

    def has_requests(self) -> bool:
        return super().has_requests() or (self.kvpilot is not None and self.kvpilot.has_work)  # type: ignore[misc]

    def _handle_invalid_blocks(self, invalid_block_ids: set[int], *args: Any, **kwargs: Any) -> Any:
        self._tell(lambda inside: inside.loader.invalid(invalid_block_ids))
        return super()._handle_invalid_blocks(invalid_block_ids, *args, **kwargs)  # type: ignore[misc]

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        done: bool = super().reset_prefix_cache(*args, **kwargs)  # type: ignore[misc]
        if done:
            self._tell(Inside.forget_blocks)
        return done

    def _tell(self, what: Callable[..., None], *about: Any) -> None:
        inside = self.kvpilot
        if inside is None or inside.off:
            return
        try:
            what(inside, *about)
        except Exception as error:
            log.exception("kvpilot failed")
            inside.turn_off(repr(error))


def start(scheduler: Any) -> Inside | None:
    """kvpilot for a scheduler that has just been made; None where it has nothing to decide."""
    if not scheduler.kv_cache_manager.enable_caching:
        log.warning("kvpilot is off: vLLM's prefix caching is disabled")
        return None
    inside = Inside(scheduler)
    log.info(
        "kvpilot is active: %s, %d blocks, connector %s",
        type(scheduler).__name__,
        inside.pool.num_gpu_blocks - 1,
        type(scheduler.connector).__name__ if scheduler.connector else "none",
    )
    return inside


@cache
def session_aware(base: type) -> type:
    """A scheduler class of vLLM's (or of somebody's own) with kvpilot in it."""
    if issubclass(base, SessionAware):
        return base
    return type(f"SessionAware{base.__name__}", (SessionAware, base), {"__module__": __name__})


SessionAwareScheduler = session_aware(Scheduler)
"""For ``--scheduler-cls`` where vLLM's default is the synchronous scheduler (CPU)."""
SessionAwareAsyncScheduler = session_aware(AsyncScheduler)
"""For ``--scheduler-cls`` elsewhere."""
