"""The whole demo: stacks started and stopped, rounds interleaved, numbers written and shown."""

from __future__ import annotations

import asyncio
import secrets
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kvpilot.bench.lab import Lab, lab
from kvpilot.bench.reset import reset_tiers
from kvpilot.config import Config
from kvpilot.demo.answers import ANSWER_KEYS, compare_answers
from kvpilot.demo.rounds import Keys, Round, Turn, Workload
from kvpilot.demo.tools import Toolbox, small_project
from kvpilot.replay.report import mebibytes, milliseconds, percentile
from kvpilot.stack.launch import launch, with_free_ports
from kvpilot.stack.models import kv_bytes_per_token

ORDER = ("passive", "kvpilot", "kvpilot", "passive")
"""A B B A: what drifts with time hits both modes alike."""
MEASURED_MODEL = "m16k"
ANSWERING_MODEL = "smollm2"

Played = list[tuple[str, list[Turn]]]


class Narrator:
    """Progress on stderr, with the time since the demo began."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def __call__(self, line: str) -> None:
        print(f"[{self.seconds:4.0f} s] {line}", file=sys.stderr, flush=True)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began


Publish = Callable[[dict[str, Any]], None]


def run_demo(
    state: Path, publish: Publish, order: Sequence[str] = ORDER, answers: bool = True
) -> dict[str, Any]:
    """Run it in ``state`` (a folder of its own) and return the document of ``out/demo.json``.

    ``publish`` gets it too, and before that, after every stage, what is known so far (``complete`` is false).
    Raises BenchError, ControlError, StackError.
    """
    say, load = Narrator(), Workload()
    with small_project() as project:
        say(f"starting vLLM, LMCache and kvpilot with small tiers (model {MEASURED_MODEL})")
        with launch(_measured_config(state / "measured", load, len(order)), echo=True) as stack:

            async def measure() -> dict[str, Any]:
                async with lab(stack) as room:
                    return await _measure(room, project, load, order, publish, say)

            document = asyncio.run(measure())
        if answers:
            say(f"starting again with a real small model ({ANSWERING_MODEL}) to compare answers")
            with launch(_answering_config(state / "answering"), echo=True) as stack:

                async def compare() -> dict[str, Any]:
                    async with lab(stack) as room:
                        toolbox = Toolbox(project, room.texts)
                        return await compare_answers(room, toolbox, f"d{secrets.token_hex(2)}", say)

                document |= asyncio.run(compare())
    document["took_s"] = round(say.seconds)
    publish(document)
    return document


async def _measure(
    room: Lab, project: Path, load: Workload, order: Sequence[str], publish: Publish, say: Narrator
) -> dict[str, Any]:
    """The document of the rounds, published after each of them."""
    tiers = await room.tier_sizes()
    document: dict[str, Any] = {"tiers": tiers}
    publish({"complete": False, **document})  # Now, not minutes later, it turns out if it cannot be written.
    async for played in _rounds(room, project, load, order, say):
        document = summarise(played, tiers)
        document["workload"] = {name: getattr(load, name) for name in load.__slots__}
        publish({"complete": False, **document})
    return document


async def _rounds(
    room: Lab, project: Path, load: Workload, order: Sequence[str], say: Narrator
) -> AsyncIterator[Played]:
    """All rounds played so far, after each one."""
    toolbox = Toolbox(project, room.texts)
    await room.gateway.chat([{"role": "user", "content": "warm up"}], 2, api_key=Keys.of_round(0).agents)
    played: Played = []
    for number, mode in enumerate(order):
        await reset_tiers(room)
        await room.control.set_mode(mode)
        say(f"round {number + 1} of {len(order)}: {mode}, tiers empty")
        run_id, keys = f"d{secrets.token_hex(2)}-{number + 1}", Keys.of_round(number + 1)
        turns = await Round(room, toolbox, load, run_id, keys, lambda line: say("  " + line)).play()
        played.append((mode, turns))
        yield played


def _chunk_gb(model: str, config: Config) -> float:
    kv_bytes = kv_bytes_per_token(config.with_overrides(engine={"model": model}))
    return config.lmcache.chunk_size * kv_bytes / 2**30


def _measured_config(state: Path, load: Workload, rounds: int) -> Config:
    config = Config()
    chunk_gb = _chunk_gb(MEASURED_MODEL, config)
    keys = [Keys.of_round(number) for number in range(rounds + 1)]
    return with_free_ports(
        config.with_overrides(
            tenants={key: key for pair in keys for key in (pair.agents, pair.others)},
            engine={"model": MEASURED_MODEL, "max_model_len": load.max_model_len, "dev": True},
            lmcache={"host_gb": load.host_chunks * chunk_gb, "disk_gb": load.disk_chunks * chunk_gb},
            state={"dir": str(state)},
        )
    )


def _answering_config(state: Path) -> Config:
    config = Config()
    chunk_gb = _chunk_gb(ANSWERING_MODEL, config)
    return with_free_ports(
        config.with_overrides(
            tenants={key: key for key in ANSWER_KEYS.values()},
            engine={"model": ANSWERING_MODEL, "max_model_len": 2048, "dev": True},
            lmcache={"host_gb": 32 * chunk_gb, "disk_gb": 64 * chunk_gb},
            state={"dir": str(state)},
        )
    )


def summarise(played: Played, tiers: dict[str, int]) -> dict[str, Any]:
    """The numbers of the rounds: each mode's returning turns, and the ratio over pairs of the same turn."""
    by_mode: dict[str, list[list[Turn]]] = {"passive": [], "kvpilot": []}
    for mode, turns in played:
        by_mode[mode].append(turns)
    pairs = [
        (before, after)
        for passive, kvpilot in zip(by_mode["passive"], by_mode["kvpilot"], strict=False)
        for before, after in zip(passive, kvpilot, strict=True)
        if before.returning
    ]
    ratios = [after.ttft_ms / before.ttft_ms for before, after in pairs]
    return {
        "returning_turns": len(pairs),
        "passive": _mode([turn for turns in by_mode["passive"] for turn in turns if turn.returning]),
        "kvpilot": _mode([turn for turns in by_mode["kvpilot"] for turn in turns if turn.returning]),
        "paired_ratio_ttft": round(statistics.median(ratios), 4) if ratios else None,
        "paired_ratio_quartiles": [round(percentile(ratios, q) or 0.0, 4) for q in (0.25, 0.75)],
        "same_agent_replies": all(before.reply == after.reply for before, after in pairs),
        "order": [mode for mode, _ in played],
        "tiers": tiers,
        "turns": [
            {
                "round": number + 1,
                "mode": mode,
                "agent": turn.agent,
                "turn": turn.turn,
                "returning": turn.returning,
                "prompt_tokens": turn.prompt_tokens,
                "cached_tokens": turn.cached_tokens,
                "ttft_ms": round(turn.ttft_ms, 1),
            }
            for number, (mode, turns) in enumerate(played)
            for turn in turns
        ],
    }


