"""Options that several commands share, and how they and the configuration become one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvpilot.config import Config, load_config
from kvpilot.stack import StackError


def _folder(name: str) -> Path:
    if not name:  # As a Path it would be the current folder.
        raise StackError("--state is empty: name a folder")
    return Path(name)


ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", "-c", help="TOML file (default: $KVPILOT_CONFIG).", show_default=False),
]
StateOption = Annotated[
    Path | None,
    typer.Option(
        "--state",
        metavar="PATH",
        parser=_folder,
        help="Folder of logs, embedded store and disk tier (default: .kvpilot).",
        show_default=False,
    ),
]
OwnStateOption = Annotated[
    Path | None,
    typer.Option(
        "--state",
        metavar="PATH",
        parser=_folder,
        help="Folder of logs, embedded store and disk tier (default: a temporary one, removed at the end).",
        show_default=False,
    ),
]
"""Of commands that start a stack, use it and stop it."""
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
JsonFileOption = Annotated[
    Path | None, typer.Option("--json", help="Write the results here.", show_default=False)
]
"""Of commands that measure."""


def load(config: Path | None, state: Path | None = None, **sections: dict[str, Any]) -> Config:
    """The configuration with the options that were given (those that are None were not)."""
    given = {name: {k: v for k, v in values.items() if v is not None} for name, values in sections.items()}
    if state is not None:
        given["state"] = {"dir": str(state)}
    return load_config(config).with_overrides(**given)
