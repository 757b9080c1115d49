"""Hint dialects: wire JSON and headers in, one vocabulary out. What is malformed is dropped with a reason."""

from kvpilot.hints.body import read_body
from kvpilot.hints.registry import BUILT_IN, Dialect, Registry, installed, read_hints
from kvpilot.hints.result import ContextEdit, HintRequest, Hints, Retention

__all__ = [
    "BUILT_IN",
    "ContextEdit",
    "Dialect",
    "HintRequest",
    "Hints",
    "Registry",
    "Retention",
    "installed",
    "read_body",
    "read_hints",
]
