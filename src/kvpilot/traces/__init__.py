"""Readers of recorded agents: three kinds of recordings, one vocabulary, streamed."""

from kvpilot.traces.errors import TraceError
from kvpilot.traces.find import find_trace, find_traces, named_traces, read_trace, trace_name, traces_folder
from kvpilot.traces.model import ToolRun, ToolUse, TraceAgent, TraceCall, TraceMessage, TraceSession
from kvpilot.traces.overlay import Overlay, Placed, overlay

__all__ = [
    "Overlay",
    "Placed",
    "ToolRun",
    "ToolUse",
    "TraceAgent",
    "TraceCall",
    "TraceError",
    "TraceMessage",
    "TraceSession",
    "find_trace",
    "find_traces",
    "named_traces",
    "overlay",
    "read_trace",
    "trace_name",
    "traces_folder",
]
