"""``kvpilot bench tiers``: what it is worth to have a session's KV one tier higher before its next turn.

One session's context of exactly N tokens; other tenants' traffic pushes its KV out of the device pool and out of
host memory; then its next turn, at most 32 tokens longer, one token of reply, TTFT at the client through the
gateway. Variants differ in where the KV lies when the turn begins:

* ``recompute``       nowhere: a context of the same length that nobody has seen
* ``passive_cold``    on disk, page cache dropped; kvpilot only observes
* ``passive_cached``  on disk, files in the page cache; kvpilot only observes
* ``kvpilot``         as passive_cold in even rounds and as passive_cached in odd ones, but kvpilot acts on the
                      hint that the session's tool has finished, and the turn begins when that action has its
                      outcome
* ``kvpilot_device``  as kvpilot, and then vLLM's plug-in has brought it into the device pool, too
* ``l1_hit``          in host memory (the limit of what kvpilot can do from disk without the plug-in)
* ``device_hit``      in vLLM's own pool

Every measurement is checked against LMCache's directory before and vLLM's own counters after it; one whose state
was not as meant is discarded and counted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from kvpilot.bench.lab import BenchError, Lab, drop_page_cache
from kvpilot.bench.stats import closed_share, interleaved, paired_summary, summary
from kvpilot.config import Config
from kvpilot.domain import OutcomeStatus, SignalKind, Tier
from kvpilot.engine.commands import EngineCommand, Kind
from kvpilot.replay.client import ChatResult

VARIANTS = (
    "kvpilot",
    "kvpilot_device",
    "passive_cached",
    "passive_cold",
    "recompute",
    "l1_hit",
    "device_hit",
)
WITH_PLUGIN = ("kvpilot_device",)
"""Variants for an engine with kvpilot's plug-in (``engine.plugin``)."""

OTHER_TENANT_TOKENS = 4096
NEW_WORDS = 12
"""Words of the new user message; with the template's tokens the turn is at most 32 tokens longer."""
SETTLE_S = 1.0
"""Pause before each measured turn."""
_SPARE = 1.25
"""Other tenants' contexts fill host memory this many times over."""

Progress = Callable[[str], None]


def chosen(names: str | None, *, plugin: bool) -> list[str]:
    """The variants of a list with commas; all there are with or without the plug-in where there is none. Raises
    ValueError."""
    there = [variant for variant in VARIANTS if plugin or variant not in WITH_PLUGIN]
    if names is None:
        return there
    asked = {name.strip() for name in names.split(",") if name.strip()}
    if unknown := sorted(asked - set(there)):
        hint = " (it needs --plugin)" if unknown[0] in WITH_PLUGIN else ""
        raise ValueError(f"no variant {unknown[0]!r}{hint}: there are {', '.join(there)}")
    return [variant for variant in there if variant in asked]


class Sizes(msgspec.Struct, frozen=True):
    """How large the tiers of the bench are, in chunks of ``chunk`` tokens, for a largest context."""

    chunk: int
    host_chunks: int
    disk_chunks: int
    others: int
    """Other tenants' contexts."""


