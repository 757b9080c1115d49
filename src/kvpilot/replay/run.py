"""A whole replay: traces in, plan, traffic, document out."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec

from kvpilot.config import Config
from kvpilot.replay.client import Control, ControlError, Gateway
from kvpilot.replay.driver import Replayer, TurnRow
from kvpilot.replay.plan import Hints, PlannedSession, ReplayOptions, choose_scale, plan_overlay
from kvpilot.replay.report import lengths, totals
from kvpilot.replay.text import TextMaker
from kvpilot.stack import StackError
from kvpilot.traces import TraceError, find_trace, overlay, read_trace
from kvpilot.traces.overlay import chained

if TYPE_CHECKING:
    from kvpilot.stack.launch import Endpoints

NO_HINTS_NOTE = (
    "with --hints none the engine's replies hold no tool calls (a recorded agent is played, the model does "
    "not write its calls), so kvpilot sees tools only when the next request shows call and result"
)


class Where(msgspec.Struct, frozen=True):
    """A stack to replay against."""

    gateway_url: str
    control_url: str | None
    model: str
    """Name the gateway serves."""
    tokenizer: str
    """Folder with the model's tokenizer.json."""
    max_model_len: int
    control_token: str = ""
    api_keys: dict[str, str] = {}
    """Tenant → API key."""


class ReplayRequest(msgspec.Struct, frozen=True):
    """What to replay."""

    traces: tuple[str, ...]
    mode: str
    options: ReplayOptions
    sessions: int
    seed: int = 0
    tenants: int = 0
    window_s: float | None = None
    salt: str = ""
    only: tuple[str, ...] = ()
    """Ids of recorded sessions to choose from; empty = all."""


def tenant_keys(tenants: int) -> dict[str, str]:
    """API keys for other tenants of a stack of our own: tenant → key."""
    return {name: f"replay-{name}" for name in ("default", *(f"other-{i + 1}" for i in range(tenants)))}


@contextlib.contextmanager
def own_stack(config: Config, tenants: int) -> Iterator[Where]:
    """A stack started for this replay, with an API key for every tenant when there are several."""
    from kvpilot.stack.launch import launch

    keys = tenant_keys(tenants) if tenants else {}
    config = msgspec.structs.replace(config, tenants={key: tenant for tenant, key in keys.items()})
    with launch(config, echo=True) as stack:
        yield where_is(stack, keys)


def where_is(stack: Endpoints, api_keys: dict[str, str] | None = None) -> Where:
    """A running stack as a replay is told of it; ``api_keys``: tenant → key."""
    engine = stack.config.engine
    return Where(
        gateway_url=stack.gateway_url,
        control_url=stack.control_url,
        model=engine.served_model_name,
        tokenizer=engine.tokenizer or engine.model,
        max_model_len=engine.max_model_len,
        control_token=stack.config.coordinator.token,
        api_keys=api_keys or {},
    )


def replay(request: ReplayRequest, where: Where) -> dict[str, Any]:
    """Run it and return the document; Ctrl-C ends it early with what is known so far.

    Raises TraceError, TextError, ControlError and ValueError for what the user can mend.
    """
    texts = TextMaker.load(where.tokenizer)
    paths = [find_trace(name) for name in request.traces]
    stream = chained(read_trace(path, texts.count) for path in paths)
    if request.only:
        stream = (session for session in stream if session.id in request.only)
    laid = overlay(stream, request.sessions + request.tenants, request.seed, request.window_s)
    scale = choose_scale(
        [placed.session for placed in laid.placed], where.max_model_len, request.options, texts.carries_tools
    )
    planned = plan_overlay(laid, scale, request.options, f"r{secrets.token_hex(3)}", request.tenants)
    count = sum(len(session.calls) for session in planned)
    say(f"{len(planned)} sessions, {count} requests, lengths × {scale}")

    replayer, interrupted = replay_sessions(
        planned, where, request.mode, request.options, texts, request.salt
    )
    return document(request, scale, laid.window_s, laid.gaps_cut, replayer, interrupted)


def replay_sessions(
    planned: Sequence[PlannedSession],
    where: Where,
    mode: str,
    options: ReplayOptions,
    texts: TextMaker,
    salt: str = "",
) -> tuple[Replayer, bool]:
    """Play planned sessions; returns what was measured, and whether Ctrl-C cut it short."""
    count = sum(len(session.calls) for session in planned)

    async def run() -> tuple[Replayer, bool]:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as http:
            control = Control(http, where.control_url, where.control_token) if where.control_url else None
            if control is not None:
                await control.set_mode(mode)
            elif options.hints is not Hints.NONE:
                raise ControlError("hints other than none need the control API: give --control URL")
            done = 0

            def progress(row: TurnRow) -> None:
                nonlocal done
                done += 1
                what = f"TTFT {row.ttft_ms:.0f} ms" if row.ttft_ms is not None else row.error
                say(
                    f"[{done}/{count}] {row.session} {row.agent} turn {row.turn}: "
                    f"{row.cached_tokens} of {row.prompt_tokens} tokens cached, {what}"
                )

            replayer = Replayer(
                Gateway(http, where.gateway_url, where.model),
                control,
                texts,
                options.hints,
                salt,
                where.api_keys,
                progress,
            )
            try:
                await replayer.run(planned)
            except asyncio.CancelledError:
                say("interrupted: results so far")
                return replayer, True
            return replayer, False

    return asyncio.run(run())


def document(
    request: ReplayRequest,
    scale: float,
    window_s: float,
    gaps_cut: int,
    replayer: Replayer,
    interrupted: bool,
) -> dict[str, Any]:
    """The JSON form of a replay: times in ms (``_s``: seconds), sizes in bytes, lengths in tokens."""
    options = request.options
    rows = sorted(replayer.rows, key=lambda row: row.started_s)
    notes = [NO_HINTS_NOTE] if options.hints is Hints.NONE else []
    if replayer.signals_failed:
        notes.append(f"{replayer.signals_failed} of {replayer.signals} hints could not be delivered")
    return {
        "traces": list(request.traces),
        "mode": request.mode,
        "hints": options.hints.value,
        "sessions": request.sessions,
        "tenants": request.tenants,
        "seed": request.seed,
        "window_s": round(window_s, 1),
        "gaps_cut": gaps_cut,
        "scale": scale,
        "gap_scale": options.gap_scale,
        "max_gap_s": options.max_gap_s if options.max_gap_s < float("inf") else None,
        "max_calls": options.max_calls or None,
        "max_reply": options.max_reply,
        "lengths": lengths(rows),
        "tiers": replayer.tiers.capacity,
        "bytes_held": replayer.tiers.held(),
        "bytes_written": replayer.tiers.written(),
        "totals": totals(rows),
        "compactions": msgspec.to_builtins(replayer.compactions.rows) if replayer.compactions else [],
        "signals": replayer.signals,
        "interrupted": interrupted,
        "notes": notes,
        "turns": msgspec.to_builtins(rows),
    }


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def write_json(path: Path, content: Any) -> None:
    """Pretty-printed JSON, folders made as needed. Raises StackError when it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n")
    except OSError as error:
        raise StackError(f"cannot write {path} ({error.strerror}): change --json") from None


def trace_names(names: Sequence[str]) -> tuple[str, ...]:
    """Checks early, before a stack is started, that every trace can be found. Raises TraceError."""
    if not names:
        raise TraceError("name at least one trace")
    for name in names:
        find_trace(name)
    return tuple(names)
