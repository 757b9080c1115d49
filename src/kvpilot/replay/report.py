"""What a replay says: totals, the JSON document, the table."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from kvpilot.replay.driver import TurnRow


def percentile(values: Sequence[float], q: float) -> float | None:
    """Linear interpolation between closest ranks; ``q`` in 0…1; None without values."""
    if not values:
        return None
    ordered = sorted(values)
    at = q * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def totals(rows: Sequence[TurnRow]) -> dict[str, Any]:
    """Over all turns that went well: TTFT, and the hit rate as cached ÷ reusable prefix tokens.

    A turn's cached tokens count up to its reusable ones: both are counts of the same prefix, but reusable is
    known to the replayer only in whole messages.
    """
    good = [row for row in rows if row.error is None]
    ttft = [row.ttft_ms for row in good if row.ttft_ms is not None]
    prompt = sum(row.prompt_tokens for row in good)
    cached = sum(row.cached_tokens for row in good)
    reusable = sum(min(row.reusable_tokens, row.prompt_tokens) for row in good)
    hit = sum(min(row.cached_tokens, row.reusable_tokens) for row in good)
    returning = [row.ttft_ms for row in good if row.turn > 0 and row.ttft_ms is not None]
    return {
        "requests": len(rows),
        "failed": len(rows) - len(good),
        "ttft_ms": _spread(ttft),
        "returning_ttft_ms": _spread(returning),
        "e2e_ms": _spread([row.e2e_ms for row in good if row.e2e_ms is not None]),
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "reusable_tokens": reusable,
        "hit_rate": round(hit / reusable, 4) if reusable else None,
        "cached_share_of_prompt": round(cached / prompt, 4) if prompt else None,
    }


def lengths(rows: Sequence[TurnRow]) -> dict[str, Any]:
    """Lengths of the prompts as the engine counted them."""
    tokens = [row.prompt_tokens for row in rows if row.prompt_tokens]
    if not tokens:
        return {}
    return {"median": round(statistics.median(tokens)), "largest": max(tokens), "smallest": min(tokens)}


def _spread(values: Sequence[float]) -> dict[str, float | None]:
    def rounded(value: float | None) -> float | None:
        return None if value is None else round(value, 1)

    return {
        "p50": rounded(percentile(values, 0.5)),
        "p90": rounded(percentile(values, 0.9)),
        "max": rounded(max(values, default=None)),
    }


def print_report(document: dict[str, Any], console: Console) -> None:
    """The document as tables for a person."""
    total, turns = document["totals"], document["turns"]
    by_session: dict[str, list[dict[str, Any]]] = {}
    for row in turns:
        by_session.setdefault(row["session"], []).append(row)
    table = Table(
        title=f"replay of {', '.join(document['traces'])} ({document['mode']})", title_justify="left"
    )
    for name in ("session", "turns", "agents", "prompt max", "cached", "TTFT p50", "TTFT p90", "failed"):
        table.add_column(name, justify="left" if name == "session" else "right", no_wrap=name == "session")
    for session, rows in by_session.items():
        ttft = [row["ttft_ms"] for row in rows if row["ttft_ms"] is not None]
        prompt = sum(row["prompt_tokens"] for row in rows)
        cached = sum(row["cached_tokens"] for row in rows)
        table.add_row(
            session,
            str(len(rows)),
            str(len({row["agent"] for row in rows})),
            str(max(row["prompt_tokens"] for row in rows)),
            f"{100 * cached / prompt:.0f} %" if prompt else "–",
            milliseconds(percentile(ttft, 0.5)),
            milliseconds(percentile(ttft, 0.9)),
            str(sum(row["error"] is not None for row in rows)),
        )
    console.print(table)
    rate = total["hit_rate"]
    console.print(
        f"{total['requests']} requests, {total['failed']} failed; TTFT p50 "
        f"{milliseconds(total['ttft_ms']['p50'])}, p90 {milliseconds(total['ttft_ms']['p90'])}; hit rate "
        f"{'–' if rate is None else f'{100 * rate:.1f} %'} of what an infinite cache would hit"
    )
    console.print(f"lengths scaled by {document['scale']}, pauses by {document['gap_scale']}")
    for tier, held in document["bytes_held"].items():
        capacity = document["tiers"].get(tier, 0)
        of = f" of {mebibytes(capacity)}" if capacity else ""
        console.print(
            f"{tier} tier{of}: {mebibytes(held['mean'])} held on average, {mebibytes(held['peak'])} at most"
        )
    for row in document["compactions"]:
        gone = row["gone_after_s"]
        console.print(
            f"compaction of {row['session']} before turn {row['turn']}: {row['superseded_chunks']} chunks superseded, "
            + (f"gone from every tier after {gone} s" if gone is not None else "not gone while watched")
            + f"; {row['kept_chunks']} kept, the next call found {row['cached_tokens']} tokens cached"
        )
    for note in document["notes"]:
        console.print(f"note: {note}", style="dim")


def milliseconds(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f} ms"


def mebibytes(value: float) -> str:
    return f"{value / 2**20:,.0f} MiB"
