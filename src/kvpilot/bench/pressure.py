"""``kvpilot bench pressure``: recorded agents on a real vLLM whose device pool is too small for them.

Ten sessions at once (one that ends is followed by another), played call by call on vLLM's own engine with its own DRAM
tier below the pool, no cache layer and no gateway: what differs is who decides which blocks are given away.

* ``kvpilot``  the plug-in, in the pool and in DRAM, told sessions, parents, compactions and ends with the requests
* ``lru``      vLLM's own order in both
* ``arc``      vLLM's own in the pool, its ARC in DRAM

The pool is cut to *pressure*: a first run with room for everything measures the working set of these very calls. All
policies play the same calls, one after the other, in turns.
"""

from __future__ import annotations

import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import IO, Any

import msgspec
from rich.console import Console
from rich.table import Table

from kvpilot.bench.lab import BenchError
from kvpilot.bench.stats import interleaved
from kvpilot.config import Config
from kvpilot.engine.played import Call, Outcome, Played, Run
from kvpilot.replay.plan import PlannedCall, PlannedSession, ReplayOptions, plan_overlay
from kvpilot.replay.report import percentile
from kvpilot.replay.text import TextMaker
from kvpilot.stack.engine_env import engine_environment, find_engine_python
from kvpilot.stack.models import ensure_model
from kvpilot.stack.plugin_folder import make_plugin_folder
from kvpilot.traces import find_trace, overlay, read_trace

POLICIES = ("kvpilot", "lru", "arc")
PER_LANE = 2
"""Sessions drawn for a lane."""
ROOMY = 4096
"""Blocks of the pool that measures the working set: nothing is given away there."""

Say = Callable[[str], None]


class PressureOptions(msgspec.Struct, frozen=True):
    """``context``: the longest one in tokens. Recorded lengths are scaled by one factor, with which the longest context
    of the median session fills it; a session that grows beyond it ends there, so that one odd session does not make all
    others short. ``dram``: size of the DRAM tier ÷ the device pool's; ``rounds``: each draws its own sessions;
    ``lanes``: sessions at once, with ``calls`` calls in each lane; ``starts_s``: in so many seconds all lanes begin."""

    pressures: tuple[float, ...] = (1.0, 1.5, 2.0, 4.0)
    rounds: int = 3
    lanes: int = 10
    calls: int = 14
    seed: int = 0
    context: int = 3072
    block_tokens: int = 32
    dram: float = 1.0
    starts_s: float = 2.0
    replay: ReplayOptions = ReplayOptions(gap_scale=0.2, max_gap_s=2.0, max_reply=8)


def bench_pressure(
    config: Config, model: str, traces: Sequence[str], options: PressureOptions, say: Say
) -> dict[str, Any]:
    """Returns the document. Raises BenchError, StackError, TraceError, TextError, ValueError."""
    paths = {name: find_trace(name) for name in traces}
    python = find_engine_python(config)
    folder = ensure_model(model, python)
    texts = TextMaker.load(folder)
    found = []
    for name, path in paths.items():
        rounds = []
        for number in range(options.rounds):
            planned, scale = _plan(path, options, options.seed + number, texts)
            with _player(python, folder) as play:
                rounds.append(_round(name, number, planned, scale, options, play, say))
        found.append({"trace": name, "rounds": rounds, "pressures": summarise(rounds, options.pressures)})
    return {"model": model, "options": msgspec.to_builtins(options), "traces": found}


def _plan(
    path: Path, options: PressureOptions, seed: int, texts: TextMaker
) -> tuple[list[list[PlannedSession]], float]:
    """By lane, sessions at their scaled lengths, one after the other; and the factor."""
    laid = overlay(read_trace(path, texts.count), options.lanes * PER_LANE, seed, 1.0)
    whole = plan_overlay(laid, 1.0, options.replay, f"seed{seed}")
    middle = statistics.median(max(map(_length, session.calls), default=1) for session in whole)
    scale = min(1.0, round(options.context / middle, 5))
    planned = [
        _first_calls(session, options.context)
        for session in plan_overlay(laid, scale, options.replay, f"seed{seed}")
    ]
    return [_at_most(planned[lane :: options.lanes], options.calls) for lane in range(options.lanes)], scale


def _length(call: PlannedCall) -> int:
    return call.hidden_tok + sum(message.tok for message in call.prompt) + call.max_tokens


def _first_calls(session: PlannedSession, context: int) -> PlannedSession:
    """The session up to its first call that is too long."""
    calls = takewhile(lambda call: _length(call) <= context, session.calls)
    return msgspec.structs.replace(session, calls=tuple(calls))


