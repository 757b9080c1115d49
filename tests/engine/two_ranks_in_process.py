"""Runs in the engine's environment, started by ``test_ranks``: a real vLLM with two ranks, one of which fails.

Prints one JSON object: what was seen, by the name of the scene.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from typing import Any

os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1",
    OMP_NUM_THREADS="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",  # By itself vLLM wants a NUMA node for each rank.
    VLLM_CPU_NUM_OF_RESERVED_CPU="0",
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL="WARNING",
    HF_HUB_OFFLINE="1",
)

import zmq
from vllm import LLM, SamplingParams

PORT = int(os.environ["KVPILOT_PORT"].rpartition(":")[2])
BLOCK = 64
CONTEXT = 1000
"""Tokens of a context: 15 whole blocks, and one that is not."""
PATIENCE_S = 60.0


def prompt(name: str) -> list[int]:
    """Token ids nobody else has."""
    seed = sum(ord(c) * 131**i for i, c in enumerate(name))
    return [(seed + i * 7919) % 40000 + 100 for i in range(CONTEXT)]


class Engine:
    """One vLLM whose model is split over two processes, with vLLM's own DRAM tier."""

    def __init__(self, model: str) -> None:
        self.llm = LLM(
            model=model,
            tensor_parallel_size=2,
            dtype="float32",
            enforce_eager=True,
            max_model_len=2048,
            max_num_batched_tokens=512,
            max_num_seqs=8,
            block_size=BLOCK,
            num_gpu_blocks_override=65,
            kv_transfer_config={
                "kv_connector": "OffloadingConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {
                    "spec_name": "KvpilotTieringSpec",
                    "spec_module_path": "kvpilot.engine.tiers",
                    "cpu_bytes_to_use": 200 * BLOCK * 4096,
                },
            },
        )
        self.pids = [told({}, 1 + rank)["pid"] for rank in range(2)]

    def ask(self, name: str, session: str | None = None) -> Any:
        told = {"kvpilot": json.dumps({"session": session})} if session else None
        params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, extra_args=told)
        [out] = self.llm.generate([{"prompt_token_ids": prompt(name)}], [params], use_tqdm=False)
        return out


def told(command: dict[str, Any], port: int = 0) -> dict[str, Any]:
    """The outcome of a command, and how long it took. ``port``: 0 is the scheduler's, behind it are the ranks'."""
    began = time.monotonic()
    with zmq.Context.instance().socket(zmq.REQ) as asked:
        asked.linger = 0
        asked.connect(f"tcp://127.0.0.1:{PORT + port}")
        asked.send(json.dumps(command).encode())
        if not asked.poll(1000 * PATIENCE_S):
            return {"hangs": True}
        outcome: dict[str, Any] = json.loads(asked.recv())
    return {**outcome, "took_s": time.monotonic() - began}


def push_out(engine: Engine, tag: str) -> None:
    """Other sessions' contexts fill the device pool."""
    for i in range(6):
        engine.ask(f"{tag}-{i}", f"{tag}-{i}")


def reach_both(engine: Engine) -> dict[str, Any]:
    first = engine.ask("both", "both")
    told({"kind": "demote", "session": "both"})
    push_out(engine, "other")
    prefetched = told({"kind": "prefetch", "session": "both", "id": "mine"})
    again = engine.ask("both", "both")
    evicted = told({"kind": "evict", "session": "both"})
    after = engine.ask("both")
    tokens = [list(out.outputs[0].token_ids) for out in (first, again, after)]
    return {
        "prefetched": prefetched,
        "cached": again.num_cached_tokens,
        "evicted": evicted,
        "cached_after": after.num_cached_tokens,
        "same": tokens[0] == tokens[1] == tokens[2],
    }


def slow(engine: Engine) -> dict[str, Any]:
    """One rank stands still for a while."""
    engine.ask("slow", "slow")
    told({"kind": "demote", "session": "slow"})
    push_out(engine, "further")
    os.kill(engine.pids[1], signal.SIGSTOP)
    try:
        outcome = told({"kind": "prefetch", "session": "slow", "id": "mine"})
    finally:
        os.kill(engine.pids[1], signal.SIGCONT)
    until = time.monotonic() + PATIENCE_S
    while (state := told({"kind": "status"})).get("prefetch", {}).get(
        "busy", True
    ) and time.monotonic() < until:
        time.sleep(0.2)
    return {"outcome": outcome, "after": state, "cached": engine.ask("slow", "slow").num_cached_tokens}


def killed(engine: Engine) -> dict[str, Any]:
    """One rank dies while a command waits for it."""
    os.kill(engine.pids[1], signal.SIGSTOP)
    threading.Timer(0.7, os.kill, (engine.pids[1], signal.SIGKILL)).start()
    outcome = told({"kind": "prefetch", "session": "both", "tokens": prompt("both")})
    began = time.monotonic()
    try:
        engine.ask("dead")
    except Exception as error:
        return {"outcome": outcome, "error": type(error).__name__, "took_s": time.monotonic() - began}
    return {"outcome": outcome, "error": None}


def main(model: str) -> None:
    engine = Engine(model)
    seen = {scene.__name__: scene(engine) for scene in (reach_both, slow, killed)}
    print(json.dumps(seen), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
