"""The embedded stack in the simulator: vLLM's device pool over LMCache's host memory and disk, by their own rules.

Where :mod:`kvpilot.sim.tiers` asks what a policy could make of a machine, this says what vLLM 0.32 and LMCache 0.5.6
make of it, so that it can be held against them (``kvpilot bench agreement``):

* The device pool is an LRU of blocks. A request holds all its blocks to its end; freed ones get old from the tail.
* Below there are chunks of several blocks. What a request finds is the longest run of chunks that host memory or disk
  has, or what the device has if that is longer. Chunks read from disk only pass through host memory, all at once: where
  it has no room for them, what lies before the first of them is found. Until its first token a request keeps what it
  waits to read, copies from disk too.
* What LMCache did not find is stored with the first token, the reply at its end, in batches of an engine step, first in
  host memory and from there on disk. A batch for which host memory has no room is lost. Where LMCache finds nothing of
  a prompt, its connector does not count what the device had: it stores that many tokens fewer.
* Once a second a tier that is filled above its watermark gives up a share of its chunks, least recently used first.
* With ``acts`` kvpilot's coordinator drops from host memory and disk what no live context references any more, at the
  end of the request or with the signal that made it so; a finished tool brings its context from disk to host memory.

Left out: the queue for a full device pool, the engine's steps (nothing is looked up while one runs), the time that
stores and deletions take, what kvpilot places in host memory without a signal, requests that fail.
"""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from kvpilot.domain import SignalKind, Tier
from kvpilot.replay.plan import Hints
from kvpilot.sim.hardware import Hardware
from kvpilot.sim.one_tier import Scenario
from kvpilot.sim.serving import Engine, Step
from kvpilot.sim.view import SeenSignal
from kvpilot.sim.workload import Floats, Ints, Workload
from kvpilot.traces import Overlay

EVICTS_EVERY_S = 1.0
WATERMARK = 0.8
"""LMCache's defaults (``--eviction-trigger-watermark``, ``--eviction-ratio``)."""
EVICTS_SHARE = 0.2


class StackSizes(msgspec.Struct, frozen=True):
    """``device_blocks`` are those a request can have; ``step_tokens`` is the most that the engine computes at once."""

    block_tokens: int
    chunk_tokens: int
    device_blocks: int
    host_chunks: int
    disk_chunks: int
    step_tokens: int = 2048


@dataclass(frozen=True, slots=True)
class StackOutcome:
    """By call, in order of their beginnings: prompt tokens found, those of them in the device; TTFT in seconds."""

    found: Ints
    in_device: Ints
    ttft: Floats


def run_stack(laid: Overlay, sizes: StackSizes, hardware: Hardware, acts: bool) -> StackOutcome:
    """Plays ``laid``: calls begin and end when it says. Its granularity does not matter, that of ``sizes`` does."""
    stack = _Stack(laid, sizes, hardware, acts)
    stack.run()
    found = np.minimum(stack.found * sizes.block_tokens, np.maximum(0, stack.prompt_tokens - 1))
    return StackOutcome(found, stack.in_device * sizes.block_tokens, stack.ttft)


class _Lru:
    """Chunks from the one unused for longest to the latest; of those used together the tail is the older."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._order: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, chunk: int) -> bool:
        return chunk in self._order

    def __len__(self) -> int:
        return len(self._order)

    def use(self, chunks: Sequence[int]) -> None:
        """They are here, and just used."""
        for chunk in reversed(chunks):
            self._order[chunk] = None
            self._order.move_to_end(chunk)

    def drop(self, chunks: Iterable[int]) -> None:
        for chunk in chunks:
            self._order.pop(chunk, None)

    def drop_oldest(self, count: int) -> None:
        for _ in range(min(count, len(self._order))):
            self._order.popitem(last=False)


class _Tier(_Lru):
    """One of LMCache's tiers. Chunks that a request waits to read stay until it has them, copies on their way to it
    take room."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._locks: Counter[int] = Counter()
        self._passing = 0

    @property
    def taken(self) -> int:
        return len(self) + self._passing

    @property
    def room(self) -> int:
        return self.capacity - self.taken

    def lock(self, chunks: Sequence[int], passing: int) -> None:
        self._locks.update(chunks)
        self._passing += passing

    def unlock(self, chunks: Sequence[int], passing: int) -> None:
        self._locks.subtract(chunks)
        self._passing -= passing

    def evict(self) -> bool:
        """One round of LMCache's eviction; whether there was anything to do."""
        if not len(self) or self.taken < WATERMARK * self.capacity:
            return False
        count = max(1, int(EVICTS_SHARE * self.taken))
        loose = (chunk for chunk in self._order if not self._locks[chunk])
        self.drop(list(itertools.islice(loose, count)))
        return True


