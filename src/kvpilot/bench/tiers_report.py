"""Running the tier bench from nothing to its JSON, table and plot."""

from __future__ import annotations

import asyncio
import platform
import secrets
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from kvpilot.bench.lab import BenchError, lab
from kvpilot.bench.tiers import VARIANTS, TierBench, bench_config, sizes_for
from kvpilot.config import Config
from kvpilot.stack.launch import launch, with_free_ports
from kvpilot.stack.models import kv_bytes_per_token

MEANING = {
    "recompute": "KV nowhere",
    "passive_cold": "KV on disk, read from it",
    "passive_cached": "KV on disk, in the page cache",
    "kvpilot": "KV on disk, kvpilot told that the tool has finished",
    "kvpilot_device": "the same, and the plug-in brought it into vLLM's own pool",
    "l1_hit": "KV in host memory",
    "device_hit": "KV in vLLM's own pool",
}


def bench_tiers(
    config: Config, contexts: Sequence[int], rounds: int, variants: Sequence[str]
) -> dict[str, Any]:
    """Start a stack of its own in ``config``'s state folder, measure, stop it; returns the document.

    Raises BenchError, StackError, ControlError, ValueError.
    """
    chunk = config.lmcache.chunk_size
    for context in contexts:
        if context % chunk or context < 4 * chunk:
            raise ValueError(
                f"a context of {context} tokens is not a multiple of {chunk} of at least {4 * chunk}"
            )
    settings = with_free_ports(bench_config(config, contexts, kv_bytes_per_token(config)))
    began = time.monotonic()

    def say(line: str) -> None:
        print(f"[{time.monotonic() - began:5.0f} s] {line}", file=sys.stderr, flush=True)

    with launch(settings, echo=True) as stack:

        async def run() -> dict[str, Any]:
            async with lab(stack) as room:
                sizes = sizes_for(max(contexts), chunk)
                bench = TierBench(room, f"b{secrets.token_hex(3)}", sizes, variants, say)
                await bench.prepare()
                results = [await bench.run(context, rounds) for context in contexts]
                return _document(results, rounds, await room.tier_sizes(), config, time.monotonic() - began)

        return asyncio.run(run())


def _document(
    results: list[dict[str, Any]], rounds: int, tiers: dict[str, int], config: Config, took_s: float
) -> dict[str, Any]:
    last = results[-1]
    return {
        "rows": [row for result in results for row in result["rows"]],
        "paired": last["paired"],
        "closed": last["closed"]["paired"],
        "closed_of_medians": last["closed"]["of_medians"],
        "contexts": [{k: v for k, v in result.items() if k != "rows"} for result in results],
        "tiers": tiers,
        "model": config.engine.model,
        "rounds": rounds,
        "new_tokens_at_most": 32,
        "took_s": round(took_s),
        "machine": {
            "cpus": psutil.cpu_count(),
            "memory_bytes": psutil.virtual_memory().total,
            "processor": platform.machine(),
        },
    }


def print_table(document: dict[str, Any], console: Console) -> None:
    """The document for a person."""
    for result in document["contexts"]:
        tokens = result["context"]
        table = Table(
            title=f"TTFT of the next turn, context of {tokens:,} tokens ({document['model']})",
            title_justify="left",
        )
        for name, side in (
            ("variant", "left"),
            ("what", "left"),
            ("p50", "right"),
            ("min–max", "right"),
            ("kvpilot ÷ it", "right"),
            ("n", "right"),
        ):
            table.add_column(name, justify="right" if side == "right" else "left")
        by_variant = {row["variant"]: row["ttft_ms"] for row in document["rows"] if row["context"] == tokens}
        for variant in MEANING:
            if variant not in by_variant:
                continue
            ttft = by_variant[variant]
            ratio = result["paired"].get(variant)
            table.add_row(
                variant,
                MEANING[variant],
                f"{ttft['p50']:,.0f} ms",
                f"{ttft['min']:,.0f}–{ttft['max']:,.0f}",
                "" if ratio is None else f"{ratio:.3f}",
                str(ttft["n"]),
            )
        console.print(table)
        closed = result["closed"]["paired"]
        if closed is not None:
            console.print(f"kvpilot closes {100 * closed:.0f} % of the way from passive_cached to l1_hit")
        if result["paired_device"]:
            told = ", ".join(f"{v} {spread['median']:.3f}" for v, spread in result["paired_device"].items())
            console.print(f"kvpilot_device ÷ each, medians of pairs: {told}")
        if result["discarded"]:
            console.print(f"discarded because the state was not as meant: {result['discarded']}")
    sizes = ", ".join(f"{tier} {size / 2**20:,.0f} MiB" for tier, size in document["tiers"].items())
    console.print(f"tiers: {sizes}; {document['rounds']} interleaved rounds; took {document['took_s']} s")


def plot(document: dict[str, Any], path: Path) -> None:
    """Medians with ranges, one group of bars a context. Raises BenchError without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        raise BenchError("--plot needs matplotlib: pip install 'kvpilot[bench]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    contexts = [result["context"] for result in document["contexts"]]
    order = [variant for variant in MEANING if variant in VARIANTS]
    colours = dict(
        zip(order, ("#8c2d19", "#c76b2c", "#e3b34f", "#1b7f4d", "#49b27c", "#5b7db1", "#b9c7de"), strict=True)
    )
    figure, axes = pyplot.subplots(figsize=(1.6 + 3.4 * len(contexts), 4.2), layout="constrained")
    width = 0.8 / len(order)
    for index, variant in enumerate(order):
        rows = {row["context"]: row["ttft_ms"] for row in document["rows"] if row["variant"] == variant}
        places = [i + (index - (len(order) - 1) / 2) * width for i, c in enumerate(contexts) if c in rows]
        found = [rows[c] for c in contexts if c in rows]
        middle = [ttft["p50"] for ttft in found]
        spread = [[t["p50"] - t["min"] for t in found], [t["max"] - t["p50"] for t in found]]
        bars = axes.bar(
            places,
            middle,
            width * 0.92,
            yerr=spread,
            capsize=2,
            label=variant,
            color=colours[variant],
            error_kw={"elinewidth": 0.8},
        )
        axes.bar_label(bars, [f"{value:,.0f}" for value in middle], fontsize=7, padding=2)
    axes.set_yscale("log")
    axes.margins(y=0.15)
    axes.set_xticks(range(len(contexts)), [f"{context:,} tokens" for context in contexts])
    axes.set_ylabel("TTFT, ms (log)")
    axes.set_title("Next turn of a session, by where its KV lies", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=7, frameon=False, ncols=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
