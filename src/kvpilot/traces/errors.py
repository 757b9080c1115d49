"""What readers say when a trace cannot be read."""

from __future__ import annotations


class TraceError(ValueError):
    """A trace file is missing or malformed; the message names file, line and what is wrong."""
