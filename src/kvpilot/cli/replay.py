"""``kvpilot replay``."""

from __future__ import annotations

from typing import Annotated

import typer

from kvpilot.cli.options import ConfigOption, JsonFileOption, OwnStateOption, load
from kvpilot.cli.output import console
from kvpilot.cli.user_errors import user_errors
from kvpilot.config import check_url


def register(app: typer.Typer) -> None:
    app.command(rich_help_panel="Measuring")(replay)


def replay(
    traces: Annotated[
        list[str],
        typer.Argument(help="Files of recorded agents, or their names below $KVPILOT_TRACES."),
    ],
    mode: Annotated[str, typer.Option(help="kvpilot = act, passive = only observe.")] = "kvpilot",
    hints: Annotated[
        str, typer.Option(help="none = what a proxy sees; lifecycle = ids, tool ends, pauses, session ends.")
    ] = "lifecycle",
    sessions: Annotated[int, typer.Option(min=1, help="Sessions drawn from the traces.")] = 4,
    only: Annotated[
        list[str] | None,
        typer.Option("--session", help="Recorded sessions to choose from, by id.", show_default=False),
    ] = None,
    seed: Annotated[int, typer.Option(help="Which sessions, and when each starts.")] = 0,
    tenants: Annotated[int, typer.Option(min=0, help="Other tenants beside them, one session each.")] = 0,
    gap_scale: Annotated[float, typer.Option(min=0, help="Recorded pauses are multiplied by this.")] = 0.05,
    max_gap: Annotated[float, typer.Option(min=0, help="Longest pause in seconds after scaling.")] = 10.0,
    max_calls: Annotated[int, typer.Option(min=0, help="Calls per session; 0 = all.")] = 20,
    max_reply: Annotated[int, typer.Option(min=1, help="Longest reply in tokens after scaling.")] = 32,
    window: Annotated[
        float | None,
        typer.Option(
            help="Recorded seconds in which sessions start (default: about 20 live at once).",
            show_default=False,
        ),
    ] = None,
    salt: Annotated[
        str, typer.Option(help="Sets this run's texts apart from those of an earlier run on the same stack.")
    ] = "",
    json_file: JsonFileOption = None,
    gateway: Annotated[
        str | None,
        typer.Option(help="Gateway of a running stack (default: start one).", show_default=False),
    ] = None,
    control: Annotated[
        str | None, typer.Option(help="Control API of that stack.", show_default=False)
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="Model of the stack.", show_default=False)
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(help="Longest context in tokens.", show_default=False)
    ] = None,
    host_gb: Annotated[float | None, typer.Option(help="Host tier in GB.", show_default=False)] = None,
    disk_gb: Annotated[float | None, typer.Option(help="Disk tier in GB.", show_default=False)] = None,
    config: ConfigOption = None,
    state: OwnStateOption = None,
) -> None:
    """Replay recorded agents through the gateway: prompts, pauses, tools and compactions as they were."""
    from kvpilot.replay.client import ControlError
    from kvpilot.replay.plan import Hints, ReplayOptions
    from kvpilot.replay.report import print_report
    from kvpilot.replay.run import ReplayRequest, Where, own_stack, trace_names, write_json
    from kvpilot.replay.run import replay as run
    from kvpilot.replay.text import TextError
    from kvpilot.stack.launch import own_state, with_free_ports
    from kvpilot.stack.models import model_path, served_name
    from kvpilot.traces import TraceError

    settings = load(
        config,
        state,
        engine={"model": model, "max_model_len": max_model_len},
        lmcache={"host_gb": host_gb, "disk_gb": disk_gb},
    )
    with user_errors(TraceError, TextError, ControlError, ValueError):
        if mode not in ("kvpilot", "passive"):
            raise ValueError(f"--mode {mode}: use kvpilot or passive")
        if hints not in tuple(Hints):
            raise ValueError(f"--hints {hints}: use {' or '.join(Hints)}")
        request = ReplayRequest(
            traces=trace_names(traces),
            mode=mode,
            options=ReplayOptions(
                hints=Hints(hints),
                gap_scale=gap_scale,
                max_gap_s=max_gap,
                max_calls=max_calls,
                max_reply=max_reply,
            ),
            sessions=sessions,
            only=tuple(only or ()),
            seed=seed,
            tenants=tenants,
            window_s=window,
            salt=salt,
        )
        if gateway is not None:
            engine = settings.engine
            where = Where(
                gateway_url=check_url(gateway, "--gateway"),
                control_url=None if control is None else check_url(control, "--control"),
                model=engine.served_model_name or served_name(engine.model),
                tokenizer=engine.tokenizer or model_path(engine.model),
                max_model_len=engine.max_model_len,
                control_token=settings.coordinator.token,
            )
            document = run(request, where)
        else:
            with own_state("replay", state) as folder:
                settings = with_free_ports(settings.with_overrides(state={"dir": str(folder)}))
                with own_stack(settings, tenants) as where:
                    document = run(request, where)
    if json_file is not None:
        write_json(json_file, document)
    print_report(document, console())
    if document["interrupted"]:
        raise typer.Exit(130)