def _mode(turns: Sequence[Turn]) -> dict[str, Any]:
    ttft = [turn.ttft_ms for turn in turns]
    prompt = sum(turn.prompt_tokens for turn in turns)
    return {
        "ttft_ms": {"p50": _round(percentile(ttft, 0.5)), "p90": _round(percentile(ttft, 0.9))},
        "cached_share": round(sum(turn.cached_tokens for turn in turns) / prompt, 4) if prompt else None,
        "turns": len(turns),
    }


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


def print_result(document: dict[str, Any], console: Console, written: Path) -> None:
    """The result for somebody who sees this for the first time."""
    console.print()
    table = Table(title="Three coding agents coming back from their tools", title_justify="left")
    table.add_column("")
    table.add_column("without (passive)", justify="right")
    table.add_column("with kvpilot", justify="right")
    passive, kvpilot = document["passive"], document["kvpilot"]
    table.add_row("returning turns measured", str(passive["turns"]), str(kvpilot["turns"]))
    for name, key in (("wait for the first token, median", "p50"), ("… in nine of ten turns below", "p90")):
        table.add_row(name, milliseconds(passive["ttft_ms"][key]), milliseconds(kvpilot["ttft_ms"][key]))
    table.add_row(
        "share of the prompt found in cache",
        f"{100 * passive['cached_share']:.0f} %",
        f"{100 * kvpilot['cached_share']:.0f} %",
    )
    console.print(table)
    ratio = document["paired_ratio_ttft"]
    low, high = document["paired_ratio_quartiles"]
    console.print(
        f"The same turn with kvpilot takes {ratio:.2f} × the time to its first token "
        f"(median of {document['returning_turns']} pairs; middle half {low:.2f}–{high:.2f})."
    )
    sizes = ", ".join(f"{tier} {mebibytes(size)}" for tier, size in document["tiers"].items())
    console.print(f"Both modes: same requests, same tiers ({sizes}), rounds in turn {document['order']}.")
    console.print(
        "Why: other tenants' finished jobs fill the tiers. Without kvpilot they push out the agents that wait "
        "for a tool;\nwith it, what ended is dropped at once, and what comes back is fetched before it is asked "
        "for."
    )
    if "same_answers" in document:
        verdict = "identical" if document["same_answers"] else "DIFFERENT"
        console.print(
            f"{document['answers_compared']} answers of a real model (SmolLM2), its KV demoted, prefetched and "
            f"evicted between turns: tokens {verdict}."
        )
        for question, answer in zip(("first", "second", "third"), document["answers"], strict=False):
            console.print(f"  {question}: {answer[:90]!r}", style="dim")
    console.print(
        "\nNext: `kvpilot up` starts the stack for your own agents; `kvpilot bench tiers` shows what each tier "
        "is worth;\n`kvpilot replay` plays recorded agents. "
        f"The numbers above are in {written}; how it works: README.md."
    )
