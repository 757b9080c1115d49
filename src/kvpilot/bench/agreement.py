"""``kvpilot bench agreement``: does the simulator say what the real stack does?

Recorded agents are replayed on a stack with small tiers, cold at the start, once with kvpilot watching only (LRU in
every tier) and once with it acting; then the same calls, at the times at which they came and went, are played in
:mod:`kvpilot.sim.stack` with the same capacities. Held against each other: tokens found in cache, which of the two
modes finds more, and, as information only, times to first token.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from kvpilot.bench.lab import EngineHits, lab
from kvpilot.bench.reset import reset_tiers
from kvpilot.config import Config
from kvpilot.replay.as_recorded import as_recorded
from kvpilot.replay.driver import TurnRow
from kvpilot.replay.plan import PlannedSession, ReplayOptions, choose_scale, plan_overlay
from kvpilot.replay.run import replay_sessions, where_is
from kvpilot.replay.text import TextMaker
from kvpilot.sim.hardware import PROFILES
from kvpilot.sim.stack import StackOutcome, StackSizes, run_stack
from kvpilot.stack.launch import Endpoints, launch, with_free_ports
from kvpilot.stack.models import kv_bytes_per_token
from kvpilot.traces import find_trace, overlay, read_trace

MODEL, PROFILE = "m4x256", "this-cpu-small"
LONGEST_CONTEXT = 4096
MODES = ("passive", "kvpilot")
SAME = 0.01
"""Modes whose hits differ by less than this share are not ranked."""
CLOSE = 0.03
"""How far simulated hits may be from real ones."""


class Tiers(msgspec.Struct, frozen=True):
    """Capacities: vLLM's blocks, LMCache's chunks."""

    device_blocks: int
    host_chunks: int
    disk_chunks: int


class Scenario(msgspec.Struct, frozen=True):
    """Sessions of a recording (``only``: of these ids), ``starts_s`` the seconds of the replay in which they start."""

    name: str
    trace: str
    tiers: Tiers
    sessions: int
    max_calls: int
    gap_scale: float
    max_gap_s: float
    starts_s: float
    only: tuple[str, ...] = ()

    @property
    def options(self) -> ReplayOptions:
        return ReplayOptions(
            gap_scale=self.gap_scale, max_gap_s=self.max_gap_s, max_calls=self.max_calls, max_reply=8
        )


_ROOMY, _TIGHT = Tiers(96, 64, 160), Tiers(96, 32, 48)

SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        # All that is live fits into host memory, not into the device.
        Scenario("device-bound", "sessions/agentv-codex", _ROOMY, 6, 12, 1.0, 15.0, 10.0),
        # ... into the disk, not into host memory.
        Scenario("host-bound", "sessions/agentv-codex", _ROOMY, 13, 12, 1.0, 20.0, 30.0),
        # ... not even into the disk.
        Scenario("disk-bound", "sessions/agentcgroup", _TIGHT, 22, 7, 1.0, 20.0, 40.0),
        # Contexts that are summarised and go on.
        Scenario(
            "compaction",
            "sessions/entire-cli",
            _TIGHT,
            4,
            38,
            0.1,
            6.0,
            10.0,
            ("b67cb6d008d69d77", "64a07ccd646607ed", "8296bfcb93694ca2", "9c3e91092413bb00"),
        ),
        # Many small contexts that are over soon.
        Scenario(
            "sub-agents",
            "sessions/entire-cli",
            _TIGHT,
            12,
            12,
            0.3,
            15.0,
            40.0,
            (
                *("5a15b9ce095b657a", "9871cb8a31a6456a", "a8f76f95c70b1a4d", "a4bec0a1c773b2c7"),
                *("a7ab49adbdaf05c3", "362c84f5992a7d1e", "1df2941df2d522c3", "d2e613a9299a1370"),
                *("0e53e805bd0ae7bf", "1b2359deae08f449", "0d1790c70a7e21f8", "b8eba9baa2a360b5"),
            ),
        ),
    )
}
"""In the order in which they are run: those with the same tiers share a stack."""


class RealRun(msgspec.Struct, frozen=True):
    """What a replay on the real stack was. ``hits``: as vLLM counts them, which counts requests that failed, too."""

    planned: tuple[PlannedSession, ...]
    rows: tuple[TurnRow, ...]
    hits: EngineHits


class ModeRow(msgspec.Struct, frozen=True):
    """One scenario in one mode. Tokens over all calls, ``ttft`` means in seconds."""

    scenario: str
    mode: str
    calls: int
    failed: int
    prompt_tokens: int
    planned_tokens: int
    real_hits: int
    simulated_hits: int
    real_in_device: int
    simulated_in_device: int
    real_ttft: float
    simulated_ttft: float

    @property
    def ratio(self) -> float:
        """Simulated ÷ real hits."""
        return self.simulated_hits / self.real_hits if self.real_hits else float(self.simulated_hits == 0)


def chosen(names: str | None) -> list[Scenario]:
    """Scenarios by names with commas (None: all). Raises ValueError with the names there are."""
    if names is None:
        return list(SCENARIOS.values())
    asked = {name.strip() for name in names.split(",") if name.strip()}
    unknown = sorted(asked - SCENARIOS.keys())
    if unknown or not asked:
        raise ValueError(f"no scenario {(unknown or [''])[0]!r}: there are {', '.join(SCENARIOS)}")
    return [scenario for name, scenario in SCENARIOS.items() if name in asked]


def bench_agreement(config: Config, scenarios: Sequence[Scenario]) -> dict[str, Any]:
    """Runs stacks of its own in ``config``'s state folder; returns the document.

    Raises BenchError, ControlError, StackError, TraceError, TextError, ValueError.
    """
    for scenario in scenarios:
        find_trace(scenario.trace)
    config = config.with_overrides(engine={"model": MODEL})
    chunk_gb = config.lmcache.chunk_size * kv_bytes_per_token(config) / 2**30
    rows: list[ModeRow] = []
    for tiers, group in itertools.groupby(scenarios, key=lambda scenario: scenario.tiers):
        settings = with_free_ports(stack_config(config, tiers, chunk_gb))
        with launch(settings, echo=True) as stack:
            for scenario in group:
                rows.extend(_rows(scenario, stack))
    return document(rows)


def stack_config(config: Config, tiers: Tiers, chunk_gb: float) -> Config:
    """``config`` with these tiers."""
    return config.with_overrides(
        # vLLM keeps one block for itself.
        engine={"max_model_len": LONGEST_CONTEXT, "device_blocks": tiers.device_blocks + 1, "dev": True},
        lmcache={"host_gb": tiers.host_chunks * chunk_gb, "disk_gb": tiers.disk_chunks * chunk_gb},
    )


def _rows(scenario: Scenario, stack: Endpoints) -> Iterator[ModeRow]:
    engine, cache = stack.config.engine, stack.config.lmcache
    sizes = StackSizes(
        block_tokens=engine.block_size,
        chunk_tokens=cache.chunk_size,
        device_blocks=scenario.tiers.device_blocks,
        host_chunks=scenario.tiers.host_chunks,
        disk_chunks=scenario.tiers.disk_chunks,
    )
    for mode in MODES:
        real = _replay(scenario, stack, mode)
        laid = as_recorded(real.planned, real.rows)
        simulated = run_stack(laid, sizes, PROFILES[PROFILE], acts=mode == "kvpilot")
        row = mode_row(scenario.name, mode, real, simulated)
        _say(
            f"{row.scenario}, {row.mode}: {row.real_hits} tokens found, simulated {row.simulated_hits} "
            f"({row.ratio:.3f})"
        )
        yield row


def _replay(scenario: Scenario, stack: Endpoints, mode: str) -> RealRun:
    where = where_is(stack)
    texts = TextMaker.load(where.tokenizer)
    # Texts of its own: nothing of another run can be found.
    run_id = f"a{secrets.token_hex(3)}"
    planned = plan(scenario, where.max_model_len, run_id, texts.carries_tools)
    before = asyncio.run(_emptied(stack))
    replayer, interrupted = replay_sessions(planned, where, mode, scenario.options, texts, salt=run_id)
    if interrupted:
        raise KeyboardInterrupt
    after = asyncio.run(_hits(stack))
    hits = EngineHits(after.device - before.device, after.below - before.below)
    return RealRun(planned, tuple(replayer.rows), hits)


def plan(
    scenario: Scenario, max_model_len: int, run_id: str, carries_tools: bool = False
) -> tuple[PlannedSession, ...]:
    """The calls of a scenario. Raises TraceError."""
    sessions = read_trace(find_trace(scenario.trace))
    if scenario.only:
        sessions = (session for session in sessions if session.id in scenario.only)
    laid = overlay(sessions, scenario.sessions, 0, scenario.starts_s / scenario.gap_scale)
    scale = choose_scale(
        [placed.session for placed in laid.placed], max_model_len, scenario.options, carries_tools
    )
    return plan_overlay(laid, scale, scenario.options, run_id)


async def _emptied(stack: Endpoints) -> EngineHits:
    async with lab(stack) as room:
        await room.control.set_mode("passive")
        await reset_tiers(room)
        return await room.engine_hits()


async def _hits(stack: Endpoints) -> EngineHits:
    async with lab(stack) as room:
        return await room.engine_hits()


def mode_row(scenario: str, mode: str, real: RealRun, simulated: StackOutcome) -> ModeRow:
    good = [row for row in real.rows if row.error is None]
    waited = [row.ttft_ms / 1000 for row in good if row.ttft_ms is not None]
    return ModeRow(
        scenario=scenario,
        mode=mode,
        calls=len(real.rows),
        failed=len(real.rows) - len(good),
        prompt_tokens=sum(row.prompt_tokens for row in good),
        planned_tokens=sum(row.planned_tokens for row in good),
        real_hits=sum(row.cached_tokens for row in good),
        simulated_hits=int(simulated.found.sum()),
        real_in_device=real.hits.device,
        simulated_in_device=int(simulated.in_device.sum()),
        real_ttft=float(np.mean(waited)) if waited else 0.0,
        simulated_ttft=float(simulated.ttft.mean()) if len(simulated.ttft) else 0.0,
    )


def document(rows: Sequence[ModeRow]) -> dict[str, Any]:
    """Rows with their ratios, and by scenario which mode finds more, here and there."""
    rankings = {}
    for name in dict.fromkeys(row.scenario for row in rows):
        of_mode = {row.mode: row for row in rows if row.scenario == name}
        if len(of_mode) == len(MODES):
            real = ranking({mode: of_mode[mode].real_hits for mode in MODES})
            simulated = ranking({mode: of_mode[mode].simulated_hits for mode in MODES})
            rankings[name] = {"real": real, "simulated": simulated, "agree": real == simulated}
    return {
        "model": MODEL,
        "profile": msgspec.to_builtins(PROFILES[PROFILE]),
        "rows": [{**msgspec.to_builtins(row), "ratio": round(row.ratio, 4)} for row in rows],
        "rankings": rankings,
        "agrees": all(abs(row.ratio - 1) <= CLOSE for row in rows)
        and all(r["agree"] for r in rankings.values()),
    }


def ranking(hits: dict[str, int]) -> str:
    """The mode that finds more; "same" where the difference is below a hundredth."""
    best, other = sorted(hits, key=lambda mode: -hits[mode])
    return "same" if hits[best] - hits[other] <= SAME * hits[best] else best


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def print_report(document: dict[str, Any], console: Console) -> None:
    """The document as a table for a person."""
    table = Table(title="Tokens found in cache: real stack and simulator", title_justify="left")
    table.add_column("scenario", no_wrap=True)
    table.add_column("mode", no_wrap=True)
    for name in ("calls", "found", "simulated", "ratio", "in device", "simulated", "TTFT", "simulated"):
        table.add_column(name, justify="right")
    for row in (msgspec.convert(raw, ModeRow) for raw in document["rows"]):
        table.add_row(
            row.scenario,
            row.mode,
            str(row.calls),
            f"{row.real_hits:,}",
            f"{row.simulated_hits:,}",
            f"{row.ratio:.3f}",
            f"{row.real_in_device:,}",
            f"{row.simulated_in_device:,}",
            f"{row.real_ttft:.2f} s",
            f"{row.simulated_ttft:.2f} s",
        )
        if row.failed:
            console.print(f"note: {row.scenario}, {row.mode}: {row.failed} requests failed", style="dim")
    console.print(table)
    for name, ranks in document["rankings"].items():
        verdict = "agree" if ranks["agree"] else "DISAGREE"
        console.print(
            f"{name}: finds more, real: {ranks['real']}, simulated: {ranks['simulated']} ({verdict})"
        )
