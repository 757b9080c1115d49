"""``kvpilot doctor``: what would keep a stack from starting, or keeps a running one from working."""

from __future__ import annotations

import asyncio
import http.client
import json
import shutil
import sys
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvpilot import __version__
from kvpilot.backends.base import BackendError
from kvpilot.backends.engine_plugin import EnginePlugin, EngineState
from kvpilot.config import Config, is_loopback
from kvpilot.stack import StackError, models, plan, preflight
from kvpilot.stack.engine_env import PINS, find_engine_python, installed_versions
from kvpilot.stack.launch import running
from kvpilot.stack.prepare import ask_engine
from kvpilot.stack.state import read_status, supervisor_pid

Verdict = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at. ``fail`` keeps kvpilot from working, ``warn`` may surprise."""

    check: str
    verdict: Verdict
    detail: str


def diagnose(config: Config) -> list[Finding]:
    """All findings: of the machine, and of the services (the running stack's, else the configured ones)."""
    up = running(config)
    own_engines = _starts_engines(config)
    findings = [Finding("kvpilot", "ok", f"{__version__}, Python {sys.version.split()[0]}")]
    findings += _guarded("configuration", lambda: _configuration(config))
    environment = _guarded("engine environment", lambda: _engine_environment(config))
    findings += environment if own_engines else [_only_for_up(finding) for finding in environment]
    if up is not None:
        findings.append(Finding("stack", "ok", f"up in {config.state_dir} (pid {up.status.pid})"))
        findings += _restarts(up.restarts)
    else:
        pid = supervisor_pid(config.state_dir)
        starting = (
            f"starting in {config.state_dir} (pid {pid})" if pid else f"not running in {config.state_dir}"
        )
        findings.append(Finding("stack", "warn" if pid else "ok", starting))
        if own_engines:
            findings += _guarded("model", lambda: _model(config))
            findings += _guarded("memory", lambda: _memory(config))
        if pid is None:
            findings += _guarded("ports", lambda: _ports(config, embedded=own_engines))
    findings += _services(up.config if up is not None else config, expected=up is not None)
    return findings


def print_report(findings: list[Finding], console: Console, *, as_json: bool) -> bool:
    """Print ``findings``; returns whether none of them is a failure."""
    healthy = all(finding.verdict != "fail" for finding in findings)
    if as_json:
        print(
            json.dumps({"healthy": healthy, "findings": [asdict(finding) for finding in findings]}, indent=2)
        )
        return healthy
    marks = {"ok": Text("✓", "green"), "warn": Text("!", "yellow"), "fail": Text("✗", "red")}
    table = Table.grid(padding=(0, 2))
    for finding in findings:
        table.add_row(marks[finding.verdict], finding.check, finding.detail)
    console.print(table)
    return healthy


def _starts_engines(config: Config) -> bool:
    """Whether this is about `kvpilot up`: not when engines that are already up are, or can be, served."""
    if supervisor_pid(config.state_dir) is not None:
        status = read_status(config.state_dir)
        return status is None or plan.VLLM in status.processes
    if not is_loopback(urlsplit(config.engine.url).hostname or ""):
        return False
    try:
        ask_engine(config)
    except StackError:
        return True
    return False


def _guarded(check: str, look: Callable[[], Iterator[Finding]]) -> list[Finding]:
    try:
        return list(look())
    except StackError as error:
        return [Finding(check, "fail", str(error))]


def _only_for_up(finding: Finding) -> Finding:
    if finding.verdict != "fail":
        return finding
    return Finding(finding.check, "warn", f"only `kvpilot up` needs it: {finding.detail}")


def _configuration(config: Config) -> Iterator[Finding]:
    wrong = plan.check_control_access(config)
    if wrong:
        yield Finding("configuration", "fail", wrong)


def _model(config: Config) -> Iterator[Finding]:
    models.check_model(config.engine.model)
    preflight.check_sizes(config)
    made = Path(models.model_path(config.engine.model)).is_dir()
    note = "" if made or config.engine.model not in models.BUILT_IN else " (made on first `kvpilot up`)"
    yield Finding("model", "ok", f"{config.engine.model}{note}")


def _engine_environment(config: Config) -> Iterator[Finding]:
    python = find_engine_python(config)
    versions = installed_versions(python)
    odd = [
        f"{name} {versions.get(name, '?')} (verified: {pin})"
        for name, pin in PINS.items()
        if versions.get(name) != pin
    ]
    shown = ", ".join(f"{name} {version}" for name, version in versions.items())
    yield Finding(
        "engine environment", "warn" if odd else "ok", ", ".join(odd) if odd else f"{shown} in {python}"
    )
    if shutil.which("g++") is None:
        yield Finding("g++", "fail", "not found; vLLM compiles some kernels with it: install g++")


def _restarts(restarts: dict[str, int]) -> Iterator[Finding]:
    many = {name: count for name, count in restarts.items() if count}
    if many:
        told = ", ".join(f"{name} {count}×" for name, count in many.items())
        yield Finding("restarts", "warn", f"{told} since start: see logs/supervisor.log")


def _memory(config: Config) -> Iterator[Finding]:
    preflight.check_memory(config, models.model_size(models.model_path(config.engine.model)))
    yield Finding(
        "memory", "ok", f"{preflight.available_memory() / 2**30:.1f} GiB available, enough for the tiers"
    )


def _ports(config: Config, *, embedded: bool) -> Iterator[Finding]:
    preflight.resolve_ports(config, embedded=embedded)
    yield Finding("ports", "ok", "all free")


def _services(config: Config, *, expected: bool) -> Iterator[Finding]:
    """Engine and cache layer; ones that are absent are no failure when nothing of ours is up."""
    absent: Verdict = "fail" if expected else "warn"
    try:
        model = ask_engine(config)
    except StackError as error:
        yield Finding("engine", absent, str(error))
    else:
        yield Finding("engine", "ok", f"{config.engine.url} serves {model.id}")
        if not config.engine.kv_events:
            yield Finding(
                "KV events", "warn", "engine.kv_events is not set: what the device holds stays unknown"
            )
        yield _plugin(config)
    yield from cache_layer(config, absent)


def _plugin(config: Config) -> Finding:
    """Which of kvpilot's depths an engine that answers has: whether it runs the plug-in, and with what."""

    async def ask() -> EngineState | None:
        plugin = EnginePlugin.from_config(config)
        try:
            return await plugin.state()
        finally:
            await plugin.close()

    wanted: Verdict = "warn" if config.engine.plugin else "ok"
    try:
        state = asyncio.run(ask())
    except BackendError as error:
        return Finding("plug-in", "warn", str(error))
    if state is None:
        return Finding("plug-in", wanted, "none: the device pool is left to vLLM (docs/engine.md)")
    if not state.active:
        return Finding("plug-in", "warn", f"off: {state.reason}")
    events = "KV events" if state.events else "no KV events"
    below = f"prefetch through {state.connector}" if state.connector else "no connector, so no prefetch"
    return Finding("plug-in", "ok", f"{state.kvpilot} in {state.scheduler}, {below}, {events}")


def cache_layer(config: Config, absent: Verdict = "warn") -> Iterator[Finding]:
    """LMCache's nodes and its coordinator. Without them requests go through and nothing else happens."""
    for url in config.lmcache.nodes:
        status = _ask(f"{url}/status")
        if status is None:
            yield Finding("LMCache", absent, f"{url} does not answer")
            continue
        told = (status.get("chunk_size"), status.get("hash_algorithm"))
        ours = (config.lmcache.chunk_size, config.lmcache.hash_algorithm)
        if told != ours:
            detail = f"{url} uses chunks and hash {told}, the configuration says {ours}: change [lmcache]"
            yield Finding("LMCache", "fail", detail)
        else:
            yield Finding("LMCache", "ok", f"{url}, chunks of {told[0]} tokens, {told[1]}")
    central = _ask(f"{config.lmcache.coordinator}/instances")
    if central is None:
        yield Finding("LMCache coordinator", absent, f"{config.lmcache.coordinator} does not answer")
        return
    instances = central.get("instances")
    count = len(instances) if isinstance(instances, list) else 0
    detail = f"{config.lmcache.coordinator}, {count} node{'s' if count != 1 else ''} registered"
    advice = "" if count else ": start nodes with --coordinator-url and --coordinator-event-reporting"
    yield Finding("LMCache coordinator", "ok" if count else absent, detail + advice)


def _ask(url: str) -> dict[str, Any] | None:
    try:
        with urllib.request.urlopen(url, timeout=3) as reply:
            answer = json.load(reply)
    except (OSError, ValueError, http.client.HTTPException):
        return None
    return answer if isinstance(answer, dict) else None