def _at_most(sessions: Sequence[PlannedSession], calls: int) -> list[PlannedSession]:
    """The sessions until so many calls; the last one may be cut short."""
    found = []
    for session in sessions:
        if calls and session.calls:
            found.append(msgspec.structs.replace(session, calls=session.calls[:calls]))
            calls -= len(found[-1].calls)
    return found


def lanes_of(lanes: Sequence[Sequence[PlannedSession]], starts_s: float) -> tuple[Played, ...]:
    """What the engine plays: in every lane one session after the other, the lanes' first ones evenly in ``starts_s``
    seconds."""
    out: list[Played] = []
    for number, lane in enumerate(lanes):
        for place, session in enumerate(lane):
            after = None if place == 0 else len(out) - 1
            start = starts_s * number / len(lanes) if place == 0 else 0.0
            out.append(msgspec.structs.replace(played(session), start_s=start, after=after))
    return tuple(out)


def played(session: PlannedSession) -> Played:
    """A planned session as the engine plays it."""
    before: dict[str, bool] = {}
    last = {call.agent: call.index for call in session.calls}
    calls = []
    for call in session.calls:
        hidden = [(call.hidden_id, call.hidden_tok)] if call.hidden_tok else []
        calls.append(
            Call(
                session=session.session_id(call.agent),
                parent=session.parent_id(call.agent),
                waits=tuple((wait.call, wait.gap_s) for wait in call.waits),
                pieces=(*hidden, *((message.id, message.tok) for message in call.prompt)),
                reply=call.reply.id,
                max_tokens=call.max_tokens,
                last=call.index == last[call.agent],
                supersedes=before.get(call.agent, False),
            )
        )
        before[call.agent] = call.summarises
    return Played(0.0, tuple(calls))


def _round(
    trace: str,
    number: int,
    planned: Sequence[Sequence[PlannedSession]],
    scale: float,
    options: PressureOptions,
    play: Callable[[Run], Outcome],
    say: Say,
) -> dict[str, Any]:
    base = Run(
        "lru",
        ROOMY,
        0,
        options.block_tokens,
        options.context + options.block_tokens,
        lanes_of(planned, options.starts_s),
    )
    roomy = play(base)
    say(
        f"{trace}, round {number + 1}: {len(roomy.rows)} calls, lengths × {scale}, working set "
        f"{roomy.working_set:.0f} blocks, {roomy.took_s:.0f} s with room for everything"
    )
    # vLLM wants room for one longest context.
    least = -(-base.max_model_len // options.block_tokens)
    runs = []
    for place, pressure in enumerate(options.pressures):
        blocks = max(least, int(roomy.working_set / pressure))
        for policy in interleaved(POLICIES, number + place):
            outcome = play(
                msgspec.structs.replace(
                    base, policy=policy, blocks=blocks, dram_blocks=int(options.dram * blocks)
                )
            )
            reached = round(roomy.working_set / blocks, 2)
            row = {
                "pressure": pressure,
                "reached": reached,
                "policy": policy,
                "blocks": blocks,
                **totals(outcome),
            }
            runs.append(row)
            say(
                f"{trace}, round {number + 1}, pressure {pressure:g}, {policy}: hit rate {row['hit_rate']:.3f}, "
                f"TTFT {row['ttft_ms']['p50']:.0f} and {row['ttft_ms']['p90']:.0f} ms"
            )
    return {
        "scale": scale,
        "calls": len(roomy.rows),
        "longest_prompt": max(row.prompt for row in roomy.rows),
        "working_set_blocks": round(roomy.working_set, 1),
        "roomy": totals(roomy),
        "runs": runs,
    }


def totals(outcome: Outcome) -> dict[str, Any]:
    """Hit rate: tokens found ÷ tokens an infinite cache would find. TTFT from the moment a call is due."""
    rows = outcome.rows
    reusable = sum(row.reusable for row in rows)
    waited = [1000 * row.ttft_s for row in rows]
    return {
        "hit_rate": round(sum(min(row.cached, row.reusable) for row in rows) / max(1, reusable), 4),
        "ttft_ms": {
            "p50": round(percentile(waited, 0.5) or 0.0, 1),
            "p90": round(percentile(waited, 0.9) or 0.0, 1),
        },
        "prompt_tokens": sum(row.prompt for row in rows),
        "reusable_tokens": reusable,
        "took_s": round(outcome.took_s, 1),
    }


def summarise(rounds: Sequence[dict[str, Any]], pressures: Sequence[float]) -> list[dict[str, Any]]:
    """By pressure: medians over the rounds with their range, and kvpilot against the others, paired by round."""
    out = []
    for pressure in pressures:
        by_policy = {
            policy: [
                run
                for one in rounds
                for run in one["runs"]
                if (run["pressure"], run["policy"]) == (pressure, policy)
            ]
            for policy in POLICIES
        }
        ours = by_policy["kvpilot"]
        against = {}
        for other in POLICIES[1:]:
            pairs = list(zip(ours, by_policy[other], strict=True))
            gains = [a["hit_rate"] - b["hit_rate"] for a, b in pairs]
            against[other] = {
                "hit_rate": _spread(gains, 4),
                "ttft_p50": _spread([a["ttft_ms"]["p50"] / b["ttft_ms"]["p50"] for a, b in pairs], 3),
                "ttft_p90": _spread([a["ttft_ms"]["p90"] / b["ttft_ms"]["p90"] for a, b in pairs], 3),
                "verdict": verdict(gains),
            }
        out.append(
            {
                "pressure": pressure,
                "reached": _spread([run["reached"] for run in ours], 2),
                "blocks": [run["blocks"] for run in ours],
                "policies": {
                    policy: {
                        "hit_rate": _spread([run["hit_rate"] for run in runs], 4),
                        "ttft_p50_ms": _spread([run["ttft_ms"]["p50"] for run in runs], 1),
                        "ttft_p90_ms": _spread([run["ttft_ms"]["p90"] for run in runs], 1),
                    }
                    for policy, runs in by_policy.items()
                },
                "kvpilot_against": against,
            }
        )
    return out


def verdict(gains: Sequence[float]) -> str:
    """``gain`` or ``loss`` where every round says so, by more than a hundredth in the median; else ``neutral``."""
    middle = statistics.median(gains)
    if abs(middle) <= 0.01 or min(gains) * max(gains) <= 0:
        return "neutral"
    return "gain" if middle > 0 else "loss"


def _spread(values: Sequence[float], digits: int) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), digits),
        "min": round(min(values), digits),
        "max": round(max(values), digits),
    }


