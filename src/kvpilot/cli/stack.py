"""``kvpilot up``, ``down``, ``serve`` and ``doctor``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvpilot.cli.options import ConfigOption, JsonOption, StateOption, load
from kvpilot.cli.output import console
from kvpilot.stack import StackError

_STACK = "The stack"

PortOption = Annotated[
    int | None,
    typer.Option("--port", "-p", help="Gateway port (default 8000; 0 = any free one).", show_default=False),
]
ControlPortOption = Annotated[
    int | None,
    typer.Option(
        "--control-port", help="Control API port (default 8010; 0 = any free one).", show_default=False
    ),
]
WorkersOption = Annotated[
    int | None, typer.Option("--workers", help="Gateway worker processes (default 2).", show_default=False)
]
ModeOption = Annotated[
    str | None, typer.Option("--mode", help="kvpilot = act, passive = only observe.", show_default=False)
]


def _record_folder(name: str) -> Path:
    if not name:  # As a Path it would be the current folder.
        raise StackError("--record is empty: name a folder")
    folder = Path(name).resolve()
    if folder.exists() and not folder.is_dir():
        raise StackError(f"--record {name} is no folder: name one, it is made where there is none")
    return folder


RecordOption = Annotated[
    Path | None,
    typer.Option(
        "--record",
        metavar="FOLDER",
        parser=_record_folder,
        help="Record the traffic, without any text, for `kvpilot sim compare`.",
        show_default=False,
    ),
]


def register(app: typer.Typer) -> None:
    app.command(rich_help_panel=_STACK)(up)
    app.command(rich_help_panel=_STACK)(down)
    app.command(rich_help_panel=_STACK)(serve)
    app.command(rich_help_panel=_STACK)(doctor)
    app.command(rich_help_panel=_STACK)(plugin_path)


def up(
    config: ConfigOption = None,
    state: StateOption = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", "-m", help="smollm2, m4x256, m16k (default), or a path or name.", show_default=False
        ),
    ] = None,
    port: PortOption = None,
    control_port: ControlPortOption = None,
    any_ports: Annotated[
        bool, typer.Option("--any-ports", help="Choose a free port for every service.")
    ] = False,
    workers: WorkersOption = None,
    mode: ModeOption = None,
    record: RecordOption = None,
    max_model_len: Annotated[
        int | None, typer.Option(help="Longest context in tokens (default 17408).", show_default=False)
    ] = None,
    device_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Device pool in tokens (default: one longest context).", show_default=False),
    ] = None,
    host_gb: Annotated[
        float | None, typer.Option(help="Host (DRAM) tier in GB (default 0.5).", show_default=False)
    ] = None,
    disk_gb: Annotated[
        float | None, typer.Option(help="Disk tier in GB (default 2).", show_default=False)
    ] = None,
    plugin: Annotated[
        bool, typer.Option("--plugin", help="Run kvpilot's plug-in inside vLLM: it steers the device pool.")
    ] = False,
    dev: Annotated[
        bool, typer.Option("--dev", help="Open vLLM's development endpoints (cache resets).")
    ] = False,
) -> None:
    """Start vLLM, LMCache and kvpilot here and keep them running until Ctrl-C or `kvpilot down`."""
    from kvpilot.stack.launch import with_free_ports
    from kvpilot.stack.run import run_stack

    settings = load(
        config,
        state,
        gateway={"port": port, "workers": workers},
        coordinator={"port": control_port, "mode": mode, "record": None if record is None else str(record)},
        engine={"model": model, "max_model_len": max_model_len, "plugin": plugin or None, "dev": dev or None},
        lmcache={"host_gb": host_gb, "disk_gb": disk_gb},
    )
    if device_tokens is not None:
        blocks = -(-device_tokens // settings.engine.block_size) + 1
        settings = settings.with_overrides(engine={"device_blocks": blocks})
    if any_ports:
        # A port that is named is meant.
        named = {"gateway": port, "coordinator": control_port}
        settings = with_free_ports(settings).with_overrides(
            **{section: {"port": given} for section, given in named.items() if given is not None}
        )
    run_stack(settings, embedded=True)


def serve(
    engine: Annotated[
        str | None, typer.Option(help="URL of a running vLLM (default: engine.url).", show_default=False)
    ] = None,
    lmcache: Annotated[
        list[str] | None,
        typer.Option(help="HTTP URL of an LMCache node; repeat for several.", show_default=False),
    ] = None,
    lmcache_coordinator: Annotated[
        str | None, typer.Option(help="URL of LMCache's coordinator.", show_default=False)
    ] = None,
    kv_events: Annotated[
        str | None,
        typer.Option(help="ZMQ endpoint of vLLM's KV events, e.g. tcp://127.0.0.1:5557.", show_default=False),
    ] = None,
    config: ConfigOption = None,
    state: StateOption = None,
    port: PortOption = None,
    control_port: ControlPortOption = None,
    workers: WorkersOption = None,
    mode: ModeOption = None,
    record: RecordOption = None,
) -> None:
    """Run kvpilot's gateway and coordinator for engines that are already up."""
    from kvpilot.stack.run import run_stack

    settings = load(
        config,
        state,
        gateway={"port": port, "workers": workers},
        coordinator={"port": control_port, "mode": mode, "record": None if record is None else str(record)},
        engine={"url": engine, "kv_events": kv_events},
        lmcache={"nodes": lmcache or None, "coordinator": lmcache_coordinator},
    )
    run_stack(settings, embedded=False)


def plugin_path(
    folder: Annotated[Path, typer.Argument(help="Where to make it.")] = Path(".kvpilot/engine-plugin"),
) -> None:
    """Make the folder that lets a vLLM of your own find kvpilot's plug-in, and print it.

    PYTHONPATH=$(kvpilot plugin-path) KVPILOT=1 vllm serve …
    """
    from kvpilot.stack.plugin_folder import make_plugin_folder

    print(make_plugin_folder(folder.absolute()))


def down(config: ConfigOption = None, state: StateOption = None) -> None:
    """Stop the stack of the state folder; also clears away what one that was killed hard left behind."""
    from kvpilot.stack.down import stop

    print(stop(load(config, state).state_dir))


def doctor(
    engine: Annotated[
        str | None, typer.Option(help="URL of a running vLLM (default: engine.url).", show_default=False)
    ] = None,
    config: ConfigOption = None,
    state: StateOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check this machine, the configuration and, where a stack is up, what it says of itself."""
    from kvpilot.stack.doctor import diagnose, print_report

    findings = diagnose(load(config, state, engine={"url": engine}))
    healthy = print_report(findings, console(soft_wrap=True, highlight=False), as_json=as_json)
    raise typer.Exit(0 if healthy else 1)
