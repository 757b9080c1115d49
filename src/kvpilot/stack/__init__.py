"""The embedded stack: start, supervise and stop LMCache, vLLM, kvpilot's coordinator and its gateway."""

from __future__ import annotations


class StackError(RuntimeError):
    """The stack cannot be started or reached; the message is one line and says what to do."""
