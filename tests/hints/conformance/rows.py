"""All rows."""

from __future__ import annotations

from tests.hints.conformance import rows_agent_hint, rows_engines, rows_envelope, rows_headers, rows_vendors

ROWS = [
    *rows_agent_hint.ROWS,
    *rows_envelope.ROWS,
    *rows_engines.ROWS,
    *rows_headers.ROWS,
    *rows_vendors.ROWS,
]
