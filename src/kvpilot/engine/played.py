"""Agents as planned by a replay, on a real vLLM in this process: what each call found in cache, how long it waited.

Runs in the engine's environment (``python -m kvpilot.engine.played MODEL``): one run a line on standard input
(:class:`Run`), its outcome a line on standard output. ``kvpilot bench pressure`` calls it.
"""

from __future__ import annotations

import hashlib
import heapq
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
VOCABULARY = 40_000
STOCK = "vllm.v1.core.sched.scheduler.Scheduler"
IDLE_S = 0.0005
"""Sleep after a step in which nothing was computed: the thread that copies needs the interpreter."""


class Call(msgspec.Struct, frozen=True):
    """One request: ``pieces`` are (id, tokens) of its prompt in order, ``reply`` the id under which its reply comes
    back in later prompts. ``waits``: calls of its session (by index) and seconds after their ends."""

    session: str
    parent: str
    waits: tuple[tuple[int, float], ...]
    pieces: tuple[tuple[str, int], ...]
    reply: str
    max_tokens: int
    last: bool = False
    """Its session ends with it."""
    supersedes: bool = False
    """It goes on from a compaction."""


class Played(msgspec.Struct, frozen=True):
    """One recorded session. ``start_s``: seconds from the beginning of the run, or from the end of the session before
    it, ``after`` (by index)."""

    start_s: float
    calls: tuple[Call, ...]
    after: int | None = None


class Run(msgspec.Struct, frozen=True):
    """``policy``: what decides what is kept, in the device pool of ``blocks`` blocks and in vLLM's DRAM tier of
    ``dram_blocks`` (0: there is none): ``kvpilot``; ``lru``, ``arc``: vLLM's own, in the pool always LRU."""

    policy: str
    blocks: int
    dram_blocks: int
    block_tokens: int
    max_model_len: int
    sessions: tuple[Played, ...]


class Row(msgspec.Struct, frozen=True):
    """What became of a call. Times in seconds of the run, lengths in tokens; ``reusable``: of the prompt's whole
    blocks, the leading ones that an earlier prompt or reply of the run had."""

    session: int
    call: int
    due_s: float
    ttft_s: float
    prompt: int
    cached: int
    reusable: int


class Outcome(msgspec.Struct, frozen=True):
    """``working_set``: time mean of the distinct blocks of all live contexts; a context is live from its first call
    to the end of its session's last."""

    rows: tuple[Row, ...]
    took_s: float
    working_set: float


class Agents:
    """What the agents of a run say: prompts as token ids, and what any of them had before."""

    def __init__(self, run: Run) -> None:
        self._size = run.block_tokens
        self._replies: dict[tuple[str, str], list[int]] = {}
        self._known: set[bytes] = set()

    def prompt(self, call: Call) -> list[int]:
        ids: list[int] = []
        for name, tokens in call.pieces:
            ids += self._replies.get((call.session, name)) or text(name, tokens)
        return ids

    def replied(self, call: Call, tokens: list[int]) -> None:
        self._replies[call.session, call.reply] = tokens

    def blocks(self, tokens: Sequence[int]) -> list[bytes]:
        """Names of the whole blocks of a context, each of all that lies before its end."""
        ids, name, found = np.asarray(tokens, dtype="<u4"), b"", []
        for end in range(self._size, len(ids) + 1, self._size):
            name = hashlib.blake2b(name + ids[end - self._size : end].tobytes(), digest_size=16).digest()
            found.append(name)
        return found

    def reusable(self, blocks: Sequence[bytes], prompt: int) -> int:
        """Tokens; the last one of a prompt is always computed."""
        leading = next((i for i, name in enumerate(blocks) if name not in self._known), len(blocks))
        return min(leading, (prompt - 1) // self._size) * self._size

    def had(self, blocks: Sequence[bytes]) -> None:
        self._known.update(blocks)


class WorkingSet:
    """Distinct blocks of live contexts over time."""

    def __init__(self) -> None:
        self._contexts: dict[str, list[bytes]] = {}
        self._references: Counter[bytes] = Counter()
        self._at = self._area = 0.0

    def holds(self, name: str, blocks: list[bytes], now: float) -> None:
        """From now on a context has these blocks; none: it is no more."""
        self._area += len(self._references) * (now - self._at)
        self._at = now
        self._references.update(blocks)
        for block in self._contexts.pop(name, ()):
            self._references[block] -= 1
            if not self._references[block]:
                del self._references[block]
        if blocks:
            self._contexts[name] = blocks

    @property
    def mean(self) -> float:
        return self._area / self._at if self._at else 0.0


class Engine:
    """One vLLM."""

    def __init__(self, model: str, run: Run) -> None:
        from vllm import LLM

        kvpilot = run.policy == "kvpilot"
        own = {} if kvpilot else {"eviction_policy": run.policy, "cache_policy_module_path": None}
        below = {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "spec_name": "KvpilotTieringSpec",
                "spec_module_path": "kvpilot.engine.tiers",
                "cpu_bytes_to_use": run.dram_blocks * _block_bytes(model, run.block_tokens),
                "secondary_tiers": [],
                **own,
            },
        }
        self.kvpilot = kvpilot
        self.llm = LLM(
            model=model,
            dtype="float32",
            enforce_eager=True,
            max_model_len=run.max_model_len,
            max_num_batched_tokens=2048,
            max_num_seqs=16,
            block_size=run.block_tokens,
            num_gpu_blocks_override=run.blocks + 1,
            scheduler_cls=None if kvpilot else STOCK,
            kv_transfer_config=below if run.dram_blocks else None,
        )
        self.core = self.llm.llm_engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        if kvpilot and getattr(self.scheduler, "kvpilot", None) is None:
            raise RuntimeError("the plug-in is not active: KVPILOT=1 is missing")

    def add(self, name: str, tokens: list[int], call: Call) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        told = {"parent": call.parent, "last": call.last, "supersedes": call.supersedes}
        params = SamplingParams(
            max_tokens=call.max_tokens,
            temperature=0,
            ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
            extra_args={"kvpilot": msgspec.json.encode(told).decode()} if self.kvpilot else None,
        )
        self.llm.llm_engine.add_request(name, {"prompt_token_ids": tokens}, params, session_id=call.session)

    def step(self) -> list[Any]:
        """Outputs of a step; nothing is waited for."""
        if not self.busy:
            return []
        outputs = self.llm.llm_engine.step()
        if not outputs:
            time.sleep(IDLE_S)
        return list(outputs)

    @property
    def busy(self) -> bool:
        connector = self.scheduler.connector
        return self.scheduler.has_requests() or (
            connector is not None and bool(connector.has_pending_push_work())
        )

    def close(self) -> None:
        while self.busy:
            self.step()
        self.llm.llm_engine.engine_core.shutdown()


