"""Runs in the engine's environment, started by ``test_inside_vllm``: a real vLLM in one process, with the plug-in.

Prints one JSON object: what was seen, by the name of the scene.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_NUM_OF_RESERVED_CPU="0",
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL="WARNING",
    HF_HUB_OFFLINE="1",
)

import vllm
from vllm import LLM, SamplingParams
from vllm.config.scheduler import SchedulerConfig

BLOCK = 64
BLOCKS = 64
CONTEXT = 1000
"""Tokens of a context: 15 whole blocks, and one that is not."""


class Engine:
    """One vLLM and its scheduler."""

    def __init__(self, model: str, **more: Any) -> None:
        self.llm = LLM(
            model=model,
            dtype="float32",
            enforce_eager=True,
            max_model_len=2048,
            max_num_batched_tokens=512,
            max_num_seqs=8,
            block_size=BLOCK,
            num_gpu_blocks_override=BLOCKS + 1,
            **more,
        )
        self.scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler

    def ask(self, name: str, session: str | None = None, tokens: int = CONTEXT, **hints: Any) -> int:
        """A request with a context of its own name; returns how many tokens of it were in the pool."""
        return self.run(prompt(name, tokens), session, **hints).num_cached_tokens or 0

    def run(self, ids: list[int], session: str | None = None, max_tokens: int = 1, **hints: Any) -> Any:
        [out] = self.llm.generate(
            [{"prompt_token_ids": ids}], [params(session, max_tokens, **hints)], use_tqdm=False
        )
        return out

    def command(self, **command: Any) -> dict[str, Any]:
        answers: list[bytes] = []
        self.scheduler.kvpilot.execute(json.dumps(command).encode(), answers.append)
        return json.loads(answers[0])

    def free(self) -> int:
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()


def params(
    session: str | None, max_tokens: int = 1, logprobs: int | None = None, **hints: Any
) -> SamplingParams:
    told = json.dumps({"session": session, **hints})
    extra = {"kvpilot": told} if session else None
    return SamplingParams(max_tokens=max_tokens, temperature=0, extra_args=extra, logprobs=logprobs)


def prompt(name: str, tokens: int = CONTEXT) -> list[int]:
    """Token ids nobody else has."""
    seed = sum(ord(c) * 131**i for i, c in enumerate(name))
    return [(seed + i * 7919) % 40000 + 100 for i in range(tokens)]


def wrong_version() -> dict[str, Any]:
    from kvpilot.engine import plugin

    stock, version = SchedulerConfig.get_scheduler_cls, vllm.__version__
    vllm.__version__ = "99.0.0"
    try:
        plugin._wire()
        return {"patched": SchedulerConfig.get_scheduler_cls is not stock}
    finally:
        vllm.__version__ = version


def explicit_flag(model: str) -> dict[str, Any]:
    engine = Engine(model, scheduler_cls="vllm.v1.core.sched.scheduler.Scheduler")
    return {"kvpilot": hasattr(engine.scheduler, "kvpilot"), "hit": [engine.ask("x"), engine.ask("x")]}


def sessions_outlive_strangers(engine: Engine) -> dict[str, Any]:
    engine.ask("one", "one")
    for i in range(5):
        engine.ask(f"stranger-{i}")
    return {"session": engine.ask("one", "one"), "stranger": engine.ask("stranger-0"), "free": engine.free()}


def superseded_goes_first(engine: Engine) -> dict[str, Any]:
    engine.ask("two", "two")
    engine.ask("three", "three")
    engine.ask("two-compacted", "two", tokens=200, supersedes=True)
    engine.ask("stranger-6", tokens=1800)
    engine.ask("stranger-7")
    return {"superseded": engine.ask("two"), "other": engine.ask("three", "three")}


def demoted_before_live_retained_last(engine: Engine) -> dict[str, Any]:
    for name in ("retained", "demoted", "live"):
        engine.ask(name, name)
    outcomes = [
        engine.command(kind="demote", session="demoted", id="d1"),
        engine.command(kind="retain", session="retained", ttl_s=60),
    ]
    engine.ask("newcomer-1", "newcomer-1")
    engine.ask("newcomer-2", "newcomer-2")
    engine.ask("newcomer-3", "newcomer-3")
    hits = {name: engine.ask(name, name) for name in ("retained", "demoted")}
    return {"outcomes": outcomes, "hits": hits}


def a_request_gets_what_it_needs(engine: Engine) -> dict[str, Any]:
    engine.command(kind="retain", session="retained", ttl_s=60)
    out = engine.run(prompt("huge", 2000), max_tokens=4)
    return {"tokens": len(out.outputs[0].token_ids), "free": engine.free()}


def evicted_is_gone_but_not_what_others_need(engine: Engine) -> dict[str, Any]:
    shared = prompt("system", 4 * BLOCK)
    for name in ("e1", "e2"):
        engine.run([*shared, *prompt(name, 300)], name)
    outcome = engine.command(kind="evict", session="e1")
    return {
        "outcome": outcome,
        "e1": engine.run([*shared, *prompt("e1", 300)]).num_cached_tokens,
        "again": engine.command(kind="evict", session="e1"),
        "e2": engine.run([*shared, *prompt("e2", 300)]).num_cached_tokens,
    }


def a_range_is_evicted(engine: Engine) -> dict[str, Any]:
    engine.ask("range", "range")
    outcome = engine.command(kind="evict", session="range", start=5 * BLOCK, end=10 * BLOCK)
    return {"outcome": outcome, "left": engine.ask("range", "range")}


def malformed(engine: Engine) -> dict[str, Any]:
    return {
        "kind": engine.command(kind="explode", session="x"),
        "unknown": engine.command(kind="evict", session="nobody"),
        "prefetch": engine.command(kind="prefetch", session="range"),
    }


def reset(engine: Engine) -> dict[str, Any]:
    done = engine.llm.reset_prefix_cache()
    queue = engine.scheduler.kvpilot.queue
    return {"done": done, "free": engine.free(), "plain": queue.plain(1000)}


def an_error_inside_turns_it_off(engine: Engine) -> dict[str, Any]:
    engine.ask("broken", "broken")

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("made to fail")

    engine.scheduler.kvpilot.book.begin = broken
    hits = [engine.ask("after", "after"), engine.ask("after", "after")]
    return {"hits": hits, "free": engine.free(), "off": engine.scheduler.kvpilot.off}


def main(model: str) -> None:
    seen: dict[str, Any] = {"wrong_version": wrong_version(), "explicit_flag": explicit_flag(model)}
    engine = Engine(model)
    for scene in (
        sessions_outlive_strangers,
        superseded_goes_first,
        demoted_before_live_retained_last,
        a_request_gets_what_it_needs,
        evicted_is_gone_but_not_what_others_need,
        a_range_is_evicted,
        malformed,
        reset,
        an_error_inside_turns_it_off,
    ):
        if engine.scheduler.kvpilot and not engine.scheduler.kvpilot.off:
            engine.llm.reset_prefix_cache()
        seen[scene.__name__] = scene(engine)
    print(json.dumps(seen))


if __name__ == "__main__":
    main(sys.argv[1])
