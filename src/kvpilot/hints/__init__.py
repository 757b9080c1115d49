"""Hint dialects: wire JSON and headers in, one vocabulary out. What is malformed is dropped with a reason."""

from kvpilot.hints.registry import DIALECTS, Dialect, read_hints
from kvpilot.hints.result import HintRequest, Hints, Retention

__all__ = ["DIALECTS", "Dialect", "HintRequest", "Hints", "Retention", "read_hints"]