class _Device:
    """vLLM's pool. Blocks of running requests are held; ``spare`` ones hold what is no full block yet."""

    def __init__(self, blocks: int) -> None:
        self._free = _Lru(blocks)
        self._held: Counter[int] = Counter()
        self._spare: dict[int, int] = {}

    def __contains__(self, block: int) -> bool:
        return block in self._free or block in self._held

    def begin(self, call: int, blocks: Sequence[int], total: int) -> None:
        """A request has these full blocks, and ``total`` with those that it will fill."""
        self._hold(blocks)
        self._spare[call] = total - len(blocks)
        self._make_room()

    def end(self, call: int, began_with: Sequence[int], blocks: Sequence[int]) -> None:
        del self._spare[call]
        for block in began_with:
            self._held[block] -= 1
            if not self._held[block]:
                del self._held[block]
        self._free.use([block for block in blocks if block not in self._held])
        self._make_room()

    def _hold(self, blocks: Sequence[int]) -> None:
        self._held.update(blocks)
        self._free.drop(blocks)

    def _make_room(self) -> None:
        taken = len(self._free) + len(self._held) + sum(self._spare.values())
        self._free.drop_oldest(taken - self._free.capacity)


class _Paths:
    """The chunks of contexts by number: equal prefixes have equal numbers."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._first = np.concatenate(([0], np.cumsum(workload.size))).tolist()

    def chunks(self, tip: int) -> list[int]:
        first = self._first
        return [chunk for node in self._workload.path(tip) for chunk in range(first[node], first[node + 1])]


class _Stack(Engine):
    def __init__(self, laid: Overlay, sizes: StackSizes, hardware: Hardware, acts: bool) -> None:
        scenario = Scenario(_in_chunks_of(laid, sizes.block_tokens))
        super().__init__(scenario, hardware)
        self._sizes, self._acts = sizes, acts
        self._per_chunk = sizes.chunk_tokens // sizes.block_tokens
        self._coarse = Scenario(_in_chunks_of(laid, sizes.chunk_tokens)).workload
        self._block_paths, self._chunk_paths = _Paths(self._workload), _Paths(self._coarse)
        self._device = _Device(sizes.device_blocks)
        self._host, self._disk = _Tier(sizes.host_chunks), _Tier(sizes.disk_chunks)
        self._reads = {store.tier: store for store in hardware.stores}
        self._evicted_at = 0.0
        self._began: dict[int, tuple[list[int], int]] = {}
        """Running call → its prompt's full blocks, and how many chunks LMCache found and has stored since."""
        self._reading: dict[int, tuple[list[int], int]] = {}
        """Call before its first token → the chunks it reads from host memory, and how many from disk."""
        self._uncounted: dict[int, int] = {}
        """Call → chunks that the device had and the connector did not count."""
        self._first_token = _first_tokens(self._workload)
        self._live: dict[int, list[int]] = {}
        """Agent → the chunks of its context."""
        self._references: Counter[int] = Counter()
        self._signals: dict[int, list[SeenSignal]] = {}
        for signal in scenario.view(Hints.LIFECYCLE).signals:
            self._signals.setdefault(signal.call, []).append(signal)
        self._said: list[SeenSignal] = []
        self.in_device: Ints = np.zeros(self._workload.calls, dtype=np.int32)
        self.prompt_tokens = self._workload.prompt_tokens

    def before(self, now: float) -> None:
        """Rounds of eviction since anything happened last; once nothing is above its watermark nothing will be."""
        rounds = int(now / EVICTS_EVERY_S) - int(self._evicted_at / EVICTS_EVERY_S)
        self._evicted_at = now
        for _ in range(rounds):
            if not any([self._host.evict(), self._disk.evict()]):
                return

    def load(self, call: int, now: float) -> tuple[int, float]:
        sizes, workload = self._sizes, self._workload
        blocks = self._block_paths.chunks(int(workload.prompt_tip[call]))
        tokens = int(workload.prompt_tokens[call])
        device = _leading(blocks[: (tokens - 1) // sizes.block_tokens], self._device)
        below, ready = self._look_up(call, device, now)
        self._began[call] = blocks, below
        self._uncounted[call] = 0 if below else device // self._per_chunk
        self.in_device[call] = device
        total = -(-(tokens + workload.recorded[call].reply.tok) // sizes.block_tokens)
        self._device.begin(call, blocks, total)
        return max(device, min(below * self._per_chunk, len(blocks))), ready

    def _look_up(self, call: int, device: int, now: float) -> tuple[int, float]:
        """Leading chunks that LMCache has, and when those that the device lacks are read."""
        chunks = self._chunk_paths.chunks(int(self._coarse.prompt_tip[call]))
        found = []
        for chunk in chunks:
            if chunk not in self._host and chunk not in self._disk:
                break
            found.append(chunk)
        there = [chunk for chunk in found if chunk not in self._host]
        if len(there) > self._host.room:
            found = found[: found.index(there[0])]
            there = []
        here = [chunk for chunk in found if chunk in self._host]
        self._host.use(here)
        self._disk.use(there)
        self._host.lock(here, len(there))
        self._reading[call] = here, len(there)
        self.at(max(now, self._first_token[call]), Step.TICK, call)
        missing = set(found[device // self._per_chunk :])
        ready = now
        for tier, read in ((Tier.HOST, here), (Tier.DISK, there)):
            count = len(missing.intersection(read))
            if count:
                store = self._reads[tier]
                ready += (
                    store.latency_s + count * self._per_chunk * self._chunk_bytes / store.read_bytes_per_s
                )
        return len(found), ready

    def ends_at(self, call: int, first_token: float) -> float:
        # What caches hold follows from when requests came and went, not from how fast the profile is.
        return float(self._workload.end[call])

    def ticked(self, call: int, now: float) -> None:
        """A prompt is computed: LMCache stores it."""
        if call not in self._reading:
            return
        self._host.unlock(*self._reading.pop(call))
        self._store(call, self._chunk_paths.chunks(int(self._coarse.prompt_tip[call])))

    def replied(self, call: int, now: float) -> None:
        workload = self._workload
        chunks = self._chunk_paths.chunks(int(self._coarse.context_tip[call]))
        self.ticked(call, now)
        self._store(call, chunks)
        blocks, _ = self._began.pop(call)
        self._device.end(call, blocks, self._block_paths.chunks(int(workload.context_tip[call])))
        if self._acts:
            self._refer(int(workload.agent[call]), chunks)
            for signal in self._signals.get(call, ()):
                self._said.append(signal)
                self.at(max(now, signal.at), Step.SIGNAL, len(self._said) - 1)

    def _store(self, call: int, chunks: Sequence[int]) -> None:
        """What of these chunks of a call's context LMCache neither found nor stored before."""
        blocks, have = self._began[call]
        stop = len(chunks) - self._uncounted[call]
        self._began[call] = blocks, max(have, stop)
        step = self._sizes.step_tokens // self._sizes.chunk_tokens
        for first in range(have, stop, step):
            batch = [chunk for chunk in chunks[first : min(stop, first + step)] if chunk not in self._host]
            if len(batch) <= self._host.room:
                self._host.use(batch)
                self._disk.use(batch)

    def signalled(self, signal: int, now: float) -> None:
        said = self._said[signal]
        if said.kind is SignalKind.END:
            self._refer(said.context, [])
        elif said.kind is SignalKind.TOOL_FINISHED:
            self._prefetch(self._live.get(said.context, ()))

    def _refer(self, agent: int, chunks: list[int]) -> None:
        """The agent's context is these chunks now: what nobody references any more goes."""
        before = self._live.pop(agent, [])
        self._references.update(chunks)
        self._references.subtract(before)
        if chunks:
            self._live[agent] = chunks
        orphans = [chunk for chunk in before if self._references[chunk] <= 0]
        self._host.drop(orphans)
        self._disk.drop(orphans)

    def _prefetch(self, chunks: Sequence[int]) -> None:
        there = []
        for chunk in chunks:
            if chunk in self._host:
                continue
            if chunk not in self._disk:
                break
            there.append(chunk)
        self._disk.use(there)
        if len(there) <= self._host.room:
            self._host.use(there)


def _first_tokens(workload: Workload) -> list[float]:
    """When each call had its first token, as recorded; where that is not known, its end."""
    return [
        float(end) if call.t_first is None else float(begin) + call.t_first - call.t_request
        for begin, end, call in zip(workload.begin, workload.end, workload.recorded, strict=True)
    ]


def _leading(chunks: Sequence[int], cache: _Device) -> int:
    """How many of ``chunks``, from the first on, are there."""
    return next((index for index, chunk in enumerate(chunks) if chunk not in cache), len(chunks))


def _in_chunks_of(laid: Overlay, tokens: int) -> Overlay:
    placed = tuple(
        msgspec.structs.replace(p, session=msgspec.structs.replace(p.session, chunk_tokens=tokens))
        for p in laid.placed
    )
    return msgspec.structs.replace(laid, placed=placed)
