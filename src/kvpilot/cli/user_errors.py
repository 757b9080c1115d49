"""Errors that a user can mend: one line on stderr, exit code 2."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer


@contextmanager
def user_errors(*kinds: type[Exception]) -> Iterator[None]:
    """Turns exceptions of ``kinds`` into one line and exit code 2."""
    try:
        yield
    except kinds as error:
        print(f"kvpilot: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
