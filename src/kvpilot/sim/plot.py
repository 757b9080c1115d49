"""The rows of a comparison as a picture, a panel for each source: along pressure the hit rate, or with several tiers
the mean time to first token; shaded where not even the optimum is better than LRU by what counts as a gap."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kvpilot.sim.policies import BELADY, CLAIRVOYANT, LRU, POLICIES

TELLS_HINTS = {name for name, entry in POLICIES.items() if entry.uses_hints}


def plot(document: dict[str, Any], path: Path) -> None:
    """Writes the picture (its ending says which kind). Raises ValueError without matplotlib or without rows."""
    try:
        import matplotlib
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install 'kvpilot[bench]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = document["rows"]
    if not rows:
        raise ValueError("--plot: there is nothing to draw, every capacity was skipped")
    sources = list(dict.fromkeys(row["source"] for row in rows))
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    colours = (
        {name: f"C{index % 10}" for index, name in enumerate(policies)}
        | dict.fromkeys((BELADY, CLAIRVOYANT), "black")
        | {LRU: "0.4"}
    )
    value, name = (
        ("ttft_mean", "mean time to first token, s") if "ttft_mean" in rows[0] else ("hit_rate", "hit rate")
    )
    columns = min(3, len(sources))
    lines = -(-len(sources) // columns)
    figure, panels = pyplot.subplots(
        lines, columns, figsize=(1 + 4 * columns, 1 + 3 * lines), squeeze=False, layout="constrained"
    )
    for panel in panels.flat[len(sources) :]:
        panel.set_visible(False)
    for panel, source in zip(panels.flat, sources, strict=False):
        for policy, hints in dict.fromkeys((row["policy"], row["hints"]) for row in rows):
            if policy not in TELLS_HINTS and hints != rows[0]["hints"]:
                continue
            own = [r for r in rows if (r["source"], r["policy"], r["hints"]) == (source, policy, hints)]
            own.sort(key=lambda row: row["pressure"])
            panel.plot(
                [row["pressure"] for row in own],
                [row[value] for row in own],
                marker=".",
                color=colours[policy],
                linestyle="--" if hints == "none" and policy in TELLS_HINTS else "-",
                label=f"{policy}, {hints}" if policy in TELLS_HINTS else policy,
            )
        panel.set_title(source, fontsize=10)
        panel.set_xlabel("pressure")
        panel.set_ylabel(name)
        _shade_where_nothing_helps(panel, [row for row in rows if row["source"] == source])
        panel.spines[["top", "right"]].set_visible(False)
    handles, labels = panels.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize=8, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _shade_where_nothing_helps(panel: Any, rows: list[dict[str, Any]]) -> None:
    """A band at each pressure at which there is no gap."""
    for pressure in {row["pressure"] for row in rows}:
        if all(row["gap_closed"] is None for row in rows if row["pressure"] == pressure):
            panel.axvspan(pressure / 1.15, pressure * 1.15, color="0.9", zorder=0)
