"""vLLM's real scheduler and block pool without a model: soaked in random work, and timed against the stock one.

Runs in the engine's environment (``python -m kvpilot.engine.trial soak|cost MODEL …``), prints JSON; ``kvpilot bench
engine`` calls it. What a worker would do is played: every block has a content, written where vLLM says tokens are
computed or loaded, and whatever vLLM takes for a hit must hold exactly the tokens of the request.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import psutil
import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.gc_utils import freeze_gc_heap
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvpilot.engine.scheduler import SessionAwareScheduler

BLOCK = 16
CHUNK = 4 * BLOCK
"""The tier below stores whole chunks of so many tokens."""


class NoMetadata(KVConnectorMetadata):
    """There are no workers to tell anything."""


class Below(KVConnectorBase_V1):
    """The scheduler's side of a connector to a tier below that is slow, fails now and then, and forgets nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.random = random.Random(1)
        self.stored: set[bytes] = set()
        self.loads: list[tuple[int, Any, list[int], int, int]] = []
        """(due in steps, request, its blocks, tokens that were there, tokens that are once this is done)."""
        self.stores: list[tuple[int, str]] = []
        self.slow = self.failing = 0.0

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self.random.random() < self.slow:
            return None, False
        found = 0
        for end in range(CHUNK, request.num_tokens, CHUNK):
            if request.block_hashes[end // BLOCK - 1] not in self.stored:
                break
            found = end
        more = max(0, found - num_computed_tokens)
        return more, more > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            (ids,) = blocks.get_block_ids()
            end = min(len(ids) * BLOCK, request.num_tokens - 1) // BLOCK * BLOCK
            self.loads.append((self.random.randint(1, 5), request, list(ids), end - num_external_tokens, end))

    def build_connector_meta(self, scheduler_output: Any) -> NoMetadata:
        return NoMetadata()

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        computed = request.num_computed_tokens
        for end in range(CHUNK, computed + 1, CHUNK):
            if request.status != RequestStatus.FINISHED_ABORTED:
                self.stored.add(request.block_hashes[end // BLOCK - 1])
        self.stores.append((self.random.randint(1, 4), request.request_id))
        return True, None

    def start_load_kv(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...


class Trial:
    """A scheduler and a played worker."""

    def __init__(self, kind: type, model: str, blocks: int, seqs: int, *, below: bool, check: bool) -> None:
        transfer = {"kv_connector": "Below", "kv_connector_module_path": __name__, "kv_role": "kv_both"}
        config = EngineArgs(
            model=model,
            dtype="float32",
            enforce_eager=True,
            max_model_len=4096,
            max_num_batched_tokens=4096,
            max_num_seqs=seqs,
            block_size=BLOCK,
            enable_prefix_caching=True,
            kv_transfer_config=transfer if below else None,
        ).create_engine_config()
        if below and config.kv_transfer_config is not None:
            config.kv_transfer_config.kv_load_failure_policy = "recompute"
        config.cache_config.num_gpu_blocks = blocks + 1
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
        self.scheduler = kind(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks=blocks + 1,
                kv_cache_tensors=[],
                kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
            ),
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
            hash_block_size=BLOCK,
            log_stats=False,
        )
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        self.content: dict[int, list[int]] = {}
        self.check = check
        self.checked = 0
        self.numbers = 0
        self.steps = 0
        self.preempted = 0
        self.cpu_s = 0.0
        """CPU time the scheduler took for the last step."""
        self.meanwhile_s = 0.0
        """CPU time of what it did while the model would have run."""
        self.seen: set[str] = set()

    @property
    def pool(self) -> Any:
        return self.scheduler.kv_cache_manager.block_pool

    def add(self, tokens: Sequence[int], max_tokens: int, session: str = "", **hints: Any) -> str:
        """Queue a request; returns its id."""
        self.numbers += 1
        told = {"kvpilot": json.dumps(hints)} if hints else None
        name = f"r{self.numbers}"
        request = Request(
            request_id=name,
            prompt_token_ids=list(tokens),
            sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args=told),
            pooling_params=None,
            session_id=session or None,
            block_hasher=self.hasher,
        )
        began = time.thread_time()
        self.scheduler.add_request(request)
        self.cpu_s = time.thread_time() - began
        return name

    def step(self) -> list[str]:
        """One step of the engine; returns the requests that ended in it."""
        scheduler = self.scheduler
        self.steps += 1
        began = time.thread_time()
        out = scheduler.schedule()
        self.cpu_s = time.thread_time() - began
        began = time.thread_time()
        scheduler.get_grammar_bitmask(out)  # vLLM calls it when it has started the model.
        self.meanwhile_s = time.thread_time() - began
        self.preempted += len(out.preempted_req_ids or ())
        sampled = []
        for name, count in out.num_scheduled_tokens.items():
            request = scheduler.requests[name]
            if self.check:
                self._compute(request, count)
            whole = request.num_computed_tokens >= request.num_tokens
            sampled.append([(request.num_tokens * 7919 + self.numbers) % 30000 + 10] if whole else [])
        names = list(out.num_scheduled_tokens)
        runner = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=sampled,
            kv_connector_output=self._transfers(),
        )
        began = time.thread_time()
        done = scheduler.update_from_output(out, runner)
        self.cpu_s += time.thread_time() - began
        return [o.request_id for outs in done.values() for o in outs.outputs if o.finish_reason is not None]

    def _compute(self, request: Any, count: int) -> None:
        """Play the model: what is said to be there already must be there; the scheduled tokens are written."""
        (ids,) = self.scheduler.kv_cache_manager.get_block_ids(request.request_id)
        tokens = request.all_token_ids
        end = request.num_computed_tokens
        start = end - count
        if request.request_id not in self.seen or request.num_preemptions:
            self.seen.add(request.request_id)
            self._verify(ids, tokens, start)
        for at in range(start, end):
            held = self.content.setdefault(ids[at // BLOCK], [])
            del held[at % BLOCK :]
            assert len(held) == at % BLOCK, f"a hole before token {at} of {request.request_id}"
            held.append(tokens[at])

    def _verify(self, ids: Sequence[int], tokens: Sequence[int], end: int) -> None:
        for place in range(-(-end // BLOCK)):
            want = list(tokens[place * BLOCK : min(end, (place + 1) * BLOCK)])
            held = self.content.get(ids[place], [])[: len(want)]
            assert held == want, f"block {ids[place]} is taken for a hit and holds something else"
            self.checked += 1

    def _transfers(self) -> KVConnectorOutput | None:
        """What the workers would tell of loads and stores that end now."""
        below = self.scheduler.connector
        if below is None:
            return None
        out = KVConnectorOutput(finished_sending=set(), finished_recving=set())
        loads, below.loads = below.loads, []
        for due, request, ids, start, end in loads:
            if due > 1:
                below.loads.append((due - 1, request, ids, start, end))
                continue
            places = range(start // BLOCK, end // BLOCK)
            if below.random.random() < below.failing:
                bad = below.random.choice(places)
                out.invalid_block_ids.add(ids[bad])
                places = range(places.start, bad)
            for place in places:
                self.content[ids[place]] = list(request.all_token_ids[place * BLOCK : (place + 1) * BLOCK])
            out.finished_recving.add(request.request_id)
        stores, below.stores = below.stores, []
        for due, name in stores:
            if due > 1 or any(load[1].request_id == name for load in below.loads):
                below.stores.append((due - 1, name))
            elif name in self.scheduler.requests and name not in out.finished_recving:
                out.finished_sending.add(name)
        return out

    def consistent(self) -> None:
        """The pool's books balance. Raises AssertionError."""
        free = self.pool.free_block_queue.get_all_free_blocks()
        assert len(free) == self.pool.get_num_free_blocks(), "the free count is not the number of free blocks"
        assert len({block.block_id for block in free}) == len(free), "a block is free twice"
        assert all(block.ref_cnt == 0 for block in free), "a block is free and in use"
        used = sum(1 for block in self.pool.blocks if block.ref_cnt > 0 and not block.is_null)
        assert used + len(free) == self.pool.num_gpu_blocks - 1, "blocks are neither free nor in use"


def soak(model: str, requests: int, seed: int) -> dict[str, Any]:
    """Random sessions, hints, commands, cancellations, preemptions and failing loads; raises AssertionError."""
    dice = random.Random(seed)
    trial = Trial(SessionAwareScheduler, model, blocks=128, seqs=16, below=True, check=True)
    inside, below = trial.scheduler.kvpilot, trial.scheduler.connector
    below.slow, below.failing = 0.2, 0.02
    inside.clock = inside.queue.clock = lambda: 0.02 * trial.steps  # A seed tells what happens.
    sessions: dict[str, list[int]] = {}
    outcomes: dict[str, int] = {}
    aborted = 0
    memory: list[int] = []
    process = psutil.Process()

    def reply(raw: bytes) -> None:
        told = json.loads(raw)
        name = " ".join(filter(None, (told.get("kind", "refused"), told.get("status"), told.get("reason"))))
        outcomes[name] = outcomes.get(name, 0) + 1

    def command() -> dict[str, Any]:
        name = dice.choice(list(sessions) or ["nobody"])
        kind = dice.choice(["retain", "release", "demote", "evict", "prefetch", "prefetch", "prefetch"])
        made: dict[str, Any] = {"kind": kind, "session": name}
        if dice.random() < 0.2:
            made["start"] = dice.randrange(0, 200)
        if dice.random() < 0.1:
            made["end"] = dice.randrange(1, 400)
        if dice.random() < 0.1:
            made["tree"] = True
        if kind == "prefetch" and dice.random() < 0.6 and sessions:
            made["tokens"] = sessions[name][: dice.randrange(1, 300)]
        if kind != "prefetch" and dice.random() < 0.1:
            made["blocks"] = [bytes(dice.randbytes(32)).hex()]
        if kind == "retain":
            made["ttl_s"] = dice.choice([0.01, 1.0, 100.0])
        return made

    began = time.monotonic()
    while trial.numbers < requests:
        # Busy for a while, then quiet: that is when prefetches run.
        busy = trial.steps % 200 < 120 and len(trial.scheduler.waiting) < 32
        for _ in range(dice.choice([0, 1, 2, 6]) if busy else dice.random() < 0.05):
            name = f"s{dice.randrange(40)}"
            tokens = sessions.setdefault(name, [dice.randrange(3) for _ in range(3 * BLOCK)])
            roll = dice.random()
            if roll < 0.1:
                tokens[dice.randrange(len(tokens)) :] = [dice.randrange(30000)]
            tokens += [dice.randrange(30000) for _ in range(dice.randrange(1, 40))]
            del tokens[dice.choice([300, 600]) :]
            hints: dict[str, Any] = {}
            if roll > 0.8:
                hints["parent"] = f"s{dice.randrange(40)}"
            if roll > 0.9:
                hints["retain_s"] = dice.choice([0.1, 10.0])
            if roll > 0.95:
                hints[dice.choice(["supersedes", "last"])] = True
            trial.add(tokens, dice.randrange(1, 40), name if dice.random() < 0.85 else "", **hints)
        if dice.random() < 0.3:
            inside.execute(json.dumps(command()).encode(), reply)
        if dice.random() < 0.1 and trial.scheduler.requests:
            victim = dice.choice(list(trial.scheduler.requests))
            if victim.startswith("r"):
                aborted += len(trial.scheduler.finish_requests(victim, RequestStatus.FINISHED_ABORTED))
        trial.step()
        assert not inside.off, inside.off
        if trial.steps % 50 == 0:
            trial.consistent()
            trial.seen &= set(trial.scheduler.requests)
            below.stored = set(list(below.stored)[-5000:])
        if trial.steps % 500 == 0:
            memory.append(process.memory_info().rss)
    _ends(trial)
    assert not inside.loader.busy, "a prefetch never ended"
    # It turns itself off while prefetches are under way: what they hold must come back, too.
    for name in list(sessions)[:8]:
        told = {"kind": "prefetch", "session": name, "tokens": sessions[name]}
        inside.execute(json.dumps(told).encode(), reply)
    for _ in range(4):
        trial.step()
    inside.turn_off("the soak is over")
    _ends(trial)
    half = len(memory) // 2
    return {
        "requests": trial.numbers,
        "steps": trial.steps,
        "preempted": trial.preempted,
        "aborted": aborted,
        "hits_checked": trial.checked,
        "slices_loaded": inside.loader.slices,
        "loads_cancelled": inside.loader.cancelled,
        "outcomes": dict(sorted(outcomes.items())),
        "sessions": len(inside.book),
        "claims": inside.book.claims,
        "memory_mb": [round(value / 2**20) for value in (memory[:1] + memory[half : half + 1] + memory[-1:])],
        "seconds": round(time.monotonic() - began, 1),
    }


def _ends(trial: Trial) -> None:
    """Without new work everything ends and every block is free again. Raises AssertionError."""
    off = trial.scheduler.kvpilot.off
    for _ in range(20_000):
        if not trial.scheduler.has_requests():
            break
        trial.step()
        assert trial.scheduler.kvpilot.off == off
    trial.consistent()
    left = [f"{name} {request.status.name}" for name, request in trial.scheduler.requests.items()]
    assert not left, f"something never ended: {left}"
    assert trial.pool.get_num_free_blocks() == trial.pool.num_gpu_blocks - 1, "blocks leaked"


def cost(model: str, running: int, steps: int, hints: bool) -> dict[str, Any]:
    """CPU time of a scheduling step, stock and session-aware, interleaved step by step; the ratio with its spread. What
    is done while the model runs is no part of it, and told apart.

    Requests decode, end and are followed by their session's next turn; the pool holds about two thirds of what the
    sessions have, so that blocks are reused in every step.
    """
    turn, grow = 256, 64
    blocks = running * (turn + 2 * grow) // BLOCK
    trials = [
        Trial(kind, model, blocks, running, below=False, check=False)
        for kind in (Scheduler, SessionAwareScheduler)
    ]
    dice = random.Random(5)
    contexts = [[dice.randrange(30000) for _ in range(turn)] for _ in range(3 * running // 2)]
    waiting = [list(range(len(contexts))) for _ in trials]
    owners: list[dict[str, int]] = [{}, {}]

    def refill(which: int) -> float:
        trial, took = trials[which], 0.0
        while len(owners[which]) < running:
            number = waiting[which].pop(0)
            told: dict[str, Any] = {"session": f"s{number}"} if hints else {}
            owners[which][trial.add(contexts[number], grow + number % grow, **told)] = number
            took += trial.cpu_s
        return took

    def measured(which: int) -> float:
        """CPU seconds of a step, new requests' arrival included."""
        trial = trials[which]
        took = refill(which)
        for name in trial.step():
            waiting[which].append(owners[which].pop(name))
        return took + trial.cpu_s

    for _ in range(3 * grow):
        measured(0), measured(1)
    freeze_gc_heap()  # As the engine does when it is ready.
    pairs, beside = [], []
    for at in range(steps):
        order = (0, 1) if at % 2 == 0 else (1, 0)
        took = {which: measured(which) for which in order}
        pairs.append((took[0], took[1]))
        beside.append(trials[1].meanwhile_s - trials[0].meanwhile_s)
    groups = [pairs[i : i + grow] for i in range(0, len(pairs) - grow + 1, grow)]
    ratios = [sum(p[1] for p in group) / sum(p[0] for p in group) for group in groups]
    bag = random.Random(7)
    means = sorted(statistics.fmean(bag.choices(ratios, k=len(ratios))) for _ in range(2000))
    return {
        "running": running,
        "hints": hints,
        "steps": steps,
        "stock_us": round(1e6 * statistics.median(p[0] for p in pairs), 1),
        "kvpilot_us": round(1e6 * statistics.median(p[1] for p in pairs), 1),
        "meanwhile_us": round(1e6 * statistics.fmean(beside), 1),
        "ratio": round(sum(p[1] for p in pairs) / sum(p[0] for p in pairs), 4),
        "ratio_95": [round(means[50], 4), round(means[-50], 4)],
        "ratio_of_medians": round(
            statistics.median(p[1] for p in pairs) / statistics.median(p[0] for p in pairs), 4
        ),
    }


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="kvpilot.engine.trial")
    parser.add_argument("what", choices=("soak", "cost"))
    parser.add_argument("model")
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--steps", type=int, default=2000)
    given = parser.parse_args(argv)
    if given.what == "soak":
        print(json.dumps(soak(given.model, given.requests, given.seed)))
    else:
        found = [cost(given.model, given.running, given.steps, hints) for hints in (False, True)]
        print(json.dumps({"cost": found}))


if __name__ == "__main__":
    main(sys.argv[1:])
