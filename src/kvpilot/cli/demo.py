"""``kvpilot demo``."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from kvpilot.cli.options import StateOption
from kvpilot.cli.output import console
from kvpilot.cli.user_errors import user_errors


def register(app: typer.Typer) -> None:
    app.command(rich_help_panel="Measuring")(demo)


def demo(
    json_file: Annotated[Path, typer.Option("--json", help="Write the results here.")] = Path(
        "out/demo.json"
    ),
    state: StateOption = None,
    answers: Annotated[
        bool, typer.Option(help="Compare the answers of a real small model too (two minutes more).")
    ] = True,
) -> None:
    """Three coding agents with other tenants beside them, without and with kvpilot. About six minutes."""
    from kvpilot.backends.base import BackendError
    from kvpilot.bench.lab import BenchError
    from kvpilot.demo.run import print_result, run_demo
    from kvpilot.replay.client import ControlError
    from kvpilot.replay.run import write_json

    with (
        user_errors(BenchError, ControlError, BackendError),
        tempfile.TemporaryDirectory(prefix="kvpilot-demo-") as folder,
    ):
        document = run_demo(state or Path(folder), answers=answers)
        write_json(json_file, document)
        print_result(document, console())
