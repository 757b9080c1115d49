"""The run: every case is read as the gateway reads it, a share goes through the whole gateway, a share of those
on into the coordinator.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from kvpilot.bench.fuzz.cases import Case, Cases, load_seeds
from kvpilot.bench.fuzz.coordinator import Coordinator, DirectLink, hurried
from kvpilot.bench.fuzz.engine import AcceptingEngine, Received
from kvpilot.bench.fuzz.rules import Outcome, wrong, wrong_body_or_refusal
from kvpilot.config import Config
from kvpilot.gateway.app import WITH_IDS, Gateway
from kvpilot.gateway.errors import GatewayError
from kvpilot.gateway.headers import as_mapping
from kvpilot.gateway.request import TOKEN_IDS, USAGE, prepare
from kvpilot.tenants import DEFAULT_TENANT

TENANT, KEY = "acme", "key"
TENANT_EVERY = 4
"""Every so many cases the client has an API key of its own, for which a gateway with tenants is asked."""
KEPT_FAULTS = 20
GROWTH_MB = 64.0
"""What memory may grow by after the first fifth of a run, in which caches and pools fill up."""

Send = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class FuzzOptions:
    """``gateway``, ``coordinator``: shares of all cases that go through the one, and on into the other."""

    count: int = 1_000_000
    seed: int = 1
    gateway: float = 0.25
    coordinator: float = 0.12
    seeds: Path | None = None
    jobs: int = 1
    """Processes that share the cases; each has gateways and a coordinator of its own."""


@dataclass(slots=True)
class Report:
    """What a process saw. ``faults`` are the first few in words, each with the number of its case."""

    outcomes: Counter[str] = field(default_factory=Counter)
    actions: Counter[str] = field(default_factory=Counter)
    asked: Counter[str] = field(default_factory=Counter)
    events: int = 0
    faults: list[str] = field(default_factory=list)
    faulty: int = 0
    rss_mb: list[float] = field(default_factory=list)
    """At the start and after each tenth of the run."""

    def fault(self, text: str) -> None:
        self.faulty += 1
        if len(self.faults) < KEPT_FAULTS:
            self.faults.append(text)

    @property
    def growth_mb(self) -> float:
        """From the second tenth to the end."""
        return round(self.rss_mb[-1] - self.rss_mb[2], 1) if len(self.rss_mb) > 2 else 0.0


class _Listener(logging.Handler):
    """Everything that is logged from a warning on, with the case it belongs to."""

    def __init__(self, report: Report) -> None:
        super().__init__(logging.WARNING)
        self._report = report
        self.case = -1

    def emit(self, record: logging.LogRecord) -> None:
        self._report.outcomes[f"logged {record.levelname}"] += 1
        why = f": {record.exc_info[1]!r}" if record.exc_info else ""
        self._report.fault(f"case {self.case}: logged {record.getMessage()[:200]}{why[:300]}")


def tenant_of(case: Case) -> str | None:
    return TENANT if case.number % TENANT_EVERY == 0 else None


def read_only(case: Case) -> Outcome:
    """What the gateway makes of a case before it forwards it."""
    headers = as_mapping(case.headers)
    ask = (TOKEN_IDS, USAGE) if case.path in WITH_IDS else ()
    try:
        prepared = prepare(case.body, headers, tenant_of(case) or DEFAULT_TENANT, ask=ask)
    except GatewayError as error:
        return Outcome(error.status, error.body(), None)
    return Outcome(200, b"", Received([], prepared.body))


class Rig:
    """Two gateways, one without and one with tenants, and a coordinator."""

    def __init__(self) -> None:
        self.coordinator = Coordinator()
        self._doors = [_Door({}), _Door({KEY: TENANT})]

    async def play(self, case: Case, *, coordinated: bool) -> Outcome:
        """What came of a case that went through the gateway of whom it belongs to."""
        door = self._doors[tenant_of(case) is not None]
        door.link.coordinator = self.coordinator if coordinated else None
        outcome = await door.knock(case)
        if coordinated:
            await self.coordinator.settle()
        return outcome


class _Door:
    """One gateway with an engine behind it."""

    def __init__(self, tenants: Mapping[str, str]) -> None:
        config = Config().with_overrides(tenants=dict(tenants))
        self._key = next(iter(tenants), None)
        self._engine = AcceptingEngine(config)
        self.link = DirectLink(config)
        self._gateway = Gateway(config, upstream=self._engine, link=self.link)

    async def knock(self, case: Case) -> Outcome:
        headers = case.headers
        if self._key is not None:
            headers = [(b"authorization", b"Bearer " + self._key.encode()), *headers]
        scope = {
            "type": "http",
            "method": "POST",
            "path": case.path,
            "raw_path": case.path.encode(),
            "query_string": b"",
            "headers": headers,
        }
        status, parts = 0, []
        pieces = [case.body[: len(case.body) // 2], case.body[len(case.body) // 2 :]]

        async def receive() -> dict[str, Any]:
            if not pieces:
                await asyncio.Event().wait()  # a client that stays
            return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}

        async def send(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)
            parts.append(message.get("body", b""))

        self._engine.received = None
        await self._gateway(scope, receive, send)
        return Outcome(status, b"".join(parts), self._engine.received)


def run_fuzz(options: FuzzOptions, say: Send = lambda line: None) -> dict[str, Any]:
    """Play the whole run; the document tells what came of it. Raises ValueError for seeds that are none."""
    load_seeds(options.seeds)
    began = time.perf_counter()
    if options.jobs == 1:
        reports = [_run_job(options, 0, say)]
    else:
        with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
            jobs = [pool.submit(_run_job, options, job, _to_stderr) for job in range(options.jobs)]
            reports = [job.result() for job in jobs]
    return {
        "count": options.count,
        "seed": options.seed,
        "seconds": round(time.perf_counter() - began, 1),
        "through_gateway": sum(_in_share(number, options.gateway) for number in range(options.count)),
        "through_coordinator": sum(_in_share(number, options.coordinator) for number in range(options.count)),
        "outcomes": dict(sum((report.outcomes for report in reports), Counter()).most_common()),
        "events": sum(report.events for report in reports),
        "actions": dict(sum((report.actions for report in reports), Counter()).most_common()),
        "asked": dict(sum((report.asked for report in reports), Counter()).most_common()),
        "faults": sum(report.faulty for report in reports),
        "first_faults": [fault for report in reports for fault in report.faults],
        "rss_mb": [report.rss_mb for report in reports],
        "growth_mb": max(report.growth_mb for report in reports),
    }


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _run_job(options: FuzzOptions, job: int, say: Send) -> Report:
    """Every ``options.jobs``-th case, from number ``job`` on."""
    report = Report()
    listener = _Listener(report)
    cases = Cases(load_seeds(options.seeds), options.seed)
    logging.getLogger().addHandler(listener)
    try:
        with hurried():
            asyncio.run(_play(options, job, cases, report, listener, say))
    finally:
        logging.getLogger().removeHandler(listener)
    if report.growth_mb > GROWTH_MB:
        report.fault(f"memory grew by {report.growth_mb} MB after the first fifth of the run")
    return report


async def _play(
    options: FuzzOptions, job: int, cases: Cases, report: Report, listener: _Listener, say: Send
) -> None:
    rig = Rig()
    await rig.coordinator.start()
    process = psutil.Process()
    numbers = range(job, options.count, options.jobs)
    tenth = max(1, len(numbers) // 10)
    for played, number in enumerate(numbers):
        if played % tenth == 0:
            report.rss_mb.append(round(process.memory_info().rss / 2**20, 1))
            say(f"{played} of {len(numbers)} cases, {report.faulty} faults, {report.rss_mb[-1]} MB")
        listener.case = number
        case = cases.make(number)
        try:
            outcome, found = await _try(case, rig, options)
        except Exception as error:
            report.outcomes["raised"] += 1
            report.fault(f"case {number}: raised {error!r}"[:500])
            continue
        report.outcomes[outcome] += 1
        if found:
            report.fault(f"case {number}: {found}"[:500])
    await rig.coordinator.close()
    report.rss_mb.append(round(process.memory_info().rss / 2**20, 1))
    report.actions, report.events = rig.coordinator.outcomes, rig.coordinator.events
    report.asked = rig.coordinator.asked


async def _try(case: Case, rig: Rig, options: FuzzOptions) -> tuple[str, str]:
    """What came of a case in a word, and what is wrong with it."""
    if not _in_share(case.number, options.gateway):
        outcome = read_only(case)
        return f"read, {_in_a_word(outcome)}", wrong_body_or_refusal(case, outcome, tenant_of(case))
    outcome = await rig.play(case, coordinated=_in_share(case.number, options.coordinator))
    return _in_a_word(outcome), wrong(case, outcome, tenant_of(case))


def play_one(number: int, options: FuzzOptions) -> dict[str, Any]:
    """One case of a run by itself, with what was sent and what came back. Raises what the gateway raises."""
    case = Cases(load_seeds(options.seeds), options.seed).make(number)

    async def play() -> Outcome:
        rig = Rig()
        await rig.coordinator.start()
        try:
            return await rig.play(case, coordinated=True)
        finally:
            await rig.coordinator.close()

    with hurried():
        outcome = asyncio.run(play())
    return {"sent": asdict(case), "came": asdict(outcome), "wrong": wrong(case, outcome, tenant_of(case))}


def _in_share(number: int, share: float) -> bool:
    """Spread evenly, and over both gateways; whoever is in a share is in every larger one."""
    return (number * 0.6180339887498949) % 1.0 < share


def _in_a_word(outcome: Outcome) -> str:
    if outcome.received is not None:
        return "to the engine"
    return "answered here" if outcome.status == 200 else f"refused with {outcome.status}"


def print_table(document: Mapping[str, Any], console: Console) -> None:
    """The document for people."""
    table = Table(title=f"{document['count']} generated requests, seed {document['seed']}", show_header=False)
    rows = {
        **document["outcomes"],
        "through the gateway": document["through_gateway"],
        "through the coordinator": document["through_coordinator"],
        "actions": sum(document["actions"].values()),
        "prompts asked of the engine": sum(document["asked"].values()),
        "memory (MB)": "\n".join(" ".join(f"{mb:g}" for mb in job) for job in document["rss_mb"]),
        "seconds": document["seconds"],
        "faults": document["faults"],
    }
    for name, value in rows.items():
        table.add_row(name, str(value))
    console.print(table)
    for fault in document["first_faults"]:
        console.print(fault, markup=False, highlight=False)
