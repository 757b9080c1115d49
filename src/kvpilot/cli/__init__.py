"""The ``kvpilot`` command. Each module of this package adds its commands with ``register(app)``.

Command modules import what they need inside the commands, so that ``kvpilot --help`` stays quick.
"""

from __future__ import annotations

import importlib
import sys
from typing import Annotated

import typer

from kvpilot import __version__
from kvpilot.cli.user_errors import EXIT_CODE, tell
from kvpilot.config import ConfigError
from kvpilot.stack import StackError

COMMAND_MODULES = (
    "kvpilot.cli.stack",
    "kvpilot.cli.inspect",
    "kvpilot.cli.replay",
    "kvpilot.cli.bench",
    "kvpilot.cli.eval",
    "kvpilot.cli.sim",
    "kvpilot.cli.demo",
)
"""In the order in which ``kvpilot --help`` lists their commands."""

app = typer.Typer(
    name="kvpilot",
    help="Agent-aware KV cache control between LLM agents and the engines that serve them.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"kvpilot {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    pass


for _module in COMMAND_MODULES:
    importlib.import_module(_module).register(app)


def main() -> None:
    """Entry point: user errors are one line on stderr and exit code 2."""
    try:
        app(prog_name="kvpilot")
    except (ConfigError, StackError) as error:
        tell(error)
        sys.exit(EXIT_CODE)
    except KeyboardInterrupt:
        sys.exit(130)