def sizes_for(context: int, chunk: int = 256) -> Sizes:
    """Host memory holds six largest contexts, the disk tier everything with room to spare.

    Six, because LMCache keeps only a fifth of host memory free, and what comes from disk must pass through it.
    """
    own = context // chunk
    host = max(6 * own, 96)
    others = -(-int(_SPARE * host) // (OTHER_TENANT_TOKENS // chunk))
    disk = int(1.4 * (others * (OTHER_TENANT_TOKENS // chunk) + 4 * own))
    return Sizes(chunk, host, disk, others)


def bench_config(config: Config, contexts: Sequence[int], kv_bytes_per_token: int) -> Config:
    """``config`` with tiers bounded for this bench; the device pool holds just one longest context."""
    largest = max(contexts)
    sizes = sizes_for(largest, config.lmcache.chunk_size)
    chunk_gb = sizes.chunk * kv_bytes_per_token / 2**30
    return config.with_overrides(
        engine={"max_model_len": max(largest, OTHER_TENANT_TOKENS) + 1024, "dev": True},
        lmcache={
            "host_gb": round(sizes.host_chunks * chunk_gb, 3),
            "disk_gb": round(sizes.disk_chunks * chunk_gb, 3),
        },
    )


class Context(msgspec.Struct):
    """The session under test: its first prompt is exactly ``tokens`` long."""

    session: str
    messages: list[dict[str, str]]
    token_ids: list[int]
    chunks: list[bytes]

    @property
    def tokens(self) -> int:
        return len(self.token_ids)


class Discarded(Exception):
    """A measurement whose state was not as meant; the message says how."""


class TierBench:
    """The bench on one stack; :meth:`run` measures one context length."""

    def __init__(
        self, lab: Lab, run_id: str, sizes: Sizes, variants: Sequence[str], progress: Progress
    ) -> None:
        self._lab, self._run_id, self._say = lab, run_id, progress
        self._sizes = sizes
        self._others: list[Context] = []
        self._next_other = 0
        self._turn = 0
        self._overhead = 0
        self._variants = variants

    async def prepare(self) -> None:
        """Learn the template's cost, prefill the other tenants' contexts and wait until all are on disk."""
        await self._lab.control.set_mode("passive")
        probe = self._messages("probe", 8, 8)
        reply = await self._chat(probe, None)
        self._overhead = len(reply.prompt_token_ids or ()) - 16
        for number in range(self._sizes.others):
            self._say(f"other tenants' contexts: {number + 1} of {self._sizes.others}")
            self._others.append(await self._prefill(f"other-{number}", OTHER_TENANT_TOKENS))
        for other in self._others:
            await self._on_disk(other)

    async def run(self, tokens: int, rounds: int) -> dict[str, Any]:
        """``rounds`` interleaved rounds at a context of ``tokens``; returns rows, ratios and what was discarded.

        Raises BenchError when a state cannot be made at all.
        """
        self._say(f"{tokens} tokens: prefilling the session")
        context = await self._prefill(f"session-{tokens}", tokens)
        await self._on_disk(context)
        measured: list[dict[str, float]] = []
        discarded: dict[str, list[str]] = {}
        prefetch_ms: list[float] = []
        for number in range(rounds):
            results: dict[str, float] = {}
            for variant in interleaved(self._variants, number):
                try:
                    results[variant] = await self._measure(variant, context, number, prefetch_ms)
                except Discarded as reason:
                    discarded.setdefault(variant, []).append(f"round {number}: {reason}")
                    self._say(f"{tokens} tokens, round {number + 1}: {variant} discarded ({reason})")
                else:
                    self._say(f"{tokens} tokens, round {number + 1}: {variant} {results[variant]:.0f} ms")
            measured.append(results)
        return summarise(tokens, measured, discarded, prefetch_ms)

    # ------------------------------------------------------------ one measurement

    async def _measure(self, variant: str, context: Context, number: int, prefetch_ms: list[float]) -> float:
        if variant == "recompute":
            return await self._recompute(context.tokens)
        if variant == "device_hit":
            await self._turn_of(context)
            return await self._timed(context, host=None, device=True)
        await self._push_out(context)
        if variant == "l1_hit":
            await self._to_host(context)
            return await self._timed(context, host=True, device=False)
        acts = variant in ("kvpilot", "kvpilot_device")
        if variant == "passive_cold" or (acts and number % 2 == 0):
            await asyncio.to_thread(drop_page_cache, self._lab.disk_folder)
        if not acts:
            return await self._timed(context, host=False, device=False)
        await self._lab.control.set_mode("kvpilot")
        try:
            took = await self._hinted(context)
            if variant == "kvpilot_device":
                await self._into_device(context)
                return await self._timed(context, host=None, device=True)
            prefetch_ms.append(took)
            return await self._timed(context, host=True, device=False)
        finally:
            await self._lab.control.set_mode("passive")

    async def _into_device(self, context: Context) -> None:
        outcome = await self._lab.plugin.command(EngineCommand(Kind.PREFETCH, session=context.session))
        if outcome.status is not OutcomeStatus.DONE:
            raise Discarded(f"the plug-in's prefetch was {outcome.status}: {outcome.reason}")

    async def _timed(self, context: Context, *, host: bool | None, device: bool) -> float:
        """The next turn's TTFT in ms, if the KV lay where it should: ``host`` None = does not matter."""
        n = len(context.chunks)
        if host is not None:
            want = {Tier.DISK: n, Tier.HOST: n if host else 0}
            if not await self._lab.until_held(context.chunks, want, 3.0):
                raise Discarded(f"before the turn {_counts(await self._lab.held(context.chunks))} of {n}")
        # What follows a turn (stores, mapping) is over before an agent's tool is; it must not be measured here.
        await asyncio.sleep(SETTLE_S)
        before = await self._lab.engine_hits()
        result = await self._turn_of(context)
        after = await self._lab.engine_hits()
        if result.cached_tokens < context.tokens:
            raise Discarded(f"only {result.cached_tokens} of {context.tokens} tokens hit")
        found = after.device - before.device
        if (found >= context.tokens) is not device:
            raise Discarded(f"{found} tokens were in the device pool")
        assert result.ttft_ms is not None
        return result.ttft_ms

    async def _turn_of(self, context: Context) -> ChatResult:
        """The session's next turn: its context and at most 32 new tokens."""
        self._turn += 1
        question = self._lab.texts.text(f"{self._run_id}:turn:{self._turn}", NEW_WORDS)
        messages = [
            *context.messages,
            {"role": "assistant", "content": self._lab.texts.text("noted", 1)},
            {"role": "user", "content": question},
        ]
        result = await self._chat(messages, context.session, token_ids=False)
        if not context.tokens < result.prompt_tokens <= context.tokens + 32:
            raise BenchError(
                f"the next turn is {result.prompt_tokens} tokens: this template is not supported"
            )
        return result

    async def _recompute(self, tokens: int) -> float:
        """TTFT of a context nobody has seen; its KV is dropped from the tiers again."""
        self._turn += 1
        session = f"{self._run_id}-fresh-{self._turn}"
        result = await self._chat(self._exact(session, tokens), session)
        if result.cached_tokens:
            raise Discarded(f"{result.cached_tokens} tokens of a new context hit")
        chunks = self._lab.chunks(result.prompt_token_ids or ())
        await self._lab.until_held(chunks, {Tier.DISK: len(chunks)}, 10.0)
        await self._lab.backend.drop(self._lab.space, chunks, (Tier.HOST, Tier.DISK))
        await self._lab.until_held(chunks, {Tier.DISK: 0, Tier.HOST: 0}, 5.0)
        assert result.ttft_ms is not None
        return result.ttft_ms

    # ------------------------------------------------------------ making states

    async def _push_out(self, context: Context) -> None:
        """Other tenants take their turns (device pool) and get their contexts back (host memory), until this
        session's KV is in neither; their contexts come from the disk tier, which is what makes this cheap."""
        pool = self._lab.stack.config.engine.max_model_len
        for _ in range(-(-pool // OTHER_TENANT_TOKENS) + 1):
            await self._turn_of(self._other())
        deadline = time.monotonic() + 60.0
        while (await self._lab.held(context.chunks))[Tier.HOST]:
            if time.monotonic() > deadline:
                raise BenchError("other tenants' traffic does not push the session out of host memory")
            await self._load(self._other())
            await asyncio.sleep(0.1)
        if not await self._lab.until_held(context.chunks, {Tier.DISK: len(context.chunks)}, 3.0):
            raise BenchError("the session's KV is not wholly on disk: the disk tier is too small")
        await self._room(len(context.chunks))

    async def _room(self, chunks: int, timeout_s: float = 10.0) -> None:
        """Wait until LMCache has made room for that many chunks in host memory (it evicts once a second)."""
        until = time.monotonic() + timeout_s
        while True:
            [host] = [entry for entry in await self._lab.backend.usage() if entry.tier is Tier.HOST]
            share = 1 - host.used_bytes / host.capacity_bytes
            if share * self._sizes.host_chunks >= chunks + 1:
                return
            if time.monotonic() > until:
                raise BenchError(f"LMCache made no room for {chunks} chunks in host memory")
            await asyncio.sleep(0.2)

    def _other(self) -> Context:
        self._next_other = (self._next_other + 1) % len(self._others)
        return self._others[self._next_other]

    async def _load(self, context: Context) -> bool:
        tokens = np.asarray(context.token_ids, dtype=np.uint32)
        return (await self._lab.backend.prefetch(self._lab.space, tokens, timeout_s=30)).complete

    async def _to_host(self, context: Context) -> None:
        for _ in range(20):
            if await self._load(context):
                return
            await asyncio.sleep(0.5)  # LMCache makes room once a second
        raise Discarded("host memory had no room for the session")

    async def _hinted(self, context: Context) -> float:
        """Tell kvpilot that the session's tool has finished and wait for what it does; ms from hint to outcome."""
        began = time.perf_counter()
        actions = await self._lab.control.signal(context.session, SignalKind.TOOL_FINISHED, eta_s=0.0)
        for action in actions:
            await self._lab.control.outcome(action, 15.0)
        records = await self._lab.control.settled(context.session, 15.0)
        took = (time.perf_counter() - began) * 1000
        loads = [r for r in records if r["kind"] == "prefetch" and r["id"] in actions]
        if not loads:
            raise Discarded("kvpilot started no prefetch")
        if loads[0]["status"] != "done":
            raise Discarded(f"kvpilot's prefetch was {loads[0]['status']}: {loads[0]['reason']}")
        return took

    async def _prefill(self, name: str, tokens: int) -> Context:
        session = f"{self._run_id}-{name}"
        messages = self._exact(session, tokens)
        result = await self._chat(messages, session)
        ids = result.prompt_token_ids or []
        if len(ids) != tokens:
            raise BenchError(f"a context of {tokens} tokens came out {len(ids)} long")
        return Context(session, messages, ids, self._lab.chunks(ids))

    async def _on_disk(self, context: Context) -> None:
        if not await self._lab.until_held(context.chunks, {Tier.DISK: len(context.chunks)}, 30.0):
            raise BenchError(f"{context.session} was not stored on disk within 30 s")

    def _exact(self, name: str, tokens: int) -> list[dict[str, str]]:
        system = min(1024, tokens // 4)
        return self._messages(name, system, tokens - self._overhead - system)

    def _messages(self, name: str, system: int, user: int) -> list[dict[str, str]]:
        texts = self._lab.texts
        return [
            {"role": "system", "content": texts.text(f"{self._run_id}:{name}:system", system)},
            {"role": "user", "content": texts.text(f"{self._run_id}:{name}:user", user)},
        ]

    async def _chat(
        self, messages: list[dict[str, str]], session: str | None, token_ids: bool = True
    ) -> ChatResult:
        ids = None if session is None else (session, session)
        result = await self._lab.gateway.chat(messages, 1, session=ids, token_ids=token_ids)
        if result.error is not None:
            raise BenchError(f"a request failed: {result.status} {result.error}")
        return result


def _counts(held: dict[Tier, int]) -> str:
    return ", ".join(f"{tier.value} {count}" for tier, count in held.items())


def summarise(
    tokens: int,
    rounds: Sequence[dict[str, float]],
    discarded: dict[str, list[str]],
    prefetch_ms: Sequence[float],
) -> dict[str, Any]:
    """Rows and paired ratios of one context length."""
    values = {variant: [r[variant] for r in rounds if variant in r] for variant in VARIANTS}
    spreads = paired_summary(rounds, "kvpilot", [v for v in VARIANTS if v != "kvpilot"])
    device = paired_summary(rounds, "kvpilot_device", [v for v in VARIANTS if v != "kvpilot_device"])
    return {
        "context": tokens,
        "rows": [
            {"context": tokens, "variant": variant, "ttft_ms": summary(found)}
            for variant, found in values.items()
            if found
        ],
        "paired": {variant: spread["median"] for variant, spread in spreads.items()},
        "paired_spread": spreads,
        "paired_device": device,
        "closed": closed_share(rounds, "kvpilot", "passive_cached", "l1_hit"),
        "prefetch_ms": summary(prefetch_ms) if prefetch_ms else None,
        "discarded": {variant: len(reasons) for variant, reasons in discarded.items()},
        "discarded_why": discarded,
        "rounds": [{v: round(ms, 1) for v, ms in r.items()} for r in rounds],
    }
