"""Errors that a user can mend: one line on stderr, exit code 2."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from kvpilot.cli.output import literal

EXIT_CODE = 2


def tell(error: Exception) -> None:
    """The one line, whatever others contributed to it."""
    print(f"kvpilot: {literal(error)}", file=sys.stderr)


@contextmanager
def user_errors(*kinds: type[Exception]) -> Iterator[None]:
    """Turns exceptions of ``kinds`` into one line and exit code 2."""
    try:
        yield
    except kinds as error:
        tell(error)
        raise typer.Exit(EXIT_CODE) from None