def play(model: str, run: Run) -> Outcome:
    """Play a run on an engine of its own."""
    engine = Engine(model, run)
    engine.add("warm-up", text("warm-up", 64), Call("", "", (), (), "", 2))
    while engine.busy:
        engine.step()
    agents, held = Agents(run), WorkingSet()
    due: list[tuple[float, int, int]] = []
    ended: list[dict[int, float]] = [{} for _ in run.sessions]
    left = [len(session.calls) for session in run.sessions]
    running: dict[str, tuple[float, int, int, list[int], list[int]]] = {}
    rows: list[Row] = []
    began = time.monotonic()

    def start(after: int | None, now: float) -> None:
        for number, session in enumerate(run.sessions):
            if session.after == after:
                for index, call in enumerate(session.calls):
                    if not call.waits:
                        heapq.heappush(due, (now + session.start_s, number, index))

    def begin(at: float, number: int, index: int) -> None:
        call = run.sessions[number].calls[index]
        prompt = agents.prompt(call)
        running[f"{number}-{index}"] = (at, number, index, prompt, [])
        engine.add(f"{number}-{index}", prompt, call)

    def first(output: Any, now: float) -> None:
        at, number, index, prompt, _ = running[output.request_id]
        blocks = agents.blocks(prompt)
        reusable = agents.reusable(blocks, len(prompt))
        rows.append(Row(number, index, at, now - at, len(prompt), output.num_cached_tokens or 0, reusable))
        agents.had(blocks)
        held.holds(run.sessions[number].calls[index].session, blocks, now)

    def end(name: str, now: float) -> None:
        _, number, index, prompt, reply = running.pop(name)
        session = run.sessions[number]
        agents.replied(session.calls[index], reply)
        blocks = agents.blocks([*prompt, *reply[:-1]])
        agents.had(blocks)
        held.holds(session.calls[index].session, blocks, now)
        ended[number][index] = now
        left[number] -= 1
        if not left[number]:
            for agent in {call.session for call in session.calls}:
                held.holds(agent, [], now)
            start(number, now)
        for other, call in enumerate(session.calls):
            waited = [before for before, _ in call.waits]
            if index in waited and all(before in ended[number] for before in waited):
                at = max(ended[number][before] + gap for before, gap in call.waits)
                heapq.heappush(due, (at, number, other))

    start(None, 0.0)
    while due or running:
        while due and due[0][0] <= time.monotonic() - began:
            begin(*heapq.heappop(due))
        if not running and not engine.busy:
            time.sleep(max(0.0, due[0][0] - (time.monotonic() - began)))
        outputs = engine.step()
        now = time.monotonic() - began
        for output in outputs:
            tokens = list(output.outputs[0].token_ids)
            if tokens and not running[output.request_id][4]:
                first(output, now)
            running[output.request_id][4].extend(tokens)
            if output.finished:
                end(output.request_id, now)
    took = time.monotonic() - began
    engine.close()
    return Outcome(tuple(rows), took, held.mean)


def text(name: str, tokens: int) -> list[int]:
    """Token ids of a text; a longer one of the same name begins with them."""
    raw = hashlib.shake_256(name.encode()).digest(4 * tokens)
    return [100 + int(value) for value in np.frombuffer(raw, dtype="<u4") % VOCABULARY]


def _block_bytes(model: str, block_tokens: int) -> int:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model)
    heads = config.num_key_value_heads * config.head_dim
    return int(2 * config.num_hidden_layers * heads * 4 * block_tokens)


def main(model: str) -> None:
    os.environ.update(ENVIRONMENT)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # Whatever else is printed is no answer.
    for line in sys.stdin.buffer:
        answers.write(msgspec.json.encode(play(model, msgspec.json.decode(line, type=Run))) + b"\n")


if __name__ == "__main__":
    main(sys.argv[1])
