"""``kvpilot demo``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvpilot.cli.options import OwnStateOption
from kvpilot.cli.output import console
from kvpilot.cli.user_errors import user_errors


def register(app: typer.Typer) -> None:
    app.command(rich_help_panel="Measuring")(demo)


def demo(
    json_file: Annotated[Path, typer.Option("--json", help="Write the results here.")] = Path(
        "out/demo.json"
    ),
    state: OwnStateOption = None,
    answers: Annotated[bool, typer.Option(help="Compare the answers of a real small model too.")] = True,
) -> None:
    """Three coding agents with other tenants beside them, without and with kvpilot. About ten minutes on two cores."""
    from kvpilot.backends.base import BackendError
    from kvpilot.bench.lab import BenchError
    from kvpilot.demo.run import print_result, run_demo
    from kvpilot.replay.client import ControlError
    from kvpilot.replay.run import write_json
    from kvpilot.stack.launch import own_state

    with user_errors(BenchError, ControlError, BackendError), own_state("demo", state) as folder:
        document = run_demo(folder, lambda so_far: write_json(json_file, so_far), answers=answers)
        print_result(document, console(), json_file)