@contextmanager
def _player(python: Path, model: str) -> Iterator[Callable[[Run], Outcome]]:
    """A process of the engine's environment that plays runs one after the other. Raises BenchError."""
    with tempfile.TemporaryDirectory(prefix="kvpilot-pressure-") as folder, tempfile.TemporaryFile() as said:
        plugin = make_plugin_folder(Path(folder) / "engine-plugin")
        child = subprocess.Popen(
            [str(python), "-m", "kvpilot.engine.played", model],
            env={**engine_environment(), "PYTHONPATH": str(plugin), "KVPILOT": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
        )
        assert child.stdin is not None and child.stdout is not None
        asked, answers = child.stdin, child.stdout

        def play(run: Run) -> Outcome:
            try:
                asked.write(msgspec.json.encode(run) + b"\n")
                asked.flush()
            except BrokenPipeError:
                raise BenchError(f"the engine ended: {_last_line(said)}") from None
            if not (line := answers.readline()):
                raise BenchError(f"the engine ended: {_last_line(said)}")
            return msgspec.json.decode(line, type=Outcome)

        try:
            yield play
        finally:
            child.kill()
            child.wait()


def _last_line(said: IO[bytes]) -> str:
    said.seek(0)
    lines = said.read().decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "no reason given")


def print_report(document: dict[str, Any], console: Console) -> None:
    """The document as tables for a person."""
    for found in document["traces"]:
        sizes = ", ".join(f"{one['working_set_blocks']:.0f}" for one in found["rounds"])
        table = Table(title=f"{found['trace']} (working sets of {sizes} blocks)", title_justify="left")
        for name in (
            "pressure",
            "policy",
            "hit rate",
            "TTFT p50",
            "TTFT p90",
            "kvpilot: hits",
            "p50 ×",
            "p90 ×",
            "",
        ):
            table.add_column(name, justify="left" if name in ("policy", "") else "right")
        for row in found["pressures"]:
            for policy, seen in row["policies"].items():
                against = row["kvpilot_against"].get(policy)
                table.add_row(
                    f"{row['reached']['median']:g}",
                    policy,
                    _shown(seen["hit_rate"], 3),
                    _shown(seen["ttft_p50_ms"], 0),
                    _shown(seen["ttft_p90_ms"], 0),
                    *(_shown(against[k], 3) if against else "" for k in ("hit_rate", "ttft_p50", "ttft_p90")),
                    against["verdict"] if against else "",
                )
        console.print(table)


def _shown(spread: dict[str, float], digits: int) -> str:
    return f"{spread['median']:.{digits}f} ({spread['min']:.{digits}f}–{spread['max']:.{digits}f})"
