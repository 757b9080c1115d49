"""Hint dialects: wire JSON and headers in, one vocabulary out. What is malformed is dropped with a reason."""

from kvpilot.hints.registry import BUILT_IN, Dialect, Registry, read_hints, registry
from kvpilot.hints.result import ContextEdit, HintRequest, Hints, Retention

__all__ = [
    "BUILT_IN",
    "ContextEdit",
    "Dialect",
    "HintRequest",
    "Hints",
    "Registry",
    "Retention",
    "read_hints",
    "registry",
]
