"""``kvpilot plan-capacity``: which sizes of tiers keep the time to first token below a target, and what they cost.

More room is taken never to make it longer (nearly so for every policy here). So of the sizes that are offered those are
looked for of which none may be smaller: cheapest first, and whatever is known to miss, or to meet with less, is not
simulated.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from kvpilot.domain import Tier
from kvpilot.replay.plan import Hints
from kvpilot.sim.compare import source_facts
from kvpilot.sim.hardware import Hardware
from kvpilot.sim.one_tier import Scenario, scenario_of
from kvpilot.sim.policies import TIERED
from kvpilot.traces import read_trace, trace_name

GB = 1e9
OFFERED = {Tier.DEVICE: (0.25, 0.5, 1.0, 2.0), Tier.HOST: (0.5, 1.0, 2.0, 4.0), Tier.DISK: (0.0, 2.0, 8.0)}
"""Sizes to choose from where none are given, in working sets. A device has to hold the largest context twice."""


class Request(msgspec.Struct, frozen=True):
    """What is asked. ``gb``: by tier, the sizes to choose from (default: ``OFFERED``); ``prices`` per GB, by tier
    (default: the profile's); ``answers``: at most."""

    hardware: Hardware
    ttft_p90_s: float
    policy: str = "kvpilot"
    hints: Hints = Hints.NONE
    gb: Mapping[Tier, Sequence[float]] = {}
    prices: Mapping[Tier, float] = {}
    answers: int = 3
    sessions: int | None = 120
    seed: int = 1
    window_s: float | None = None


class Sizes(msgspec.Struct, frozen=True):
    """One choice that was simulated: GB by tier, fast to slow; times in seconds, the worst of all traces."""

    gb: dict[str, float]
    price: float
    ttft_mean: float
    ttft_p90: float
    meets: bool


def plan_capacity(paths: Sequence[Path], asked: Request, tell: Callable[[str], None]) -> dict[str, Any]:
    """The document: ``answers`` (cheapest first) and all ``simulated``. Each trace has to meet the target by itself.

    Raises TraceError, and ValueError where a size or the policy cannot be.
    """
    if asked.policy not in TIERED:
        raise ValueError(f"--policy {asked.policy}: with several tiers there are {', '.join(TIERED)}")
    scenarios: dict[str, Scenario] = {}
    for path in paths:
        source = trace_name(path)
        tell(f"{source}: reading")
        scenarios[source] = scenario_of(list(read_trace(path)), asked.sessions, asked.seed, asked.window_s)
    prices = {tier: asked.prices.get(tier, price) for tier, price in asked.hardware.prices.items()}
    choices = list(itertools.product(*_offered(asked, scenarios.values())))
    simulated: list[Sizes] = []

    def meets(sizes: tuple[float, ...]) -> bool:
        gb = dict(zip(prices, sizes, strict=True))
        times = [_times(scenario, asked, gb) for scenario in scenarios.values()]
        mean, p90 = (max(values) for values in zip(*times, strict=True))
        found = Sizes(
            gb={tier.value: size for tier, size in gb.items()},
            price=_price(sizes, prices),
            ttft_mean=mean,
            ttft_p90=p90,
            meets=p90 <= asked.ttft_p90_s,
        )
        simulated.append(found)
        tell(
            f"{_in_words(found)}: p90 {p90:.3f} s, {'meets' if found.meets else 'misses'} {asked.ttft_p90_s:g} s"
        )
        return found.meets

    found = smallest(choices, lambda sizes: _price(sizes, prices), meets)
    answers = set(itertools.islice(found, asked.answers))
    return {
        "profile": msgspec.to_builtins(asked.hardware),
        "policy": asked.policy,
        "hints": asked.hints.value,
        "ttft_p90_target": asked.ttft_p90_s,
        "seed": asked.seed,
        "prices_per_gb": {tier.value: price for tier, price in prices.items()},
        "sources": [source_facts(source, scenario) for source, scenario in scenarios.items()],
        "offered": len(choices),
        "answers": [msgspec.to_builtins(s) for s in _cheapest(simulated) if tuple(s.gb.values()) in answers],
        "simulated": [msgspec.to_builtins(s) for s in _cheapest(simulated)],
    }


def smallest(
    choices: Iterable[tuple[float, ...]],
    price: Callable[[tuple[float, ...]], float],
    meets: Callable[[tuple[float, ...]], bool],
) -> Iterator[tuple[float, ...]]:
    """The choices that meet, of which no other one that meets is nowhere larger; cheapest first.

    ``meets`` is asked as seldom as that can be told: it is taken never to be lost with more.
    """
    choices = list(choices)
    known: dict[tuple[float, ...], bool] = {}

    def misses(choice: tuple[float, ...]) -> bool:
        if choice not in known:
            known[choice] = meets(choice)
        return not known[choice]

    found: list[tuple[float, ...]] = []
    # Whatever is nowhere larger comes first: it costs no more.
    for choice in sorted(choices, key=lambda choice: (price(choice), choice)):
        if any(_within(other, choice) for other in found):
            continue
        # First what has most of the slower tiers: where that misses, nothing does with less of them.
        tried = (max(o for o in choices if o[:k] == choice[:k]) for k in range(1, len(choice) + 1))
        if any(not met and _within(choice, other) for other, met in known.items()) or any(map(misses, tried)):
            continue
        found.append(choice)
        yield choice


def _within(small: tuple[float, ...], large: tuple[float, ...]) -> bool:
    """Whether ``small`` is nowhere larger than ``large``."""
    return all(a <= b for a, b in zip(small, large, strict=True))


def _offered(asked: Request, scenarios: Iterable[Scenario]) -> list[list[float]]:
    """GB by tier, fast to slow, ascending. Raises ValueError where no device holds the largest context twice."""
    chunk_bytes = {s: s.workload.chunk_tokens * asked.hardware.bytes_per_token for s in scenarios}
    working_set = max(s.working_set * size for s, size in chunk_bytes.items()) / GB
    least = max(2 * s.workload.largest_context * size for s, size in chunk_bytes.items()) / GB
    offered = []
    for tier in asked.hardware.prices:
        default = [float(f"{share * working_set:.3g}") for share in OFFERED[tier]]
        sizes = sorted({*(asked.gb.get(tier) or default)})
        if tier is Tier.DEVICE:
            fit = [size for size in sizes if size >= least]
            if not fit and tier in asked.gb:
                raise ValueError(
                    f"--device-gb: the largest context has to fit twice: give {least:.1f} or more"
                )
            sizes = fit or [float(f"{1.01 * least:.3g}")]
        offered.append(sizes)
    return offered


def _times(scenario: Scenario, asked: Request, gb: Mapping[Tier, float]) -> tuple[float, float]:
    """Mean and 90th percentile of the time to first token, seconds."""
    chunk_bytes = scenario.workload.chunk_tokens * asked.hardware.bytes_per_token
    device = int(gb[Tier.DEVICE] * GB / chunk_bytes)
    stores = tuple(
        msgspec.structs.replace(store, size=gb[store.tier] * GB / chunk_bytes / device)
        for store in asked.hardware.stores
    )
    hardware = msgspec.structs.replace(asked.hardware, stores=stores)
    ttft = TIERED[asked.policy].run(scenario, hardware, device, asked.hints).ttft
    return float(ttft.mean()), float(np.percentile(ttft, 90))


def _price(sizes: Sequence[float], prices: Mapping[Tier, float]) -> float:
    return sum(size * price for size, price in zip(sizes, prices.values(), strict=True))


def _cheapest(found: Iterable[Sizes]) -> list[Sizes]:
    return sorted(found, key=lambda sizes: sizes.price)


def _in_words(found: Sizes) -> str:
    return ", ".join(f"{tier} {size:g} GB" for tier, size in found.gb.items())


def print_answers(document: dict[str, Any], console: Console) -> None:
    """What meets the target, cheapest first; where nothing does, what comes nearest."""
    target = document["ttft_p90_target"]
    answers = [msgspec.convert(row, Sizes) for row in document["answers"]]
    rows, title = answers, f"Sizes with TTFT p90 ≤ {target:g} s, cheapest first"
    if not answers:
        simulated = [msgspec.convert(row, Sizes) for row in document["simulated"]]
        rows = sorted(simulated, key=lambda sizes: (sizes.ttft_p90, sizes.price))[:3]
        title = f"Nothing offered has TTFT p90 ≤ {target:g} s; nearest"
    table = Table(
        title=f"{title}: {document['policy']}, hints {document['hints']}, {document['profile']['name']}"
    )
    for tier in document["prices_per_gb"]:
        table.add_column(f"{tier}, GB", justify="right")
    for column in ("price", "TTFT mean, s", "p90, s"):
        table.add_column(column, justify="right")
    for row in rows:
        sizes = (f"{size:g}" for size in row.gb.values())
        table.add_row(*sizes, f"{row.price:,.0f}", f"{row.ttft_mean:.3f}", f"{row.ttft_p90:.3f}")
    console.print(table)
    console.print(f"{len(document['simulated'])} of {document['offered']} sizes simulated.")
