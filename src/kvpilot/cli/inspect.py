"""``kvpilot sessions``, ``session``, ``actions`` and ``explain``: what the coordinator knows and does."""

from __future__ import annotations

import json
import re
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from kvpilot.cli.options import ConfigOption, JsonOption, StateOption, load
from kvpilot.cli.output import console, literal
from kvpilot.config import check_url

if TYPE_CHECKING:
    from rich.table import Table

_INSPECT = "What it knows and does"
_TIMEOUT_S = 10.0
_CHUNK = re.compile("[0-9A-Fa-f]{64}")

UrlOption = Annotated[
    str | None,
    typer.Option("--control", help="Control API URL (default: the running stack's).", show_default=False),
]


class ControlUnavailable(Exception):
    """The control API cannot be reached, or refused."""


def register(app: typer.Typer) -> None:
    app.command(rich_help_panel=_INSPECT)(sessions)
    app.command(rich_help_panel=_INSPECT)(session)
    app.command(rich_help_panel=_INSPECT)(actions)
    app.command(rich_help_panel=_INSPECT)(explain)


def sessions(
    limit: Annotated[int, typer.Option(min=1, max=1000, help="At most so many, latest first.")] = 200,
    control: UrlOption = None,
    config: ConfigOption = None,
    state: StateOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the sessions kvpilot knows, latest first."""
    answer = _get(control, config, state, f"/sessions?limit={limit}")
    if as_json:
        print(json.dumps(answer, indent=2))
        return
    table = _table("session", "tenant", "state", "for", "turns", "tokens", "chunks", "host", "disk", "parent")
    for s in answer["sessions"]:
        _row(
            table,
            s["id"],
            s["tenant"],
            s["state"],
            _ago(s["since"]),
            s["turns"],
            s["tokens"],
            s["chunks"],
            s["resident"]["host"],
            s["resident"]["disk"],
            s["parent"] or "",
        )
    _print(table)
    shown = len(answer["sessions"])
    if shown < answer["total"]:
        _say(
            f"the latest {shown} of {answer['total']} sessions; for more: --limit, or offset= of the control API"
        )


def session(
    session_id: Annotated[
        str, typer.Argument(metavar="ID", help="Session id as `kvpilot sessions` lists it.")
    ],
    tenant: Annotated[
        str | None, typer.Option(help="Where two tenants use the same id.", show_default=False)
    ] = None,
    control: UrlOption = None,
    config: ConfigOption = None,
    state: StateOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show one session: segments, where each chunk is, what will happen next."""
    s = _get(control, config, state, f"/sessions/{_named(session_id, tenant)}")
    if as_json:
        print(json.dumps(s, indent=2))
        return
    _say(f"{s['id']} (tenant {s['tenant']}): {s['state']} for {_ago(s['since'])}, {s['turns']} turns")
    if s["parent"] or s["children"]:
        _say(f"parent: {s['parent'] or '-'}; children: {', '.join(s['children']) or '-'}")
    if s["returns_in_s"]:
        r = s["returns_in_s"]
        _say(f"next request expected in {r['p50']:.1f} s (80 %: {r['p10']:.1f} to {r['p90']:.1f} s)")
    for step in s["next"]:
        wait = max(0.0, step["at"] - time.time())
        _say(f"next: {step['action']} {step['chunks']} chunks in {wait:.1f} s ({step['reason']})")
    for context in s["contexts"]:
        _print_context(context)


def _print_context(context: dict[str, Any]) -> None:
    _say(
        f"context of {context['tokens']} tokens (boundaries by {context['segments_method'] or 'nothing yet'}):"
    )
    table = _table("segment", "name", "message", "from", "to", "tokens")
    for g in context["segments"]:
        place = "" if g["message"] < 0 else g["message"]
        _row(table, g["kind"], g["name"] or "", place, g["start"], g["end"], g["end"] - g["start"])
    _print(table)
    table = _table("chunks", "tiers", "sessions that hold them")
    runs: list[list[Any]] = []
    for index, chunk in enumerate(context["chunks"]):
        what = (", ".join(chunk["tiers"]) or "nowhere", chunk["holders"])
        if runs and runs[-1][2] == what:
            runs[-1][1] = index
        else:
            runs.append([index, index, what])
    for first, last, (tiers, holders) in runs:
        _row(table, f"{first} to {last}" if last > first else first, tiers, holders)
    _print(table)


def actions(
    session_id: Annotated[
        str | None, typer.Option("--session", help="Only of this session.", show_default=False)
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=5000, help="At most so many, newest first.")] = 30,
    control: UrlOption = None,
    config: ConfigOption = None,
    state: StateOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the action log: what was done with KV, why, and what became of it."""
    query = f"&session={quote(session_id, safe='')}" if session_id else ""
    answer = _get(control, config, state, f"/actions?limit={limit}{query}")
    if as_json:
        print(json.dumps(answer, indent=2))
        return
    table = _table(
        "id", "when", "action", "session", "why", "outcome", "planned", "confirmed", "left", "took", "reason"
    )
    for a in answer["actions"]:
        took = f"{a['finished_at'] - a['created_at']:.2f} s" if a["finished_at"] else ""
        _row(
            table,
            a["id"],
            _ago(a["created_at"]),
            a["kind"],
            a["session"] or "-",
            a["source"],
            a["status"],
            a["planned"],
            a["confirmed"],
            a["skipped"],
            took,
            a["reason"],
        )
    _print(table)


def explain(
    target: Annotated[
        str,
        typer.Argument(metavar="SESSION|CHUNK", help="A session's id, or a chunk's hash (64 hex digits)."),
    ],
    tenant: Annotated[
        str | None, typer.Option(help="Where two tenants use the same session id.", show_default=False)
    ] = None,
    control: UrlOption = None,
    config: ConfigOption = None,
    state: StateOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say why KV is where it is: what is waited for, when it is expected back, what its room is worth, what was
    decided and what it lost to."""
    from kvpilot.cli.explained import print_chunk, print_session

    if _CHUNK.fullmatch(target):
        answer = _get(control, config, state, f"/explain/chunks/{target}")
        show = print_chunk
    else:
        answer = _get(control, config, state, f"/explain/sessions/{_named(target, tenant)}")
        show = print_session
    if as_json:
        print(json.dumps(answer, indent=2))
    else:
        show(answer, _say)


def _named(session: str, tenant: str | None) -> str:
    """A session as the control API's paths name it."""
    return quote(session) + (f"?tenant={quote(tenant, safe='')}" if tenant else "")


def _get(control: str | None, config: Any, state: Any, path: str) -> Any:
    import http.client
    import urllib.error
    import urllib.request

    from kvpilot.cli.user_errors import user_errors
    from kvpilot.stack.launch import running
    from kvpilot.stack.plan import http_base

    settings = load(config, state)
    up = None if control is not None else running(settings)
    with user_errors(ControlUnavailable):
        if control is not None:
            base = check_url(control, "--control")
        elif up is not None:
            base = up.control_url
        elif settings.coordinator.port:
            base = http_base(settings.coordinator.host, settings.coordinator.port)
        else:
            raise ControlUnavailable(
                f"no stack is up in {settings.state_dir}: start one with `kvpilot up`, or give --control"
            )
        token = up.config.coordinator.token if up else settings.coordinator.token
        try:
            request = urllib.request.Request(f"{base.rstrip('/')}/kvpilot/v1{path}")
            if token:
                request.add_header("Authorization", f"Bearer {token}")
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise ControlUnavailable(_detail(error)) from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise ControlUnavailable(
                f"no coordinator answers at {base} ({error}): start one with `kvpilot up`, or give --control"
            ) from None


def _detail(error: Any) -> str:
    try:
        return str(json.load(error)["detail"])
    except (ValueError, KeyError, TypeError):
        return f"the coordinator answered {error.code}"


def _ago(at: float) -> str:
    seconds = max(0.0, time.time() - at)
    for size, unit in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.1f} s"


def _table(*columns: str) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _row(table: Table, *cells: object) -> None:
    table.add_row(*map(literal, cells))


def _print(table: Table) -> None:
    console(width=None if sys.stdout.isatty() else 200).print(table)


def _say(line: str) -> None:
    print(literal(line))
